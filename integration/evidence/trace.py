"""Trim a torch.profiler trace to GPU streams and step annotations.

    python -m integration.evidence.trace IN.json[.gz] evidence/trace-NAME.json.gz

A profile of one step is 100 MB of host events; what ran on the GPU, when, is 1 MB. The trimmed
file is a Chrome trace as before, for Perfetto too, with the patches that it was made on.
"""

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import Positional

from integration.evidence.record import unpacked
from integration.ground.errors import UserError
from integration.ground.files import replace_all

LIMIT = 1_000_000  # bytes, compressed
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ANNOTATIONS = ("user_annotation", "gpu_user_annotation")
STEP = "ProfilerStep#"
NAME = 60  # characters kept of a kernel's name; templates make thousands
Event = dict[str, Any]


def trim(events: Iterable[Event], limit: int = LIMIT) -> tuple[list[Event], float]:
    """Return the events to keep, and below how many microseconds neighbours were joined.

    Where they are too many, kernels shorter than 1, 2, 4, … us are joined with those beside them
    on their stream, until the file is smaller than ``limit`` bytes.

    Raises:
        ValueError: nothing ran on a GPU, or too much remains.
    """
    kept = list(_kept(events))
    timed = [e for e in kept if e["ph"] == "X"]
    if not any(e["cat"] in GPU for e in timed):
        raise ValueError("no kernel or copy in it: it was recorded without ProfilerActivity.CUDA")
    start = min(e["ts"] for e in timed)
    for event in timed:
        event["ts"] = round(event["ts"] - start, 3)
    shortest = 0.0
    while len(packed({"traceEvents": kept})) > limit:
        shortest = 2 * shortest or 1.0
        if shortest > 1e6:
            raise ValueError(f"{limit} bytes do not hold it: profile fewer steps")
        kept = list(_joined(kept, shortest))
    return kept, shortest


def trimmed(file: Path, patches: dict[str, str], command: str) -> dict[str, Any]:
    """Return the trace in ``file``, trimmed, with the patches that it was made on.

    Raises:
        UserError: it is no trace, or ``trim`` refuses it.
    """
    try:
        events, shortest = trim(read(file)["traceEvents"])
    except ValueError as error:
        raise UserError(
            f"expected kernels in {file} that fit into {LIMIT / 1e6:g} MB, found: {error}; "
            f"nothing was written"
        ) from None
    return {
        "patches": patches,
        "command": command,
        "joined_below_us": shortest,
        "traceEvents": events,
    }


def packed(trace: dict[str, Any]) -> bytes:
    """Return the file's bytes: the same for the same trace."""
    return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0)


def read(file: Path) -> dict[str, Any]:
    """Return a Chrome trace, compressed or not.

    Raises:
        UserError: it is none.
    """
    try:
        trace = json.loads(unpacked(file))
        trace = {"traceEvents": trace} if isinstance(trace, list) else trace
        trace["traceEvents"][0]["ph"]
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"expected a Chrome trace, as torch.profiler writes it, in {file}, found: {error!r}; "
            f"nothing was written"
        ) from None
    return trace


def _kept(events: Iterable[Event]) -> Iterator[Event]:
    named: list[Event] = []
    rows = set()
    for event in events:
        if event.get("ph") == "M" and event.get("name") in ("process_name", "thread_name"):
            named.append(event)
        elif event.get("ph") == "X" and event.get("cat") in (*GPU, *ANNOTATIONS):
            rows.add((event["pid"], event["tid"]))
            slim = {key: event[key] for key in ("ph", "cat", "pid", "tid", "ts", "dur")}
            name = str(event["name"])
            slim["name"] = name if len(name) <= NAME else name[: NAME - 1] + "…"
            slim["ts"], slim["dur"] = float(event["ts"]), round(float(event["dur"]), 3)
            yield slim
    pids = {pid for pid, _ in rows}
    for event in named:
        whole = event["name"] == "process_name" and event["pid"] in pids
        if whole or (event["pid"], event.get("tid")) in rows:
            yield {key: event[key] for key in ("ph", "name", "pid", "tid", "args") if key in event}


def _joined(events: Iterable[Event], shortest: float) -> Iterator[Event]:
    """Join each kernel shorter than ``shortest`` with the one before, if that is as near."""
    last: dict[tuple, Event] = {}
    for event in sorted(events, key=lambda e: (e["ph"] == "X", e.get("ts", 0.0))):
        if event["ph"] != "X" or event["cat"] not in GPU:
            yield event
            continue
        row = (event["pid"], event["tid"], event["cat"], is_communication(event))
        before = last.get(row)
        if before is not None:
            gap = event["ts"] - before["ts"] - before["dur"]
            if gap < shortest and min(event["dur"], before["dur"]) < shortest:
                before["dur"] = round(event["ts"] + event["dur"] - before["ts"], 3)
                before["joined"] = before.get("joined", 1) + event.get("joined", 1)
                before["name"] = f"{before['joined']} {_WORDS[event['cat']]}"
                continue
        last[row] = event
        yield event


_WORDS = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "memsets"}


def is_communication(event: Event) -> bool:
    """Tell NCCL's kernels from others."""
    return event["cat"] == "kernel" and event["name"].lower().startswith("nccl")


def _patches(file: Path, names: str | None) -> dict[str, str]:
    """Return name -> sha256 of the patches that the profiled run had.

    Raises:
        UserError: the run does not say, and ``names`` neither.
    """
    from integration.patchset import repository
    from integration.train.run import JOB_FILE, Run

    everything = repository.load()
    if names is None:
        run = next((f for f in file.resolve().parents if (f / JOB_FILE).is_file()), None)
        if run is None:
            raise UserError(
                f"expected {file} below a run's folder, found no {JOB_FILE} above it; which "
                f"patches it shows is not known: add --patches full, pristine or NAME,NAME"
            )
        chosen = Run(run).job().contributions
    elif names == "full":
        chosen = tuple(c.name for c in everything)
    else:
        chosen = () if names == "pristine" else tuple(names.split(","))
    return {c.name: c.sha256 for c in repository.find(everything, chosen)}


def main(
    source: Positional[Path],
    target: Positional[Path],
    patches: str | None = None,
    command: str = "",
) -> None:
    """Trim a trace to less than 1 MB, bound to the patches that it was made on.

    Args:
        source: A Chrome trace of torch.profiler.
        target: The file to write, evidence/trace-NAME.json.gz.
        patches: The set: full, pristine, or NAME,NAME; that of the trace's run if none is given.
        command: What was profiled, to be kept in the file.
    """
    kept = trimmed(source, _patches(source, patches), command)
    data, shortest = packed(kept), kept["joined_below_us"]
    replace_all(target.parent, {target.name: data})
    joined = f", kernels below {shortest:g} us joined" if shortest else ""
    print(f"{target}: {len(data) / 1e3:,.0f} kB, {len(kept['traceEvents']):,} events{joined}")


if __name__ == "__main__":
    import sys

    try:
        tyro.cli(main)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
