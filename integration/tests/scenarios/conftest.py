"""A house for every scenario, no network, and the whole of its state as text."""

import re
from pathlib import Path

import pytest

from integration.patchset import pins, repository
from integration.patchset.patch import strip_prefix
from integration.patchset.pins import sha256
from integration.tests.patchset.conftest import House, tree, user_git
from integration.tests.upstream.conftest import house, isolated, offline, plain_git
from integration.upstream import checkout

__all__ = ["house", "isolated", "offline", "plain_git"]


def snapshot(house: House) -> str:
    """Return series, headers, hunks, pins and history, and a hash over every file's bytes.

    A hash that alone has changed means that bytes have changed which the lines do not show.
    `EXPECTTEST_ACCEPT=1 pytest …` writes the new state into the test, to be read in the diff.
    """
    unlike = ("reports/", "patches/HISTORY.md")  # times and commits: other ones in each run
    files = {p: d for p, d in tree(house.root).items() if not p.startswith(unlike)}
    digest = sha256(b"".join(p.encode() + b"\0" + sha256(d).encode() for p, d in files.items()))
    lines = [f"tree {digest[:16]}"]
    contributions = repository.load()
    for upstream, pin in pins.load().items():
        names = [name for _, name in repository.read_series(house.series(upstream))]
        held = ", ".join(sorted(pin.files)) or "nothing"
        lines.append(f"{pin.package} {pin.version}: {' '.join(names) or '-'}; touches {held}")
    for c in contributions:
        lines.append(f"{c.name}: {c.subject}; requires {', '.join(c.requires) or '-'}")
        for file in c.files:
            hunks = [f"-{h.source_start},{h.source_length}" for h in file]
            path = strip_prefix(file.target_file)
            lines.append(f"  {path} {' '.join(hunks)} (+{file.added} -{file.removed})")
    history = house.root / "patches/HISTORY.md"
    if history.is_file():
        told = re.findall(r"^- [-0-9]{10} (.*?)\. Upstream: ", history.read_text(), re.MULTILINE)
        lines += [f"gone: {line}" for line in told]
    return "\n".join(lines) + "\n"


@pytest.fixture
def trio(house: House) -> House:
    """Three patches of one upstream: two on one file that commute, one that requires the first."""
    from integration.tests.patchset.conftest import line

    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.add("two", {"fakebase/core.py": line(30, "two")})
    house.add("three", {"fakebase/core.py": line(4, "three", line(3, "one"))}, requires=["one"])
    return house


def edit(house: House, tmp_path: Path) -> Path:
    """Import the set; return pytorch's checkout, in which a person edits."""
    checkout.import_set(tmp_path / "work")
    repo = tmp_path / "work" / "pytorch"
    user_git(repo, "config", "core.editor", "true")
    return repo
