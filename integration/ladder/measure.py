"""Run one rung: torchrun on its overlay until the ranks have written what they measured. No torch.

A rung ends when its figures are there, not when the ranks have said farewell (TorchTitan sleeps two
seconds for that): they are killed, as is one that hangs.
"""

import gzip
import json
import re
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from integration.ground import processes
from integration.ground.paths import cache_dir
from integration.ladder.rungs import Rung
from integration.ladder.trace import (
    KEPT_SNAPSHOT,
    KEPT_TRACE,
    RESULT_FILE,
    SNAPSHOT_FILE,
    TRACE_FILE,
)
from integration.patchset import overlay
from integration.train import launch
from integration.train.failure import diagnose, rank_folder
from integration.train.run import Job, Run

# There is no checkpoint to write: survivors of a dead rank need not wait for one.
SHUTDOWN_SECONDS = 3
# What a hung rank has to write its stack.
STACK_SECONDS = 1.0
MODULE = "integration.ladder"
FRAME = re.compile(r'File "[^"]*", line \d+ in (\S+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What all rungs have in common.

    A rung gets ``timeout`` seconds. ``traces`` is where rank 0's Chrome traces and allocator
    snapshots go, if anywhere.
    """

    job: Job
    ranks: int
    vocab: int
    timeout: float
    traces: Path | None = None


class RungFailedError(Exception):
    """A rung that cannot run; the message is its row's reason."""


def measure(session: Session, rung: Rung, folder: Path) -> dict:
    """Train on the set of ``rung``; return what the ranks measured, as in ``probe.py``.

    Args:
        folder: for the ranks' logs, made here; it stays only where the rung failed.

    Raises:
        RungFailedError: no figures, with the reason in one sentence.
    """
    patched = overlay.build(rung.names)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "logs").mkdir(parents=True)
    run = Run(folder)
    start = launch.Launch(
        run=run,
        job=replace(session.job, options=(*rung.options, *session.job.options)),
        patched=patched,
        ranks=session.ranks,
        vocab=session.vocab,
        module=MODULE,
        shutdown_seconds=SHUTDOWN_SECONDS,
    )
    # What one rung has compiled, the next one finds.
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "inductor")}
    started = time.time()
    result = _run(start, compiled | start.environment(), session.timeout)
    result["start_s"] = result.pop("first_step_at") - started
    if session.traces is not None:
        _keep(folder, session.traces)
    shutil.rmtree(folder, ignore_errors=True)
    return result


def _keep(folder: Path, traces: Path) -> None:
    """Keep what rank 0 left of a rung besides its figures, compressed, under the rung's name."""
    for file, kept in ((TRACE_FILE, KEPT_TRACE), (SNAPSHOT_FILE, KEPT_SNAPSHOT)):
        left = folder / file.format(rank=0)
        if left.exists():
            traces.mkdir(exist_ok=True)
            target = traces / kept.format(rung=folder.name)
            target.write_bytes(gzip.compress(left.read_bytes()))


def _run(start: launch.Launch, env: dict[str, str], timeout: float) -> dict:
    logs, result = start.run.folder / "logs", start.run.folder / RESULT_FILE
    torchrun = start.start(env)
    end = time.monotonic() + timeout
    try:
        while not result.exists():
            ended = torchrun.poll() is not None
            if ended and not result.exists():
                output = (logs / launch.AGENT_LOG).read_text(errors="replace")
                raise RungFailedError(_reason(diagnose(logs, output).sentence))
            if time.monotonic() > end:
                raise RungFailedError(_hang(start.run.folder, timeout))
            time.sleep(0.05)
    finally:
        processes.end(processes.of_run(start.run.folder))
        torchrun.wait()
    return json.loads(result.read_text())


def _reason(sentence: str) -> str:
    return f"out of memory: {sentence}" if "OutOfMemoryError" in sentence else sentence


def _hang(folder: Path, timeout: float) -> str:
    """Say where rank 0 is, by its own stack."""
    for process in processes.of_run(folder):
        if _is_rank(process.pid):
            process.send_signal(signal.SIGUSR2)
    time.sleep(STACK_SECONDS)
    log = (rank_folder(folder / "logs", 0) or folder) / "stderr.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    stack = text.rpartition("(most recent call first):")[2]
    where = list(dict.fromkeys(FRAME.findall(stack)))[:4]
    at = f", rank 0 in {' < '.join(where)}" if where else ""
    return f"killed after {timeout:g} s (--timeout) without an end{at}"


def _is_rank(pid: int) -> bool:
    """A rank has a handler for SIGUSR2 once its trainer is made; another process would die."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR2 - 1) & 1)
