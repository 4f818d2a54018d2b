"""``integration ladder``: what each contribution is worth inside the set."""

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from integration.ladder.rungs import Only


def _label(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]*", value):
        raise typer.BadParameter(
            f"{value} should be of a-z, 0-9 and hyphens, as part of a file's name"
        )
    return value


def _repeatable(arguments: list[str]) -> str:
    """Return the command that makes the whole ladder: without what goes on or stops half-way."""
    line = shlex.join(["integration", *arguments])
    return re.sub(r" --(resume|stop-after)[ =]\S+| --retry\b", "", line)


def ladder(
    config: Annotated[str, typer.Argument(help="One of the configs below.")] = "mini",
    only: Annotated[
        Only,
        typer.Option(
            help="Add one by one, leave out one of the full set, both, or only the full set."
        ),
    ] = Only.ALL,
    names: Annotated[
        str | None, typer.Option(help="Only these contributions, with commas between.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps a run.")] = 4,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Runs a rung: up the ladder, down, up, …")] = 1,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which a rung is taken for hanging.")
    ] = 180,
    stop_after: Annotated[
        float | None, typer.Option(help="Minutes after which no further rung is started.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: one a GPU, or 2 on a CPU.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the config slice.")] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Experts a layer of the config slice.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.")] = None,
    whole_documents: Annotated[
        bool,
        typer.Option(
            "--whole-documents",
            help="Sequences of one document each, so that attention is causal over all of it; "
            "tells the model FLOP utilisation.",
        ),
    ] = False,
    traces: Annotated[
        bool,
        typer.Option(
            "--traces",
            help="On a GPU: keep a Chrome trace of a step of each rung, and of one more the "
            "allocator's history.",
        ),
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Keep the result in integration/evidence.")
    ] = False,
    label: Annotated[
        str,
        typer.Option(
            callback=_label,
            help="Goes into the kept file's name and the report: what sets this ladder apart from "
            "others of CONFIG.",
        ),
    ] = "",
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on with this ladder's JSON file.")
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="With --resume: also try again what could not run.")
    ] = False,
) -> None:
    """Train CONFIG from pristine to the full set, contribution by contribution, and compare.

    What follows `--` goes to TorchTitan.
    """
    import sys

    from integration.cli.main import TITAN_OPTIONS
    from integration.ladder import run
    from integration.ladder.rungs import require_names

    asked = run.Request(
        config=config,
        only=only,
        names=require_names([names]) if names else (),
        steps=steps,
        warmup=warmup,
        rounds=rounds,
        timeout=timeout,
        stop_after=stop_after,
        ranks=ranks,
        layers=layers,
        experts=experts,
        seq_len=seq_len,
        whole_documents=whole_documents,
        traces=traces,
        record=record,
        label=label,
        resume=resume,
        retry=retry,
        options=tuple(TITAN_OPTIONS),
        command=_repeatable(sys.argv[1:]),
    )
    if not run.run(asked):
        raise typer.Exit(1)
