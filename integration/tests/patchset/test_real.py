"""Once on the real pins: the repository's own patches, and torch through an overlay."""

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from integration.evidence.check import check
from integration.ground import paths
from integration.patchset import git, overlay, pins, repository, scratch
from integration.patchset.patch import Contribution, parse
from integration.tests.patchset.conftest import folder
from integration.upstream import checkout

# Three files at three depths, one of them in a folder that torch imports at once.
TOUCHED = ("torch/nn/init.py", "torch/distributed/utils.py", "torch/_utils.py")


def site() -> Path:
    return pins.load()["pytorch"].site()


def snapshot() -> tuple[dict[str, str], set[str], dict[str, tuple[int, int]]]:
    """Hash the sources that a patch could touch, name every bytecode file, and date the folders."""
    hashes, bytecode, folders = {}, set(), {}
    for package in ("torch", "torchtitan"):
        for file in (site() / package).rglob("*.py*"):
            if file.suffix == ".pyc":
                stat = file.stat()
                bytecode.add(str(file))
                folders[str(file)] = (stat.st_mtime_ns, stat.st_size)
            elif file.suffix in (".py", ".pyi"):
                hashes[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
    return hashes, bytecode, folders


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Contribution:
    """A house of its own on the real pins, whose one patch marks the files it touches."""
    real = pins.load()
    files = scratch.read(site(), TOUCHED)
    root = tmp_path / "house"
    for upstream in real:
        (root / "patches" / upstream).mkdir(parents=True)
        (root / "patches" / upstream / "series").write_text("")
    text = (paths.REPO / "patches/pins.toml").read_text()
    monkeypatch.setattr(paths, "REPO", root)
    monkeypatch.setattr(paths, "PATCHES", root / "patches")
    (root / "patches/pins.toml").write_text(text)
    hashes = {path: pins.sha256(data) for path, data in files.items()}
    both = {"pytorch": hashes, "torchtitan": {}}
    (root / "patches/pins.toml").write_text(pins.with_files(both, root / "patches/pins.toml"))
    with scratch.folder_with(files) as base:
        git.run(["init", "-q"], base)
        git.run(["add", "-A"], base)
        git.run(["commit", "-qm", "base"], base)
        for path, data in files.items():
            (base / path).write_bytes(data + b'\nMARK = "patched"\n')
        git.run(["commit", "-qam", "Mark"], base)
        data = git.run([*git.FORMAT_PATCH, "-1"], base).out
    (root / "patches/pytorch/mark.patch").write_bytes(data)
    (root / "patches/pytorch/series").write_text("mark\n")
    return parse("mark", "pytorch", root / "patches/pytorch/mark.patch", data)


def test_the_repository_holds() -> None:
    start = time.perf_counter()
    findings = check()
    seconds = time.perf_counter() - start
    assert findings == [], "\n".join(map(str, findings))
    assert seconds < 5.0


def test_versions_are_the_pinned_ones() -> None:
    for pin in pins.load().values():
        assert importlib.metadata.version(pin.package).split("+")[0] == pin.version


def test_overlay_of_torch(marked: Contribution) -> None:
    before = snapshot()
    start = time.perf_counter()
    built = overlay.build()
    assert time.perf_counter() - start < 1.0
    links = [entry for entry in (folder(built) / "torch").iterdir() if entry.is_symlink()]
    assert len(links) < 300
    code = (
        "import torch, torch.distributed.utils as u, torch.nn.init as i\n"
        "assert torch.ones(2).sum().item() == 2\n"
        "print(torch.__file__, torch._utils.MARK, u.MARK, i.MARK)"
    )
    env = built.environment({k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"})
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{built.path}/torch/__init__.py", *["patched"] * 3]
    # The bytecode of the patched files went into the overlay, and none anywhere else.
    assert list((folder(built) / "torch/__pycache__").glob("_utils.*.pyc"))
    assert snapshot() == before


def test_import_and_export_of_the_whole_package(marked: Contribution, tmp_path: Path) -> None:
    made = checkout.import_set(tmp_path / "work")
    assert [item.stopped for item in made] == [None, None]
    listed = git.run(["ls-files"], made[0].path).text.split("\n")
    assert len(listed) > 2000
    assert checkout.export_set(tmp_path / "work") == ["pytorch/mark: unchanged"]
    assert repository.load() == (marked,)
