"""The timeline of a step: what each GPU stream ran when, from trimmed traces kept as evidence."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.evidence import trace as traces
from integration.ground import paths
from integration.report.charts import COLOURS, Chart, Span, timeline
from integration.report.merge import Record, members
from integration.report.page import Block, Commands, Missing, Section

PATTERN = "evidence/trace-*.json.gz"
COMMAND = (
    "integration train slice -- --profiler.enable_profiling, then "
    "python -m integration.evidence.trace TRACE integration/evidence/trace-NAME.json.gz"
)
HOW = "What each GPU stream runs in a step. Drag to zoom, double-click to return."
ANNOTATION = "annotated on the host"
KINDS = {
    "compute": COLOURS[0],
    "communication": COLOURS[1],
    "copy to the GPU": COLOURS[2],
    "copy to the host": COLOURS[3],
    "other copy": COLOURS[7],
    ANNOTATION: COLOURS[5],
}
MICROSECOND = 1e-6
# A chart 1,000 pixels wide shows no gap that is smaller than this share of it.
VISIBLE = 1 / 1500
# Not FSDP2's, one a layer.
ANNOTATED = re.compile(r"^(?!FSDP).*(optimizer|forward|backward)", re.IGNORECASE)


HOST = "host"


@dataclass(slots=True)
class _Piece:
    """Neighbours on a row, in us from the step's begin."""

    row: str
    kind: str
    begin: float
    end: float
    count: int
    name: str


def files() -> list[Path]:
    """Return the trimmed traces that are kept as evidence, of contributions and of the set."""
    roots = ("integration", "pytorch_contrib/*", "torchtitan_contrib/*")
    return sorted(f for root in roots for f in paths.REPO.glob(f"{root}/{PATTERN}"))


def section(found: Sequence[Path], records: Sequence[Record] = ()) -> Section:
    """Return one timeline a trace; those to be compared, of one ladder or folder, have one scale.

    Args:
        records: ladders, merged; their traces come first, in their order.
    """
    if not found:
        what = "No trimmed profile is kept: what each GPU stream runs in a step, before and after."
        return Section(title="Step timeline", blocks=[Missing(what=what, command=COMMAND)])
    read = [(file, traces.read(file)) for file in found]
    places = {file: _place(file, trace.get("command") or "", records) for file, trace in read}
    read.sort(key=lambda pair: places[pair[0]])
    steps = {file: _step(trace["traceEvents"]) for file, trace in read}
    charts: list[Block] = []
    made = []
    for file, trace in read:
        start, _ = steps[file]
        beside = [steps[f] for f in steps if places[f][::2] == places[file][::2]]
        chart = _chart(file, trace, start, max(end - begin for begin, end in beside))
        charts.append(chart)
        if trace.get("command"):
            made.append((chart.title, trace["command"]))
    return Section(title="Step timeline", blocks=[HOW, Commands(made), *charts])


def _place(file: Path, command: str, records: Sequence[Record]) -> tuple[int, int, str]:
    """Return which record a trace is of, which rung of it, and its folder."""
    for number, record in enumerate(records):
        rungs = [(m["command"], rung["label"]) for m in members(record) for rung in m["rungs"]]
        for index, (made, label) in enumerate(rungs):
            if command == f"{made}: {label}":
                return number, index, str(file.parent)
    return len(records), 0, str(file.parent)


def _chart(file: Path, trace: dict[str, Any], start: float, widest: float) -> Chart:
    spans = list(_spans(trace["traceEvents"], start, widest))
    name = file.name.removeprefix("trace-").removesuffix(".json.gz").replace("-", " ")
    bound = len(trace["patches"])
    patches = f"with {bound} patch{'es' * (bound > 1)}" if bound else "pristine"
    note = f"{_shown(file)}, {patches}."
    if trace.get("joined_below_us"):
        note += f" Kernels below {trace['joined_below_us']:g} us are joined."
    return timeline(name[:1].upper() + name[1:], spans, widest * MICROSECOND, KINDS, note=note)


def _shown(file: Path) -> str:
    return file.relative_to(paths.REPO).as_posix()


def _step(events: Iterable[dict]) -> tuple[float, float]:
    """Return begin and end, in us, of the last whole step, or of all that ran."""
    timed = [e for e in events if e["ph"] == "X"]
    steps = [e for e in timed if e["name"].startswith(traces.STEP)]
    hosts = [e for e in steps if e["cat"] == "user_annotation"]
    chosen = (hosts or steps or timed)[-1:] if steps else timed
    return min(e["ts"] for e in chosen), max(e["ts"] + e["dur"] for e in chosen)


def _spans(events: Sequence[dict], start: float, widest: float) -> Iterable[Span]:
    """Yield what is to be drawn: neighbours of one kind between which no gap is seen, as one."""
    rows = _row_names(events)
    smallest = widest * VISIBLE
    pieces: list[_Piece] = []
    last: dict[tuple[str, str], _Piece] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        kind = _kind(event)
        begin, end = event["ts"] - start, event["ts"] + event["dur"] - start
        if kind is None or end < 0 or begin > widest:
            continue
        row = HOST if kind == ANNOTATION else rows[event["pid"], event["tid"]]
        piece = _Piece(
            row, kind, max(begin, 0.0), min(end, widest), event.get("joined", 1), event["name"]
        )
        before = last.get((row, kind))
        if before and kind != ANNOTATION and piece.begin - before.end < smallest:
            before.end, before.count = max(before.end, piece.end), before.count + piece.count
        else:
            last[row, kind] = piece
            pieces.append(piece)
    # The host's row is the frame of reference; then streams in their order.
    pieces.sort(key=lambda p: (p.row != HOST, [int(n) for n in re.findall(r"\d+", p.row)]))
    for p in pieces:
        words = p.name if p.count == 1 else f"{p.count} x {p.kind}, first {p.name}"
        yield Span(p.row, p.kind, p.begin * MICROSECOND, (p.end - p.begin) * MICROSECOND, words)


def _kind(event: dict) -> str | None:
    name = event["name"]
    match event["cat"]:
        case "kernel":
            return "communication" if traces.is_communication(event) else "compute"
        case "gpu_memcpy" | "gpu_memset":
            ways = {"HtoD": "copy to the GPU", "DtoH": "copy to the host"}
            return next((kind for way, kind in ways.items() if way in name), "other copy")
        case "user_annotation" if ANNOTATED.search(name):
            return ANNOTATION
    return None


def _row_names(events: Iterable[dict]) -> dict[tuple, str]:
    """Return (pid, tid) -> ``GPU 0, stream 7``."""
    named = {
        (e["pid"], e["tid"]): e["args"]["name"].strip()
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    gpu = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X" and e["cat"] in traces.GPU}
    several = len({pid for pid, _ in gpu}) > 1
    return {
        row: (f"GPU {row[0]}, " if several else "") + named.get(row, f"stream {row[1]}").strip()
        for row in gpu
    }
