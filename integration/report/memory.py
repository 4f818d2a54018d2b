"""Memory: what each stream's pool holds, measured, and what the 1T job needs, planned."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.ground.units import size
from integration.patchset.patch import Contribution
from integration.report import ladder
from integration.report.charts import Bar, Bars, Chart
from integration.report.merge import members
from integration.report.page import Beside, Block, Commands, Missing, Section, first_open

LIVE, CACHED = "live", "cached"
NOTE = (
    "A pool serves one stream: what is cached in it, freed but kept, no other stream can use. Live "
    "and cached are what the allocator got from the driver."
)


def pools(records: Sequence[ladder.Record], contributions: Sequence[Contribution]) -> Section:
    """Return a chart for each ladder and each benchmark that took pools apart."""
    charts: list[Chart] = []
    made: list[tuple[str, str]] = []
    for record in records:
        rows = []
        held = [r for r in record["rungs"] if r["runs"] and r["runs"][-1].get("pools")]
        climbed = [r for r in held if r["kind"] != "without"]
        # Of those added one by one, first and last; those between are in the ladder's own file.
        merged = len(members(record)) > 1
        for rung in climbed if merged else [*climbed[:1], *climbed[1:][-1:]]:
            rows.append(Bar(label=rung["label"]))
            streams = rung["runs"][-1]["pools"].items()
            rows += [_bar(stream, h[LIVE], h[CACHED]) for stream, h in streams]
        if rows:
            name = f"Ladder: {ladder.title(record)}"
            charts.append(Bars(title=name, bars=rows, form=size, faint=(CACHED,)))
            made += ladder.commands(record)
    for contribution in contributions:
        for file in kept(contribution):
            record = _read(file)
            rows = []
            for arm, found in _at_peak(record):
                rows.append(Bar(label=arm))
                rows += [
                    _bar(stream.replace("_", "-"), h["active"], h["reserved"] - h["active"])
                    for stream, h in sorted(found.items())
                ]
            if rows:
                title = f"{contribution.name}, benchmark, at the peak"
                charts.append(Bars(title=title, bars=rows, form=size, faint=(CACHED,)))
                made.append((title, f"integration bench {contribution.name} --record"))
    if not charts:
        missing = Missing(
            what="No measurement on a GPU took the pools apart.",
            command="integration bench unshard_async_op --record",
        )
        return Section(title="Memory by stream pool", blocks=[missing])
    blocks: list[Block] = [NOTE, Commands(made), *first_open(charts, "ladders and benchmarks")]
    return Section(title="Memory by stream pool", blocks=blocks)


def kept(contribution: Contribution) -> list[Path]:
    """Return the files of the contribution's evidence."""
    return sorted((contribution.folder / "evidence").glob("*.json"))


def budget() -> Section:
    """Return the memory of the 1T job's worst rank by item, from the plan."""
    from integration.jobs.catalog import JUPITER_1T
    from integration.jobs.cluster import load
    from integration.plan.plan import make
    from integration.report import plan as html

    plan = make(JUPITER_1T, load(JUPITER_1T.cluster))
    lead = (
        f"{plan.job.name} on {plan.job.ranks} {plan.cluster.gpu.name}: rank {plan.worst.rank}, the "
        f"worst, by formula, at {plan.worst.moment} where the GPU is fullest."
    )
    return Section(
        title="Memory budget of the 1T job",
        blocks=[lead, Beside(tuple(html.memory(plan)))],
        command=f"integration plan {plan.job.name}",
    )


def _bar(label: str, live: float, cached: float) -> Bar:
    text = f"{size(live)} + {size(cached)}" if cached else size(live)
    return Bar(label=label, parts={LIVE: live, CACHED: cached}, text=text)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _at_peak(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Mapping]]:
    """Yield ``(where, stream -> bytes)`` for each ``pools_at_peak`` of a benchmark's JSON.

    Pristine repeats what the patched torch does with the flag off.
    """
    if isinstance(node, dict):
        if isinstance(node.get("pools_at_peak"), dict):
            yield " · ".join(path), node["pools_at_peak"]
        for key, value in node.items():
            if key != "pristine":
                yield from _at_peak(
                    value, path if key == "patched" else (*path, _WORDS.get(key, key))
                )


_WORDS = {"off": "flag off", "on": "flag on"}
