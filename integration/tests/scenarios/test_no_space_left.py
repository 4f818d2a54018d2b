"""The disk fills at any of the writes of an export or an overlay: nothing is half done."""

from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from integration.ground.errors import UserError
from integration.patchset import overlay
from integration.tests.patchset.conftest import House, tree, user_git
from integration.tests.scenarios.conftest import edit, snapshot
from integration.upstream import checkout


def full_after(writes: int, monkeypatch: pytest.MonkeyPatch, below: Path) -> None:
    write, count = Path.write_bytes, 0

    def fills(self: Path, data: bytes) -> int:
        nonlocal count
        count += self.is_relative_to(below)
        if count > writes and self.is_relative_to(below):
            write(self, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", fills)


def test_no_space_left(trio: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = edit(trio, tmp_path)
    text = (repo / "fakebase/core.py").read_text()
    (repo / "fakebase/core.py").write_text(text.replace("three\n", "drei\n"))
    user_git(repo, "commit", "-qa", "--amend", "--no-edit")
    before = tree(trio.root)
    for writes in range(3):
        with (
            monkeypatch.context() as patched,
            pytest.raises(UserError, match=r"No space left.*nothing was changed"),
        ):
            full_after(writes, patched, trio.root)
            checkout.export_set(repo.parent)
        assert tree(trio.root) == before

    def fills(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(UserError, match=r"No space left on"):
        patched.setattr(overlay.shutil, "copyfile", fills)
        overlay.build()
    assert list((tmp_path / "cache/overlays").iterdir()) == []
    assert "pytorch/three: changed" in checkout.export_set(repo.parent)
    assert trio.check() == []
    assert_expected_inline(
        snapshot(trio),
        """\
tree 266704db77328e5e
fakebase 1.0: one two three; touches fakebase/core.py
fakeapp 1.0: -; touches nothing
one: [fake] Change one; requires -
  fakebase/core.py -1,6 (+1 -1)
two: [fake] Change two; requires -
  fakebase/core.py -27,7 (+1 -1)
three: [fake] Change three; requires one
  fakebase/core.py -1,7 (+1 -1)
""",
    )
