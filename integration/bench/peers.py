"""Peers: listed, and installed each in a folder of its own, as pinned, never with another torch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from rich.table import Table

from integration.bench.catalog import Peer, benches, peers
from integration.evidence.effect import PARITY
from integration.ground import terminal
from integration.ground.errors import UserError, nearest
from integration.patchset import repository

STATE = "peer.json"  # in the peer's folder: what became of it


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
            bench.needs if bench else "",
            ", ".join(p.package for p in peers() if p.bench == c.name),
            " ".join(f for f in files if not f.startswith(PARITY)),
        )
    console = terminal.console(200)
    console.print(table)
    for peer in peers():
        console.print(f"peer {peer.title}: {why_not(peer, folder) or 'installed'}", soft_wrap=True)


def install_all(name: str | None, folder: Path) -> None:
    """Install the peers, or those of one benchmark, and say what became of each.

    Raises:
        UserError: no peer belongs to ``name``.
    """
    chosen = [peer for peer in peers() if name in (None, peer.bench)]
    if not chosen:
        known = sorted({peer.bench for peer in peers()})
        raise UserError(f"no peer is compared with {name}{nearest(str(name), known)}")
    for peer in chosen:
        reason = install(peer, folder)
        print(f"{peer.title}: {reason or f'installed in {peer.folder(folder)}'}", flush=True)


def why_not(peer: Peer, folder: Path) -> str:
    """Return why the peer below ``folder`` cannot be used, or "" where it can."""
    file = peer.folder(folder) / STATE
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError):
        return "not installed: integration bench --install-peers"
    if state["version"] != peer.version:
        return f"{state['version']} is installed: integration bench --install-peers"
    return state["reason"]


def install(peer: Peer, folder: Path) -> str:
    """Install what is not there yet; return "" or why it cannot be had here.

    That reason is kept in the peer's folder too, and becomes part of each measurement.
    """
    if not why_not(peer, folder):
        return ""
    target = peer.folder(folder)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    # Without isolation, as building DeepSpeed asks for torch: it must find ours, not fetch one.
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    line += ["--no-deps", "--no-build-isolation", "--no-compile", f"--target={target}"]
    line += [f"{peer.package}=={peer.version}", *peer.needs]
    done = subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    reason = _explain(done.stderr) if done.returncode else ""
    if (target / "torch").exists():
        reason = "it brought another torch, which was removed"
    if reason:
        shutil.rmtree(target)
        target.mkdir()
    state = {"version": peer.version, "reason": reason}
    (target / STATE).write_text(json.dumps(state) + "\n")
    return reason


def _explain(stderr: str) -> str:
    """Return the sentence of pip's that says why: a Python too old comes before its summary."""
    errors = [s.removeprefix("ERROR: ") for s in stderr.splitlines() if s.startswith("ERROR: ")]
    old = [s for s in errors if "Requires-Python" in s]
    return (old or errors or stderr.splitlines() or ["pip said nothing"])[0].strip()
