"""What each contribution is worth inside the set: the ladder's JSON as charts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration import paths
from integration.patchset.effect import seconds, size
from integration.report.charts import Bar, Chart, bars, lines
from integration.report.page import Beside, Block, Missing, Section, Table

Record = Mapping[str, Any]
COMMAND = "integration ladder slice --record"
PHASES = {"forward_s": "forward", "backward_s": "backward", "optimizer_s": "optimizer"}
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
    machine = record["machine"]
    gpus = f"{machine['gpus']} x {machine['gpu'].partition(',')[0]}" if machine["gpus"] else "CPU"
    label = f" ({record['label']})" if record.get("label") else ""
    return f"{record['config']}{label} on {record['ranks']} ranks, {gpus}"


def section(records: Sequence[Record]) -> Section:
    """Return the ladders, each with the published one beside it."""
    if not records:
        what = (
            "No ladder: tokens/s with contributions added one by one, and without each, "
            "measured in one session."
        )
        return Section(title="Ladder", blocks=[Missing(what=what, command=COMMAND)])
    blocks: list[Block] = []
    for record in records:
        blocks += _blocks(record)
    return Section(
        title="Ladder",
        blocks=blocks,
        command="; ".join(dict.fromkeys(r["command"] for r in records)),
    )


def _blocks(record: Record) -> list[Block]:
    climb = [r for r in record["rungs"] if r["kind"] != "without"]
    without = [r for r in record["rungs"] if r["kind"] == "without"]
    blocks: list[Block] = [
        f"{title(record)}: medians of {record['steps']} steps in each of {record['rounds']} "
        f"round{'s' * (record['rounds'] > 1)}, after {record['warmup']} of warm-up; torch "
        f"{record['torch']}, TorchTitan {record['torchtitan']}, {record['date']}. Losses are equal "
        "where the patches' headers say so: see the numbers."
    ]
    charts = []
    if _any_ran(climb):
        charts.append(_rates(record, climb, "Tokens/s a GPU, adding one by one"))
    if record.get("published"):
        charts.append(_published(record["published"]))
    blocks.append(Beside(tuple(charts)))
    if _any_ran(without):
        # Not where only some contributions were asked for.
        whole = [rung for rung in climb if len(rung["set"]) == len(record["patches"])]
        full = [{**rung, "label": "full set"} for rung in whole[-1:]]
        blocks.append(_rates(record, [*full, *without], "Tokens/s a GPU, the full set less one"))
    timed = [r for r in record["rungs"] if r["status"] == "ok"]
    if timed:
        blocks.append(_phases(timed))
    blocks.append(_table(record["rungs"]))
    return blocks


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
    return bars(name, rows, "{:,.0f} tokens/s".format, note="Whiskers: slowest and fastest step.")


def _published(rows: Sequence[Record]) -> Chart:
    shown = []
    for row in rows:
        low, high = row["tokens_s_gpu"]
        parts = {"before": low, "gained": high - low} if high > low else {"before": low}
        text = f"{low:,.0f} to {high:,.0f}" if high > low else f"{low:,.0f}"
        shown.append(Bar(label=row["label"], parts=parts, text=text))
    return bars(
        "Published, tokens/s a GPU",
        shown,
        "{:,.0f} tokens/s".format,
        faint=("gained",),
        note="384 GH200, a larger model; each pair is before and after, not all of one run.",
    )


def _phases(rungs: Sequence[Record]) -> Chart:
    rows = []
    for rung in rungs:
        median = rung["median"]
        parts = {words: median[key] for key, words in PHASES.items() if median.get(key) is not None}
        rows.append(Bar(label=rung["label"], parts=parts, text=seconds(median["step_s"])))
    return bars("Where a step's time goes", rows, seconds)


def _table(rungs: Sequence[Record]) -> Table:
    peaks = ("peak allocated", "peak reserved", "retries", "peak host")
    heads = ("rung", "tokens/s", "step", *EXPOSED.values(), *peaks, "numbers")
    rows: list[tuple[str, ...]] = []
    for rung in rungs:
        if rung["status"] != "ok":
            blank = [""] * (len(heads) - 2)
            rows.append((rung["label"], *blank, f"did not run: {rung['reason']}"))
            continue
        median = rung["median"]
        rows.append(
            (
                rung["label"],
                f"{median['tokens_s_gpu']:,.0f}",
                seconds(median["step_s"]),
                *("" if median.get(key) is None else seconds(median[key]) for key in EXPOSED),
                _most(rung, "peak_allocated", size),
                _most(rung, "peak_reserved", size),
                _most(rung, "alloc_retries", str),
                _most(rung, "peak_host", size),
                str(rung["numbers"]),
            )
        )
    used = [n for n in range(len(heads)) if n == 0 or any(row[n] for row in rows)]
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
    return lines(f"Ladder: {title(record)}", series, x="step", y="loss")
