"""A new patch between two others: it gets its place in the series, the others keep their bytes."""

from pathlib import Path

from expecttest import assert_expected_inline

from integration.tests.patchset.conftest import MESSAGE, House, user_git
from integration.tests.scenarios.conftest import edit, snapshot
from integration.upstream import checkout


def test_insert_in_the_middle(trio: House, tmp_path: Path) -> None:
    before = [trio.patch(name).read_bytes() for name in ("one", "two", "three")]
    repo = edit(trio, tmp_path)
    commits = user_git(repo, "log", "--reverse", "--format=%H", "pin..").split()
    user_git(repo, "reset", "-q", "--hard", commits[0])
    text = (repo / "fakebase/core.py").read_text()
    (repo / "fakebase/core.py").write_text(text.replace("line 15\n", "middle\nand more\n"))
    message = MESSAGE.format(name="mid", subject="[fake] Mid", status="pending", requires="")
    when = "--date=2026-11-29T12:00:00+0000"  # the snapshot's hash is over it, too
    user_git(repo, "commit", "-qa", when, "-F", "-", stdin=message + "Patch-Name: mid\n")
    user_git(repo, "cherry-pick", *commits[1:])
    (trio.root / "pytorch_contrib/mid").mkdir()
    (trio.root / "pytorch_contrib/mid/test_mid.py").write_text("")
    checkout.export_set(repo.parent)
    assert [trio.patch(name).read_bytes() for name in ("one", "two", "three")] == before
    assert trio.check() == []
    assert_expected_inline(
        snapshot(trio),
        """\
tree 3ea2cc8d7db944fb
fakebase 1.0: one mid two three; touches fakebase/core.py
fakeapp 1.0: -; touches nothing
one: [fake] Change one; requires -
  fakebase/core.py -1,6 (+1 -1)
mid: [fake] Mid; requires -
  fakebase/core.py -12,7 (+2 -1)
two: [fake] Change two; requires -
  fakebase/core.py -27,7 (+1 -1)
three: [fake] Change three; requires one
  fakebase/core.py -1,7 (+1 -1)
""",
    )
