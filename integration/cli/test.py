"""``integration test``: the contributions' tests and their proofs."""

from pathlib import Path
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
    upstream: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Instead: the tests of this checkout, with and without."),
    ] = None,
) -> None:
    """Run each contribution's tests in a process and an overlay of its own."""
    from integration.ground.errors import UserError
    from integration.proof.run import run

    if upstream:
        from integration.upstream.unittests import run as run_upstream

        if prove or full or record or project:
            raise UserError(
                "expected --upstream alone, or with names, got another option; nothing was run: "
                "run `integration test` twice"
            )
        if not run_upstream(names or [], upstream):
            raise typer.Exit(1)
        return
    if record and not prove:
        raise UserError(
            "expected --prove with --record, got --record alone; what it keeps is compared by "
            "--prove, and nothing was run: add --prove"
        )
    if not run(names or [], prove=prove, full=full, project=project, record=record):
        raise typer.Exit(1)
