"""Find the one sentence that says why a run failed, among the output of all ranks."""

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

# torchrun's report of the rank that failed first, by exit code or signal.
ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL
)
EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b: .+", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Failure:
    """The rank that failed first, and its words."""

    rank: int | None
    sentence: str


def diagnose(logs: Path, agent_output: str) -> Failure:
    """Return the first failure of a run.

    Args:
        logs: torchrun's ``--log-dir``; each rank leaves ``stdout.log``, ``stderr.log`` and, if it
            raised inside the trainer, ``error.json``.
        agent_output: what torchrun itself printed.
    """
    cause = ROOT_CAUSE.search(agent_output)
    if cause is None:
        last = [line for line in agent_output.strip().splitlines() if line.strip()]
        found = EXCEPTION.findall(agent_output)
        return Failure(None, (found or last or ["torchrun ended without a word"])[-1].strip())
    rank, code = int(cause[1]), int(cause[2])
    if code == -signal.SIGTERM and (raised := _first_to_raise(logs)) is not None:
        # Torchrun sends it to the survivors of a dead rank, and may see one of them end first.
        return Failure(int(raised.name), _words_of(raised) or f"rank {raised.name} raised")
    if code < 0:
        why = f"rank {rank} was killed by signal {-code}"
        if code == -9:
            why += " (the kernel does that when the host's memory runs out)"
        return Failure(rank, why)
    return Failure(
        rank, _words_of(rank_folder(logs, rank)) or f"rank {rank} ended with code {code}"
    )


def rank_folder(logs: Path, rank: int) -> Path | None:
    """Return torchrun's log folder of ``rank`` in its newest attempt."""
    found = sorted(logs.glob(f"*/attempt_*/{rank}"), key=lambda f: f.stat().st_mtime)
    return found[-1] if found else None


def _first_to_raise(logs: Path) -> Path | None:
    """Return the folder of the rank that was the first to leave an ``error.json``."""
    found = sorted(logs.glob("*/attempt_*/*/error.json"), key=lambda f: f.stat().st_mtime)
    return found[0].parent if found else None


def _words_of(folder: Path | None) -> str | None:
    if folder is None:
        return None
    text = ""
    error = folder / "error.json"
    if error.exists():
        message = json.loads(error.read_text())["message"]
        text = message if isinstance(message, str) else message["message"]
    text = text or _read(folder / "stderr.log")
    if "No space left on device" in text:
        return "the disk is full"
    if found := EXCEPTION.findall(text):
        return _shorten(found[-1])
    # Not an exception: a complaint of the option parser, say, drawn in a box.
    lines = [line.strip(" │╭╮╰╯─") for line in text.splitlines()]
    return _shorten(" ".join(line for line in lines if line)) or None


def _shorten(text: str, limit: int = 600) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
