"""Loss curves of training runs, from TorchTitan's TensorBoard files."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from integration.ground.errors import UserError
from integration.report import ladder
from integration.report.charts import Chart, Lines
from integration.report.page import Block, Commands, Missing, Section, first_open
from integration.train.run import Run

COMMAND = "integration train mini, then integration report RUN"
POINTS = 10  # fewer on one line are no curve


def curves(folders: Sequence[Path]) -> Chart | None:
    """Return the losses of the runs in ``folders``.

    Raises:
        UserError: a folder that is no run, or a run without a step.
    """
    from integration.train import summary

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


def section(records: Sequence[ladder.Record], folders: Sequence[Path]) -> Section:
    """Return the losses of ladders and runs; a few losses that all rungs have are words."""
    given = curves(folders)
    found = [(record, chart) for record in records if (chart := ladder.losses(record))]
    drawn = [chart for _, chart in found if not _brief(chart)]
    if not given and not drawn:
        drawn = [chart for _, chart in found]
    if not given and not drawn:
        missing = Missing(what="No run was given, and no ladder is kept.", command=COMMAND)
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
