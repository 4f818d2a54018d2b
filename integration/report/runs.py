"""Loss curves of training runs, from TorchTitan's TensorBoard files."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from integration.errors import UserError
from integration.job.run import Run
from integration.report import ladder
from integration.report.charts import Chart, lines
from integration.report.page import Block, Missing, Section

COMMAND = "integration train mini, then integration report RUN"


def curves(folders: Sequence[Path]) -> Chart | None:
    """Return the losses of the runs in ``folders``.

    Raises:
        UserError: a folder that is no run, or a run without a step.
    """
    from integration.job import summary

    series = {}
    for folder in folders:
        values = summary.scalars(folder, summary.LOSS) if folder.is_dir() else {}
        if not values:
            raise UserError(
                f"expected a run's folder with TensorBoard files, or a ladder's JSON file, got "
                f"{folder}; no page was written: give one of outputs/CONFIG/START"
            )
        series[_name(folder)] = (list(values), list(values.values()))
    return lines("Training runs", series, x="step", y="loss") if series else None


def section(records: Sequence[ladder.Record], folders: Sequence[Path]) -> Section:
    """Return the losses of ladders and runs."""
    charts = [curves(folders), *(ladder.losses(record) for record in records)]
    blocks: list[Block] = [chart for chart in charts if chart]
    if not blocks:
        blocks = [Missing(what="No run was given, and no ladder is kept.", command=COMMAND)]
        return Section(title="Loss", blocks=blocks)
    commands = [*map(_command, folders), *(record["command"] for record in records)]
    return Section(title="Loss", blocks=blocks, command="; ".join(dict.fromkeys(commands)))


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
