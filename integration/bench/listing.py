"""``integration bench --list`` and ``--install-peers``."""

from pathlib import Path

from rich.table import Table

from integration.bench import peers as installed
from integration.bench.catalog import benches, peers
from integration.ground import terminal
from integration.ground.errors import UserError, nearest
from integration.patchset import repository


def show(folder: Path) -> None:
    """Print every contribution with its benchmark, or that it has none, and the peers."""
    known = benches()
    table = Table("contribution", "measures", "needs", "peers", "evidence")
    for c in repository.load():
        bench = known.get(c.name)
        files = (f.stem for f in sorted((c.folder / "evidence").glob("*.json")))
        table.add_row(
            c.name,
            bench.what if bench else "no benchmark: tests only",
            ""
            if bench is None
            else f"{bench.gpus} GPU{'s' * (bench.gpus > 1)}"
            if bench.gpus
            else "CPU",
            ", ".join(p.package for p in peers() if p.bench == c.name),
            " ".join(f for f in files if not f.startswith("parity-")),
        )
    console = terminal.console(200)
    console.print(table)
    for peer in peers():
        console.print(
            f"peer {peer.title}: {installed.why_not(peer, folder) or 'installed'}", soft_wrap=True
        )


def install(name: str | None, folder: Path) -> None:
    """Install the peers, or those of one benchmark, and say what became of each.

    Raises:
        UserError: no peer belongs to ``name``.
    """
    chosen = [peer for peer in peers() if name in (None, peer.bench)]
    if not chosen:
        known = sorted({peer.bench for peer in peers()})
        raise UserError(f"no peer is compared with {name}{nearest(str(name), known)}")
    for peer in chosen:
        (reason,) = installed.install([peer], folder).values()
        print(f"{peer.title}: {reason or f'installed in {peer.folder(folder)}'}", flush=True)
