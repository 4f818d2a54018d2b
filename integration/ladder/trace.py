"""What of a step's communication and copies no computation hides, from a Chrome trace. No torch."""

import json
from collections.abc import Iterable
from pathlib import Path

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
    3
    """
    cover = list(cover)
    return _length(_merge([*intervals, *cover])) - _length(_merge(cover))


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
