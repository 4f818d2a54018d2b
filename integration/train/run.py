"""A run's folder: made anew for each run, found again by ``--resume``.

``outputs/<config>/<start>/`` holds ``job.json`` (what was asked), ``checkpoint/step-N/``,
``tb/``, ``logs/`` and, once training has ended, ``end.json``.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from integration.ground import files
from integration.ground.errors import UserError
from integration.ground.machine import look
from integration.ground.paths import outputs_dir
from integration.jobs import checkpoints
from integration.jobs.handover import END_FILE

JOB_FILE = "job.json"


@dataclass(frozen=True, slots=True)
class Job:
    """What a run was asked to do; a resumed run starts from it."""

    config: str
    data: str
    tokenizer: str
    options: tuple[str, ...]  # TorchTitan's, in the order given
    contributions: tuple[str, ...]
    layers: int | None = None  # where the config is cut
    experts: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One run's folder."""

    folder: Path

    @classmethod
    def new(cls, config: str) -> "Run":
        """Make a folder of its own; two runs started in the same second get two."""
        parent = outputs_dir() / config
        parent.mkdir(parents=True, exist_ok=True)
        start = datetime.now().strftime("%Y%m%d-%H%M%S")
        for attempt in range(100):
            folder = parent / (f"{start}-{attempt}" if attempt else start)
            with suppress(FileExistsError):
                folder.mkdir()
                return cls(folder)
        raise UserError(f"no free name for a run under {parent}/{start}; try again in a second")

    @classmethod
    def latest(cls, config: str) -> "Run":
        """Return the newest run of ``config`` that has a checkpoint.

        Raises:
            UserError: there is none.
        """
        parent = outputs_dir() / config
        for job in sorted(parent.glob(f"*/{JOB_FILE}"), reverse=True):
            run = cls(job.parent)
            if run.checkpoints():
                return run
        raise UserError(
            f"--resume found no run of {config} with a checkpoint under {parent}; "
            f"start one with: integration train {config}"
        )

    def write(self, job: Job) -> None:
        files.write_json(self.folder / JOB_FILE, asdict(job), indent=1)

    def job(self) -> Job:
        try:
            values: dict[str, Any] = json.loads((self.folder / JOB_FILE).read_text())
            lists: dict[str, Any] = {
                name: tuple(values[name]) for name in ("options", "contributions")
            }
            return Job(**values | lists)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.folder / JOB_FILE} cannot be read: {error!r}") from error

    @property
    def checkpoints_folder(self) -> Path:
        return self.folder / "checkpoint"

    def checkpoints(self) -> list[int]:
        """Return the steps of complete checkpoints, ascending."""
        return checkpoints.complete(self.checkpoints_folder)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints_folder / f"step-{step}"

    def forget_end(self) -> None:
        (self.folder / END_FILE).unlink(missing_ok=True)

    def end(self) -> dict | None:
        """Return how training ended (``step``, ``stopped``, ``peak_host_bytes``), if it did."""
        return look(lambda: json.loads((self.folder / END_FILE).read_text()), None)
