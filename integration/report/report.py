"""Put the page together from what is kept as evidence, what is given, and what is planned."""

import json
import shlex
from collections.abc import Sequence
from datetime import date
from html import escape
from pathlib import Path

from integration.evidence import effect
from integration.ground.errors import UserError
from integration.patchset import repository
from integration.patchset.patch import Contribution
from integration.report import ladder, memory, page, plan, streams
from integration.report.charts import Chart, Lines
from integration.report.page import Block, Commands, Html, Missing, Section, Table, first_open
from integration.train import summary
from integration.train.run import Run

TRAIN = "integration train mini, then integration report RUN"
POINTS = 10  # fewer on one line are no curve
HEADS = ("contribution", "status", "what it changes", "measured effect", "proofs", "evidence")


def write(given: Sequence[Path], target: Path) -> None:
    """Write the report to ``target``.

    Args:
        given: runs' folders, and JSON files of ladders that are not kept as evidence.

    Raises:
        UserError: what is given is neither, or the page cannot be written.
    """
    ladders = {path: record for path in given if path.is_file() and (record := ladder.load(path))}
    folders = [path for path in given if path not in ladders]
    records = ladder.merged([*ladder.recorded(), *ladders.values()])
    patches = repository.load()
    sections = [
        ladder.section(records),
        losses(records, folders),
        streams.section(streams.files(), records),
        memory.pools(records, patches),
        plan.budget(),
        of_patches(patches),
    ]
    lead = (
        f"What was measured, planned and trained with {len(patches)} patches on the pinned PyTorch "
        f"and TorchTitan; {date.today()}."
    )
    page.write(target, "Patches for MoE pretraining: evidence", lead, sections)


def curves(folders: Sequence[Path]) -> Chart | None:
    """Return the losses of the runs in ``folders``.

    Raises:
        UserError: a folder that is no run, or a run without a step.
    """
    series = {}
    for folder in folders:
        values = summary.scalars(folder, summary.LOSS) if folder.is_dir() else {}
        if not values:
            raise UserError(
                f"expected a run's folder with TensorBoard files, or a ladder's JSON file, got "
                f"{folder}; no page was written: give one of outputs/CONFIG/START"
            )
        series[_name(folder)] = (list(values), list(values.values()))
    return Lines(title="Training runs", series=series, x="step", y="loss") if series else None


def losses(records: Sequence[ladder.Record], folders: Sequence[Path]) -> Section:
    """Return the losses of ladders and runs; a few losses that all rungs have are words."""
    given = curves(folders)
    found = [(record, chart) for record in records if (chart := ladder.losses(record))]
    drawn = [chart for _, chart in found if not _brief(chart)]
    if not given and not drawn:
        drawn = [chart for _, chart in found]
    if not given and not drawn:
        missing = Missing(what="No run was given, and no ladder is kept.", command=TRAIN)
        return Section(title="Loss", blocks=[missing])
    made = [(_name(folder), _command(folder)) for folder in folders]
    made += [named for record, _ in found for named in ladder.commands(record)]
    blocks: list[Block] = [Commands(made)]
    blocks += [given] if given else []
    blocks += first_open(drawn, "losses of ladders") if drawn else []
    blocks += [_words(chart) for _, chart in found if chart not in drawn]
    return Section(title="Loss", blocks=blocks)


def _brief(chart: Chart) -> bool:
    """Tell whether a chart is one line of a few points."""
    return len(chart.rows) == 1 and int(chart.rows[0][1]) < POINTS


def _words(chart: Chart) -> str:
    ((name, steps, first, last),) = chart.rows
    return f"{chart.title}: {name}; in {steps} steps the loss goes from {first} to {last}."


def _command(folder: Path) -> str:
    """Return what started the run, as far as its folder says."""
    try:
        job = Run(folder).job()
    except UserError:
        return f"a training in {_name(folder)}"
    options = f" -- {shlex.join(job.options)}" if job.options else ""
    return f"integration train {job.config}{options}"


def _name(folder: Path) -> str:
    """``outputs/mini/20261130-010203`` -> ``mini/20261130-010203``."""
    return "/".join(folder.resolve().parts[-2:])


def of_patches(contributions: Sequence[Contribution]) -> Section:
    """Return status, effect, proofs and evidence of each contribution, one a row."""
    rows, kept = [], 0
    for c in contributions:
        files = sorted((c.folder / "evidence").glob("*.json"))
        records = {f.name: json.loads(f.read_text(encoding="utf-8")) for f in files}
        kept += len(records)
        proofs = f"{_count(len(c.tests), 'test file')}; {_parity(c, records)}"
        rows.append((c.name, c.status, c.subject, effect.sentence(c), proofs, _evidence(records)))
    return Section(
        title="Contributions",
        blocks=[
            f"{len(rows)} patches with {sum(len(c.tests) for c in contributions)} test files and "
            f"{kept} files of evidence. How many tests failed "
            "without each patch and passed with it stands in CONTRIBUTING's proof.",
            Table(heads=HEADS, rows=rows, numbers=False, title="Contributions"),
        ],
        command="integration test --prove --full; integration patches check",
    )


def _parity(contribution: Contribution, records: ladder.Record) -> str:
    (numerics,) = contribution.values("Numerics") or ("?",)
    if numerics != "bitwise":
        return f"changes numbers: {numerics.removeprefix('changes ')}"
    verdicts = [r["verdict"] for name, r in records.items() if name.startswith(effect.PARITY)]
    return "; ".join(verdicts) or "bitwise by its header"


def _evidence(records: ladder.Record) -> Html:
    """Return each file's name with the command that made it."""
    lines = "<br>".join(
        f"{escape(name)}: <code>{escape(record.get('command', '?'))}</code>"
        for name, record in records.items()
    )
    summary = _count(len(records), "file")
    return Html(f"<details><summary>{summary}</summary>{lines}</details>" if lines else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
