"""``integration train``: the training job."""

import os
from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[str, typer.Argument(help="One of the configs below.")] = "mini",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest run that has a checkpoint.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of .jsonl, .txt or .parquet files, or a data set saved to disk."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json and tokenizer_config.json.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: one a GPU, or 2 on a CPU.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the config slice.")] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Experts a layer of the config slice.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Leave this contribution out. Repeatable.")
    ] = None,
) -> None:
    """Train CONFIG under torchrun on the full set. What follows `--` goes to TorchTitan."""
    from integration.cli.main import TITAN_OPTIONS
    from integration.train import start

    start.train(
        start.Request(
            config=config,
            layers=layers,
            experts=experts,
            resume=resume,
            data=data,
            tokenizer=tokenizer,
            ranks=ranks,
            without=tuple(without or ()),
            options=tuple(TITAN_OPTIONS),
            debug=bool(os.environ.get("INTEGRATION_DEBUG")),
        )
    )
