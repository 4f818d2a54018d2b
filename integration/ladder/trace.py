"""Files that ranks leave for the ladder, and what no computation hides in their trace. No torch."""

import json
from collections.abc import Iterable
from pathlib import Path

RESULT_FILE = "measured.json"
TRACE_FILE = "trace-{rank}.json"
SNAPSHOT_FILE = "snapshot-{rank}.pickle"
# What the ladder keeps of them, beside its JSON file.
KEPT_TRACE = "{rung}.json.gz"
KEPT_SNAPSHOT = "{rung}.snapshot.pickle.gz"

Interval = tuple[float, float]  # begin and end, one unit throughout

MICROSECOND = 1e-6


def exposed(path: Path) -> tuple[float, float]:
    """Return seconds of exposed communication and of exposed copies in a trace of one step.

    Communication is exposed while a NCCL kernel runs and no other kernel does; a copy between host
    and device while no kernel runs at all. A NCCL kernel also runs while it waits for a peer.
    """
    communication, compute, copies = [], [], []
    for event in json.loads(path.read_text())["traceEvents"]:
        kind, name = event.get("cat"), event.get("name", "")
        if kind not in ("kernel", "gpu_memcpy"):
            continue
        interval = (event["ts"], event["ts"] + event["dur"])
        if kind == "kernel":
            (communication if "nccl" in name.lower() else compute).append(interval)
        elif "HtoD" in name or "DtoH" in name:
            copies.append(interval)
    return (
        uncovered(communication, compute) * MICROSECOND,
        uncovered(copies, [*compute, *communication]) * MICROSECOND,
    )


def uncovered(intervals: Iterable[Interval], cover: Iterable[Interval]) -> float:
    """Return how long at least one of ``intervals`` runs and none of ``cover`` does.

    >>> uncovered([(0, 4), (2, 6)], [(1, 3), (5, 9)])
    3.0
    """
    cover = list(cover)
    return _covered([*intervals, *cover]) - _covered(cover)


def _covered(intervals: Iterable[Interval]) -> float:
    """Return how long at least one of ``intervals`` runs."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
