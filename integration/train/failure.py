"""Find the one sentence that says why a run failed, among the output of all ranks."""

import json
import re
import signal
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

from integration.ground.machine import look

# torchrun's report of the rank that failed first, by exit code or signal.
FAILED = r".*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)"
ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):" + FAILED, re.DOTALL)
ANY_FAILED = re.compile(rf"^\[\d+\]:\n{FAILED} \(pid: (\d+)\)", re.DOTALL | re.MULTILINE)
# A process that torchrun itself has ended, once another one had failed.
CLOSED = re.compile(r"Sending process (\d+) closing signal")
# How a rank may end because a peer did: torchrun's signal, and an abort by NCCL's watchdog.
FOLLOWS = (-signal.SIGTERM, -signal.SIGABRT)
# What c10d puts before each line of a rank's standard error.
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
TRACEBACK = "Traceback (most recent call last):"
# Neither says why a run failed: a warning with its line of code, and a line of torch's C++ log.
NOISE = re.compile(r"\S+:\d+: \w*Warning: |\s*warnings\.warn\(|\[?(rank\d+\]:)?\[[WI]\d{4} ")


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
        last = [line.strip() for line in agent_output.splitlines() if line.strip()]
        said = _exception(agent_output) or (last or ["torchrun ended without a word"])[-1]
        return Failure(None, _shorten(said))
    rank, code = _killed(agent_output) or (int(cause[1]), int(cause[2]))
    if code == -signal.SIGTERM and (errors := _oldest_first(logs, "*/error.json")):
        # Torchrun sends it to the survivors of a dead rank, and may see one of them end first.
        raised = errors[0].parent
        return Failure(int(raised.name), _words_of(raised) or f"rank {raised.name} raised")
    if code < 0:
        why = f"rank {rank} was killed by signal {-code}"
        if code == -9:
            why += " (the kernel does that when the host's memory runs out)"
        return Failure(rank, why)
    return Failure(
        rank, _words_of(rank_folder(logs, rank)) or f"rank {rank} ended with code {code}"
    )


def _killed(agent_output: str) -> tuple[int, int] | None:
    """Return rank and exit code of one that was killed from outside; None where none was.

    Its peers raise at once, as it no longer answers. Torchrun orders failures by whole seconds, of
    which a peer's begins when it raised and that of a killed rank when torchrun saw it: it may take
    the peer for the first.
    """
    closed = set(CLOSED.findall(agent_output))
    found = ((int(rank), int(code), pid) for rank, code, pid in ANY_FAILED.findall(agent_output))
    killed = ((r, c) for r, c, pid in found if c < 0 and c not in FOLLOWS and pid not in closed)
    return next(killed, None)


def rank_folder(logs: Path, rank: int) -> Path | None:
    """Return torchrun's log folder of ``rank`` in its newest attempt."""
    found = _oldest_first(logs, str(rank))
    return found[-1] if found else None


def _oldest_first(logs: Path, name: str) -> list[Path]:
    return sorted(logs.glob(f"*/attempt_*/{name}"), key=lambda path: path.stat().st_mtime)


def _words_of(folder: Path | None) -> str | None:
    if folder is None:
        return None
    errors = folder / "stderr.log"
    text = look(lambda: _recorded(folder / "error.json"), "")
    text = text or look(lambda: errors.read_text(encoding="utf-8", errors="replace"), "")
    if "No space left on device" in text:
        return "the disk is full"
    return words(text)


def words(text: str) -> str | None:
    """Return the sentence that says why a process failed, out of its standard error."""
    if found := _exception(text):
        return _shorten(found)
    # Not an exception: a complaint of the option parser, say, drawn in a box with a title.
    told = (line for line in _plain(text) if not NOISE.match(line) and not line.startswith("╭"))
    lines = [line.strip(" │╮╰╯─") for line in told]
    return _shorten(" ".join(line for line in lines if line)) or None


def _exception(text: str) -> str | None:
    """Return the exception of the last stack trace: of several, what was raised in the end.

    A ``CheckpointException`` has the traces of its ranks' exceptions in its words; then these tell.
    """
    _, found, last = "\n".join(_plain(text)).rpartition(TRACEBACK)
    # Frames are indented, and so is their code; what follows, up to a blank line, is the exception.
    lines = dropwhile(lambda line: line.startswith(" "), last.splitlines()[1:])
    raised = list(takewhile(lambda line: line and not NOISE.match(line), lines))
    return " ".join(raised) if found and raised else None


def _plain(text: str) -> list[str]:
    return RANK_PREFIX.sub("", text).splitlines()


def _recorded(error: Path) -> str:
    message = json.loads(error.read_text())["message"]
    return message if isinstance(message, str) else message["message"]


def _shorten(text: str, limit: int = 600) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
