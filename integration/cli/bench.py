"""``integration bench``: one front for every contribution's benchmark."""

from pathlib import Path
from typing import Annotated

import typer


def bench(
    name: Annotated[str | None, typer.Argument(help="A contribution.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Tiny sizes on a CPU: does it run? Proves nothing.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Keep the figures as the contribution's evidence.")
    ] = False,
    label: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Of the evidence file. Default: the machine's."),
    ] = None,
    peers: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where peers are. Default: .cache/peers.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show all benchmarks and peers.")] = False,
    install_peers: Annotated[
        bool,
        typer.Option("--install-peers", help="Install the published packages compared with."),
    ] = False,
) -> None:
    """Measure NAME on its overlay, beside its peers. What follows `--` goes to its bench.py."""
    from integration.bench import listing
    from integration.bench.catalog import default_peers
    from integration.bench.run import Request, run
    from integration.cli.main import TITAN_OPTIONS
    from integration.ground.errors import UserError

    if list_:
        listing.show(peers or default_peers())
    if install_peers:
        listing.install(name, peers or default_peers())
    if list_ or install_peers:
        return
    if name is None:
        raise UserError(
            "expected the name of a contribution, got none; nothing was measured: "
            "`integration bench --list` shows all benchmarks"
        )
    if label and not record:
        raise UserError(
            f"expected --record with --as {label}, got --as alone; it names the evidence file, "
            f"and none would be written: add --record"
        )
    run(Request(name, tuple(TITAN_OPTIONS), peers, smoke, record, label))
