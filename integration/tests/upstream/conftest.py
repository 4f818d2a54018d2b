"""Newer upstreams made here, of the fake pins, for a house of ``patchset``; no network."""

import importlib.metadata
import os
import socket
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from integration.tests.patchset.conftest import (
    PRISTINE,
    House,
    house,
    isolated,
    plain_git,
    run,
    user_git,
)

__all__ = ["House", "house", "isolated", "plain_git", "run"]


def wheel(folder: Path, package: str, version: str, /, **edits: str | None) -> Path:
    """Write a wheel of a fake upstream; ``core="…"`` replaces core.py, None leaves it out."""
    changed = {f"{package}/{stem}.py": text for stem, text in edits.items()}
    files = {p: t for p, t in {**PRISTINE, **changed}.items() if p.startswith(package)}
    return _wheel(folder, package, version, {p: t for p, t in files.items() if t is not None})


def tools(folder: Path) -> None:
    """Write stand-ins of the test tools: each leads to the one that is installed here."""
    for name in ("pytest", "pytest-timeout", "expecttest"):
        found = importlib.metadata.distribution(name)
        here = f"{found.locate_file('')}\n"
        _wheel(folder, name.replace("-", "_"), found.version, {f"{name}.pth": here})


def _wheel(folder: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    about = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{p},,\n" for p in [*files, *about, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, text in {**files, **about, f"{info}/RECORD": record}.items():
            archive.writestr(member, text)
    return path


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let pip know nothing but the folder returned, and no connection leave this machine."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] != "127.0.0.1":
            raise AssertionError(f"a test connects to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return wheels


def track(root: Path) -> None:
    """Make the house a git repository with everything committed, as the real one is."""
    user_git(root, "init", "-q")
    user_git(root, "add", "-A")
    user_git(root, "commit", "-qm", "The house")
