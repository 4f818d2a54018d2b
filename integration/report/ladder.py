"""What each contribution is worth inside the set: the ladder's JSON as charts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration.ground import paths
from integration.ground.units import seconds, size
from integration.ladder.numbers import NOT_COMPARED
from integration.report.charts import Bar, Bars, Chart, Lines
from integration.report.merge import Record, members
from integration.report.page import (
    Beside,
    Block,
    Closed,
    Commands,
    Heading,
    Missing,
    Section,
    Table,
)

COMMAND = "integration ladder slice --record"
FULL_SET = "full set"
# More are not read one after the other, and so are closed: rungs of a chart, rows of the table.
MANY, MANY_ROWS = 20, 12
PHASES = {"forward_s": "forward", "backward_s": "backward", "optimizer_s": "optimizer"}
PHASES_TITLE = "Where a step's time goes"
REST = "rest"
BLANK = ("", NOT_COMPARED)  # a column of these alone is left out
SEEN = 0.005  # of a step: less is rounding
# Part of forward and backward: what no computation hides.
EXPOSED = {"exposed_communication_s": "exposed comm.", "exposed_copies_s": "exposed copies"}


def recorded() -> list[Record]:
    """Return the ladders that are kept as evidence of the set."""
    folder = paths.REPO / "integration" / "evidence"
    found = (load(file) for file in sorted(folder.glob("*.json")))
    return [record for record in found if record]


def load(file: Path) -> Record | None:
    """Return a ladder's record, or None where the file is none."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("kind") == "ladder" else None


def title(record: Record) -> str:
    machine, ranks = record["machine"], record["ranks"]
    gpus = f"{machine['gpus']} x {machine['gpu'].partition(',')[0]}" if machine["gpus"] else "CPU"
    label = f" ({record['label']})" if record.get("label") else ""
    name = (
        f"{record['config']}{label} on {ranks} rank{'s' * (ranks > 1)}, {gpus}, "
        f"{record['tokens_a_step']:,} tokens a step"
    )
    return f"{name}: {_alone(record['alone'])}" if "alone" in record else name


def commands(record: Record) -> list[tuple[str, str]]:
    """Return name and command of each ladder in ``record``."""
    found = members(record)
    named = len(found) > 1
    return [(str(m.get("label") or title(m)) if named else title(m), m["command"]) for m in found]


def section(records: Sequence[Record]) -> Section:
    """Return the ladders; beside the first, the published one.

    Args:
        records: as ``merge.merged`` returns them.
    """
    if not records:
        what = (
            "No ladder: tokens/s with contributions added one by one, and without each, "
            "measured in one session."
        )
        return Section(title="Ladder", blocks=[Missing(what=what, command=COMMAND)])
    published = next((r["published"] for r in records if r.get("published")), None)
    blocks = _blocks(records[0], published)
    # One is read; the others are there to be opened.
    blocks += [Closed(title(record), _blocks(record, None)[1:]) for record in records[1:]]
    return Section(title="Ladder", blocks=blocks)


def _blocks(record: Record, published: Sequence[Record] | None) -> list[Block]:
    rungs = record["rungs"]
    climb = [r for r in rungs if r["kind"] != "without"]
    without = [r for r in rungs if r["kind"] == "without"]
    charts = []
    details: list[Block] = []
    if _any_ran(climb):
        charts.append(_rates(record, climb, f"Tokens/s a GPU, {_way(record, climb)}"))
    if published:
        charts.append(_published(published))
    if timed := [r for r in rungs if r["status"] == "ok"]:
        phases = _phases(timed)
        if len(timed) > MANY:
            details.append(Closed(f"{phases.title}: {len(timed)} rungs", [phases]))
        else:
            charts.append(phases)
    if _any_ran(without):
        # Not where only some contributions were asked for.
        whole = [rung for rung in climb if len(rung["set"]) == len(record["patches"])]
        full = [{**rung, "label": FULL_SET} for rung in whole[-1:]]
        charts.append(_rates(record, [*full, *without], "Tokens/s a GPU, the full set less one"))
    table = _table(rungs)
    closed = len(rungs) > MANY_ROWS
    details.append(Closed(f"Each rung: {len(rungs)} rows", [table]) if closed else table)
    head = [Heading(title(record)), _lead(record), Commands(commands(record))]
    return [*head, *([Beside(tuple(charts))] if charts else []), *details]


def _lead(record: Record) -> str:
    text = (
        f"Medians of {record['steps']} steps in each of {record['rounds']} "
        f"round{'s' * (record['rounds'] > 1)}, after {record['warmup']} of warm-up; torch "
        f"{record['torch']}, TorchTitan {record['torchtitan']}, {record['date']}. "
    )
    if len(record["rungs"]) == 1:
        return text
    if "alone" not in record:
        return f"{text}Losses are equal where the patches' headers say so: see the numbers."
    varied = dict.fromkeys(option for rung in record["rungs"] for option in rung["options"])
    options = ", ".join(f"`{option}`" for option in varied) or "nothing but the label"
    return (
        f"{text}The same job with other options; varied: {options}. No rung's numbers are compared "
        "with another's."
    )


def _alone(label: str) -> str:
    return f"{'the ' * (label == FULL_SET)}{label} alone"


def _way(record: Record, climb: Sequence[Record]) -> str:
    """Return how the rungs that leave nothing out follow each other."""
    if "alone" in record or len(climb) == 1:
        return _alone(record.get("alone", climb[0]["label"]))
    if climb[1]["kind"] == "variant":
        return f"{climb[0]['label']} and variants"
    return "adding one by one"


def _any_ran(rungs: Sequence[Record]) -> bool:
    """Tell whether there is anything to draw; the table says why there is not."""
    return any(rung["status"] == "ok" for rung in rungs)


def _rates(record: Record, rungs: Sequence[Record], name: str) -> Chart:
    """Return a bar a rung; its whisker is the least and the greatest step, as a rate."""
    tokens = record["tokens_a_step"] / record["ranks"]
    rows = []
    for rung in rungs:
        if rung["status"] != "ok":
            rows.append(Bar(label=rung["label"], note=f"did not run: {rung['reason']}"))
            continue
        rate = rung["median"]["tokens_s_gpu"]
        least, most = rung["spread"]["step_s"]
        rows.append(
            Bar(
                label=rung["label"],
                parts={"tokens/s": rate},
                text=f"{rate:,.0f}",
                spread=(tokens / most, tokens / least),
            )
        )
    return Bars(
        title=name,
        bars=rows,
        form="{:,.0f} tokens/s".format,
        note="Thin lines: from the slowest to the fastest step.",
    )


def _published(rows: Sequence[Record]) -> Chart:
    shown = []
    for row in rows:
        low, high = row["tokens_s_gpu"]
        parts = {"before": low, "gained": high - low} if high > low else {"before": low}
        text = f"{low:,.0f} to {high:,.0f}" if high > low else f"{low:,.0f}"
        shown.append(Bar(label=row["label"], parts=parts, text=text))
    return Bars(
        title="Published, tokens/s a GPU",
        bars=shown,
        form="{:,.0f} tokens/s".format,
        faint=("gained",),
        note="384 GH200, a larger model; each pair is before and after, not all of one run.",
    )


def _phases(rungs: Sequence[Record]) -> Chart:
    rows = []
    for rung in rungs:
        median = rung["median"]
        parts = {words: median[key] for key, words in PHASES.items() if median.get(key) is not None}
        rest = median["step_s"] - sum(parts.values())
        if parts and rest > SEEN * median["step_s"]:
            parts[REST] = rest
        rows.append(Bar(label=rung["label"], parts=parts, text=seconds(median["step_s"])))
    rest = any(REST in row.parts for row in rows)
    note = "The rest of a step: what no phase holds, such as clipping gradients." if rest else ""
    return Bars(title=PHASES_TITLE, bars=rows, form=seconds, note=note)


def _table(rungs: Sequence[Record]) -> Table:
    peaks = ("peak allocated", "peak reserved", "retries", "peak host")
    heads = ("rung", "tokens/s", "step", "MFU", *EXPOSED.values(), *peaks, "numbers", "options")
    rows: list[tuple[str, ...]] = []
    for rung in rungs:
        options = " ".join(rung.get("options", ()))
        if rung["status"] != "ok":
            blank = [""] * (len(heads) - 3)
            rows.append((rung["label"], *blank, f"did not run: {rung['reason']}", options))
            continue
        median = rung["median"]
        rows.append(
            (
                rung["label"],
                f"{median['tokens_s_gpu']:,.0f}",
                seconds(median["step_s"]),
                f"{median['mfu']:.1%}" if median.get("mfu") else "",
                *("" if median.get(key) is None else seconds(median[key]) for key in EXPOSED),
                _most(rung, "peak_allocated", size),
                _most(rung, "peak_reserved", size),
                _most(rung, "alloc_retries", str),
                _most(rung, "peak_host", size),
                str(rung["numbers"]),
                options,
            )
        )
    used = [n for n in range(len(heads)) if n == 0 or any(row[n] not in BLANK for row in rows)]
    return Table(
        heads=[heads[n] for n in used],
        rows=[[row[n] for n in used] for row in rows],
        title="Each rung",
    )


def _most(rung: Record, key: str, form: Any) -> str:
    values = [run[key] for run in rung["runs"] if run.get(key) is not None]
    return form(max(values)) if values else ""


def losses(record: Record) -> Chart | None:
    """Return the losses of every rung that ran; rungs whose losses are equal are one line."""
    equal: dict[tuple[float, ...], list[str]] = {}
    for rung in record["rungs"]:
        if rung["runs"] and rung["runs"][0].get("loss"):
            equal.setdefault(tuple(rung["runs"][0]["loss"]), []).append(rung["label"])
    if not equal:
        return None
    series = {
        first + (f" and {len(more)} equal to it" if more else ""): (range(1, len(loss) + 1), loss)
        for loss, (first, *more) in equal.items()
    }
    return Lines(title=f"Ladder: {title(record)}", series=series, x="step", y="loss")
