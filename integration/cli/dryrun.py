"""``integration dryrun``: one rank of a job on one CPU, before there is a machine for it."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer


def dryrun(
    config: Annotated[str, typer.Argument(help="One of the configs below.")],
    rank: Annotated[int, typer.Option(min=0, help="The rank to be.")] = 0,
    world: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the job. Default: the config's own.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Only so many layers, for a quicker look.")
    ] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Only so many experts.")] = None,
    placements: Annotated[bool, typer.Option("--placements", help="Stop before the step.")] = False,
    without: Annotated[
        list[str] | None, typer.Option(help="Leave this contribution out. Repeatable.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write all of it to this file.")] = None,
) -> None:
    """Build CONFIG as one rank of many and run a step on fake tensors; no GPU is needed.

    The exit code is 1 where a check is broken or the step fails, 2 for a mistake in the call, and 3
    where the plan differs from what was counted by more than 5 per cent.
    """
    from integration.dryrun import render, start
    from integration.dryrun.request import Request
    from integration.dryrun.result import complaint, require_writable, write
    from integration.ground.terminal import console

    request = Request(
        config=config,
        rank=rank,
        world=world,
        layers=layers,
        experts=experts,
        without=tuple(without or ()),
        placements_only=placements,
        started=time.time(),
    )
    job = request.job()
    if json is not None:
        require_writable(json)
    found = start.run(request, debug=bool(os.environ.get("INTEGRATION_DEBUG")))
    # A terminal's width; what goes to a file is not folded.
    render.show(job, request, found, console(160))
    if json is not None:
        write(json, job, request, found)
        print(f"json: {json}")
    if (error := complaint(found)) is not None:
        raise error
