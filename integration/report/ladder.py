"""What each contribution is worth inside the set: the ladder's JSON as charts.

A ladder of one rung (`--only full`) is a figure with nothing beside it. Those of one job that
differ in TorchTitan's options alone are one record, whose rungs are named by the ladders' labels.
"""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.evidence import check
from integration.ground import paths
from integration.ground.units import seconds, size
from integration.ladder.result import KIND, NOT_COMPARED
from integration.ladder.rungs import FULL_SET
from integration.report.charts import Bar, Bars, Chart, Lines
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

Record = Mapping[str, Any]
COMMAND = "integration ladder slice --record"
# More are not read one after the other, and so are closed: rungs of a chart, rows of the table.
MANY, MANY_ROWS = 20, 12
PHASES = {"forward_s": "forward", "backward_s": "backward", "optimizer_s": "optimizer"}
PHASES_TITLE = "Where a step's time goes"
REST = "rest"
# What members of one record may differ in. Not in steps, versions or patches: beside each other,
# their medians are to say what the options do.
FREE = {"command", "date", "label", "measured_patches", "options", "published", "rungs"}
BLANK = ("", NOT_COMPARED)  # a column of these alone is left out
SEEN = 0.005  # of a step: less is rounding


def recorded() -> list[Record]:
    """Return the ladders that are kept as evidence of the set."""
    folder = paths.REPO / "integration" / "evidence"
    return [record for file in sorted(folder.glob("*.json")) if (record := load(file))]


def load(file: Path) -> Record | None:
    """Return a ladder's record, or None where the file is none."""
    found = check.record(file)
    return found if found.get("kind") == KIND else None


def merged(records: Sequence[Record]) -> list[Record]:
    """Return ladders with those of one rung merged where they can be, in the order to be read.

    A merged record has ``members``, the records that it is made of, and ``alone``, the label that
    their rungs have in common. Each of its rungs has ``options``: those that not all have.
    """
    groups: dict[str, list[Record]] = {}
    for number, record in enumerate(records):
        groups.setdefault(_job(record) or str(number), []).append(record)
    found = [_merge(group) if len(group) > 1 else group[0] for group in groups.values()]
    return sorted(found, key=_place)


def members(record: Record) -> Sequence[Record]:
    """Return the ladders that ``record`` is made of, as they were measured."""
    return record.get("members", [record])


def settings(options: Sequence[str]) -> list[str]:
    """Return each option with its value: ``['--a', 'b', '--c', 'd:e']`` -> ``['--a b', '--c',
    'd:e']``; tyro's choice of a class, ``field:class``, stands alone."""
    found: list[str] = []
    open_flag = False
    for word in options:
        if open_flag and not word.startswith("--") and ":" not in word:
            found[-1] += f" {shlex.quote(word)}"
        else:
            found.append(shlex.quote(word))
        open_flag = word.startswith("--") and "=" not in word
    return found


def _job(record: Record) -> str | None:
    """Return what members of one record have in common, or None for a ladder of several rungs."""
    if len(record["rungs"]) != 1:
        return None
    same = {key: value for key, value in record.items() if key not in FREE}
    return json.dumps([same, record["rungs"][0]["label"]], sort_keys=True)


def _merge(group: Sequence[Record]) -> Record:
    """Return one record of ``group``, the slowest rung first; one that did not run is slowest."""
    found = {id(record): settings(record.get("options", ())) for record in group}
    in_all = Counter(setting for each in found.values() for setting in dict.fromkeys(each))
    rungs = []
    for record in group:
        (rung,) = record["rungs"]
        own = [s for s in found[id(record)] if in_all[s] < len(group)]
        label = record.get("label") or " ".join(found[id(record)]) or rung["label"]
        rungs.append((rung | {"label": label, "options": own}, record))
    rungs.sort(key=lambda pair: pair[0]["median"].get("tokens_s_gpu", 0.0))
    return {
        **group[0],
        "label": "",
        "date": " and ".join(sorted({record["date"] for record in group})),
        "alone": group[0]["rungs"][0]["label"],
        "rungs": [rung for rung, _ in rungs],
        "members": [record for _, record in rungs],
    }


def _place(record: Record) -> tuple[bool, bool, bool]:
    """Order: GPUs before CPUs; then ladders of several rungs, those merged, those of one rung."""
    return not record["machine"]["gpus"], len(record["rungs"]) == 1, "members" in record


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
        records: as ``merged`` returns them.
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
    if any(rung["status"] == "ok" for rung in climb):
        charts.append(_rates(record, climb, f"Tokens/s a GPU, {_way(record, climb)}"))
    if published:
        charts.append(_published(published))
    if timed := [r for r in rungs if r["status"] == "ok"]:
        phases = _phases(timed)
        if len(timed) > MANY:
            details.append(Closed(f"{phases.title}: {len(timed)} rungs", [phases]))
        else:
            charts.append(phases)
    if any(rung["status"] == "ok" for rung in without):
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


# Heading -> what a rung that ran shows below it.
COLUMNS: dict[str, Callable[[Record], str]] = {
    "tokens/s": lambda rung: f"{rung['median']['tokens_s_gpu']:,.0f}",
    "step": lambda rung: seconds(rung["median"]["step_s"]),
    "MFU": lambda rung: f"{mfu:.1%}" if (mfu := rung["median"].get("mfu")) else "",
    "exposed comm.": lambda rung: _exposed(rung, "exposed_communication_s"),
    "exposed copies": lambda rung: _exposed(rung, "exposed_copies_s"),
    "peak allocated": lambda rung: _most(rung, "peak_allocated", size),
    "peak reserved": lambda rung: _most(rung, "peak_reserved", size),
    "retries": lambda rung: _most(rung, "alloc_retries", str),
    "peak host": lambda rung: _most(rung, "peak_host", size),
    "numbers": lambda rung: str(rung["numbers"]),
}


def _table(rungs: Sequence[Record]) -> Table:
    rows: list[tuple[str, ...]] = []
    for rung in rungs:
        cells = [form(rung) if rung["status"] == "ok" else "" for form in COLUMNS.values()]
        if rung["status"] != "ok":
            cells[-1] = f"did not run: {rung['reason']}"
        rows.append((rung["label"], *cells, " ".join(rung.get("options", ()))))
    heads = ("rung", *COLUMNS, "options")
    used = [n for n in range(len(heads)) if n == 0 or any(row[n] not in BLANK for row in rows)]
    return Table(
        heads=[heads[n] for n in used],
        rows=[[row[n] for n in used] for row in rows],
        title="Each rung",
    )


def _exposed(rung: Record, key: str) -> str:
    """Return the part of forward and backward that no computation hides."""
    value = rung["median"].get(key)
    return "" if value is None else seconds(value)


def _most(rung: Record, key: str, form: Callable[[Any], str]) -> str:
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
