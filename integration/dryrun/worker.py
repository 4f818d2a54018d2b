"""The process of a dry run: ``python -m integration.dryrun.worker REQUEST RESULT``.

It runs on the overlay of the set that was asked for, and writes what it found as JSON: first the
placements, then, over them, all.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan.trainer import Trainer

from integration.dryrun import checks, memory, muon_plan, placements
from integration.dryrun.recorder import Recorder
from integration.dryrun.request import Request
from integration.dryrun.trainer import DryTrainer
from integration.ground import files
from integration.ground.machine import peak_resident_set


class _EnoughError(BaseException):
    """Only the placements were asked for. The trainer's constructor reports an ``Exception`` as a
    failure and takes ``sys.exit(0)`` for its own end."""


def main(request_file: str, result_file: str) -> None:
    """Run the request."""
    request = Request.read(Path(request_file))
    found: dict[str, Any] = {"refused": ""}
    result = Path(result_file)

    def note(phase: str) -> None:
        found.setdefault("cost", {})[phase] = {
            "seconds": time.time() - request.started,
            "processor_seconds": time.process_time(),
            "peak_host_bytes": peak_resident_set(),
        }
        files.write_json(result, found)

    def parallelised(parts: Sequence, config: Trainer.Config) -> None:
        found["placements"] = placements.rows(parts)
        found["host"] = memory.host(parts, config, request.rank, job.ranks)
        found["checks"] = [asdict(check) for check in checks.of_placements(job, parts)]
        note("placements")
        if request.placements:
            raise _EnoughError

    job = request.job()
    try:
        trainer = DryTrainer(job, request.rank, parallelised)
    except _EnoughError:
        return
    parts, optimizers = trainer.model_parts, trainer.optimizers
    kept = [t for part in parts for t in (*part.parameters(), *part.buffers())]
    recorder = Recorder(trainer.axes(), kept)
    trainer.fake_step(recorder.watching(), recorder.during)
    found["collectives"] = recorder.rows()
    found["muon_mean_bytes"] = muon_plan.read(optimizers).mean_bytes
    found["memory"] = memory.state(parts, optimizers)
    found["peaks"] = recorder.live.peaks
    found["checks"] += [asdict(check) for check in checks.of_step(job, parts, optimizers, recorder)]
    note("whole")


if __name__ == "__main__":
    main(*sys.argv[1:])
