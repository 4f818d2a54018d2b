"""``integration report``: one page of the evidence."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Folders of runs, or JSON files of ladders."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: outputs/report.html.")
    ] = None,
) -> None:
    """Write one self-contained HTML page: ladder, losses, streams, memory, contributions."""
    from integration.ground.paths import outputs_dir
    from integration.report import report as module

    outputs_dir().mkdir(parents=True, exist_ok=True)
    target = out or outputs_dir() / "report.html"
    module.write(runs or [], target)
    print(f"page: {target}")
