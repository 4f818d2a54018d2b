"""Install peers: each into a folder of its own, at its pinned version, never another torch."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from integration.bench.catalog import Peer

STATE = "peer.json"  # in the peer's folder: what became of it


def install(peers: Sequence[Peer], folder: Path) -> dict[str, str]:
    """Install what is not there yet; return title -> "" or why it cannot be had here.

    A peer that does not install does not stop the others: what it says is kept in its folder, and
    becomes part of each measurement.
    """
    return {peer.title: _install(peer, peer.folder(folder)) for peer in peers}


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


def _install(peer: Peer, target: Path) -> str:
    if (target / STATE).is_file() and not why_not(peer, target.parent):
        return ""
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
