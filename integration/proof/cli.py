"""``integration test``: the contributions' tests and their proofs."""

from typing import Annotated

import typer


def test(
    names: Annotated[list[str] | None, typer.Argument(help="Contributions. Default: all.")] = None,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="Also: fails on the pristine pins; losses bitwise where due."),
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Also with the full set.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="With --prove: keep the losses compared as evidence.")
    ] = False,
    project: Annotated[
        bool, typer.Option("--project", help="Also the project's own tests.")
    ] = False,
) -> None:
    """Run each contribution's tests in a process and an overlay of its own."""
    from integration.proof.run import run

    if not run(names or [], prove=prove, full=full, project=project, record=record):
        raise typer.Exit(1)
