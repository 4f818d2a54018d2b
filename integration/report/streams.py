"""How long each GPU stream was busy in a step, by what it did, from traces kept as evidence.

What ran when is for the trace viewer: Perfetto opens the kept files as they are.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from integration.evidence import trace as traces
from integration.ground import paths
from integration.report.charts import Bar, Bars
from integration.report.ladder import Record, members
from integration.report.page import Commands, Missing, Section, first_open

PATTERN = "evidence/trace-*.json.gz"
COMMAND = (
    "integration train slice -- --profiler.enable_profiling, then "
    "python -m integration.evidence.trace TRACE integration/evidence/trace-NAME.json.gz"
)
HOW = (
    "How long each GPU stream was busy in a step, and with what. Perfetto (ui.perfetto.dev) opens "
    "the files and shows what ran when."
)
WHOLE = "the whole step"


def files() -> list[Path]:
    """Return the trimmed traces that are kept as evidence, of contributions and of the set."""
    roots = ("integration", "pytorch_contrib/*", "torchtitan_contrib/*")
    return sorted(f for root in roots for f in paths.REPO.glob(f"{root}/{PATTERN}"))


def section(found: Sequence[Path], records: Sequence[Record] = ()) -> Section:
    """Return one chart a trace.

    Args:
        records: ladders, merged; their traces come first, in their order.
    """
    if not found:
        what = "No trimmed profile is kept: what each GPU stream runs in a step, before and after."
        return Section(title="Step by stream", blocks=[Missing(what=what, command=COMMAND)])
    read = [(file, traces.read(file)) for file in found]
    read.sort(key=lambda pair: _place(pair[0], pair[1].get("command") or "", records))
    charts, made = [], []
    for file, trace in read:
        charts.append(_chart(file, trace))
        if trace.get("command"):
            made.append((charts[-1].title, trace["command"]))
    blocks = [HOW, Commands(made), *first_open(charts, "each trace")]
    return Section(title="Step by stream", blocks=blocks)


def _place(file: Path, command: str, records: Sequence[Record]) -> tuple[int, int, str]:
    """Return which record a trace is of, which rung of it, and its folder."""
    for number, record in enumerate(records):
        rungs = [(m["command"], rung["label"]) for m in members(record) for rung in m["rungs"]]
        for index, (made, label) in enumerate(rungs):
            if command == f"{made}: {label}":
                return number, index, str(file.parent)
    return len(records), 0, str(file.parent)


def _chart(file: Path, trace: dict[str, Any]) -> Bars:
    begin, end = _step(trace["traceEvents"])
    busy = {WHOLE: {WHOLE: end - begin}} | _busy(trace["traceEvents"], begin, end)
    rows = [Bar(label=k, parts=v, text=_ms(sum(v.values()))) for k, v in busy.items()]
    name = file.name.removeprefix("trace-").removesuffix(".json.gz").replace("-", " ")
    bound = len(trace["patches"])
    patches = f"with {bound} patch{'es' * (bound > 1)}" if bound else "pristine"
    note = f"{_shown(file)}, {patches}."
    if trace.get("joined_below_us"):
        note += f" Kernels below {trace['joined_below_us']:g} us are joined."
    return Bars(title=name[:1].upper() + name[1:], bars=rows, form=_ms, note=note)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:,.1f} ms"


def _shown(file: Path) -> str:
    return file.relative_to(paths.REPO).as_posix()


def _step(events: Iterable[dict]) -> tuple[float, float]:
    """Return begin and end, in us, of the last whole step, or of all that ran."""
    timed = [e for e in events if e["ph"] == "X"]
    steps = [e for e in timed if e["name"].startswith(traces.STEP)]
    hosts = [e for e in steps if e["cat"] == "user_annotation"]
    chosen = (hosts or steps or timed)[-1:] if steps else timed
    return min(e["ts"] for e in chosen), max(e["ts"] + e["dur"] for e in chosen)


def _busy(events: Sequence[dict], begin: float, end: float) -> dict[str, dict[str, float]]:
    """Return stream -> kind -> us within the step; a stream runs one thing after the other."""
    rows = _row_names(events)
    busy: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        kind = _kind(event) if event["ph"] == "X" else None
        inside = min(event["ts"] + event["dur"], end) - max(event["ts"], begin) if kind else 0.0
        if kind and inside > 0:
            busy[rows[event["pid"], event["tid"]]][kind] += inside
    return {row: dict(busy[row]) for row in sorted(busy, key=_numbers)}


def _numbers(row: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", row)]


def _kind(event: dict) -> str | None:
    name = event["name"]
    match event["cat"]:
        case "kernel":
            return "communication" if traces.is_communication(event) else "compute"
        case "gpu_memcpy" | "gpu_memset":
            ways = {"HtoD": "copy to the GPU", "DtoH": "copy to the host"}
            return next((kind for way, kind in ways.items() if way in name), "other copy")
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
