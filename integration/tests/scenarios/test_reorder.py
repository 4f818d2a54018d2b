"""Two patches change places: the series changes, and not a byte of a patch."""

from pathlib import Path

from expecttest import assert_expected_inline

from integration.tests.patchset.conftest import House, user_git
from integration.tests.scenarios.conftest import edit, snapshot
from integration.upstream import checkout


def test_reorder(trio: House, tmp_path: Path) -> None:
    repo = edit(trio, tmp_path)
    one, two, three = user_git(repo, "log", "--reverse", "--format=%H", "pin..").split()
    user_git(repo, "reset", "-q", "--hard", "pin")
    user_git(repo, "cherry-pick", two, one, three)
    assert checkout.export_set(repo.parent) == [
        "pytorch/two: unchanged",
        "pytorch/one: unchanged",
        "pytorch/three: unchanged",
    ]
    assert trio.check() == []
    assert_expected_inline(
        snapshot(trio),
        """\
tree a20cd3ea6e05c877
fakebase 1.0: two one three; touches fakebase/core.py
fakeapp 1.0: -; touches nothing
two: [fake] Change two; requires -
  fakebase/core.py -27,7 (+1 -1)
one: [fake] Change one; requires -
  fakebase/core.py -1,6 (+1 -1)
three: [fake] Change three; requires one
  fakebase/core.py -1,7 (+1 -1)
""",
    )
