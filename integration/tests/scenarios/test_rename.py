"""A contribution gets another name: file, series and the requirement of another follow."""

from pathlib import Path

from expecttest import assert_expected_inline

from integration.tests.patchset.conftest import House, user_git
from integration.tests.scenarios.conftest import edit, snapshot
from integration.upstream import checkout


def test_rename(trio: House, tmp_path: Path) -> None:
    repo = edit(trio, tmp_path)
    commits = user_git(repo, "log", "--reverse", "--format=%H", "pin..").split()
    user_git(repo, "reset", "-q", "--hard", "pin")
    for commit in commits:
        user_git(repo, "cherry-pick", commit)
        message = user_git(repo, "log", "-1", "--format=%B")
        message = message.replace("Patch-Name: one", "Patch-Name: first")
        message = message.replace("Requires: one", "Requires: first")
        user_git(repo, "commit", "-q", "--amend", "-F", "-", stdin=message)
    (trio.root / "pytorch_contrib/one").rename(trio.root / "pytorch_contrib/first")
    assert checkout.export_set(repo.parent) == [
        "pytorch/first: new",
        "pytorch/two: unchanged",
        "pytorch/three: changed",
        "pytorch/one: removed, as its commit is gone",
    ]
    assert trio.check() == []
    assert_expected_inline(
        snapshot(trio),
        """\
tree 566edeacdf7a58b4
fakebase 1.0: first two three; touches fakebase/core.py
fakeapp 1.0: -; touches nothing
first: [fake] Change one; requires -
  fakebase/core.py -1,6 (+1 -1)
two: [fake] Change two; requires -
  fakebase/core.py -27,7 (+1 -1)
three: [fake] Change three; requires first
  fakebase/core.py -1,7 (+1 -1)
""",
    )
