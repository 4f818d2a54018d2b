"""A patch whose surroundings the pin does not have: named by check, applied by nothing."""

from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from integration.ground.errors import UserError
from integration.patchset import overlay
from integration.patchset.apply import apply
from integration.tests.patchset.conftest import House, tree
from integration.tests.scenarios.conftest import snapshot


def test_made_on_another_version(trio: House, tmp_path: Path) -> None:
    other = trio.patch("two").read_bytes().replace(b" line 29\n", b" line 29 of version 0.9\n")
    trio.patch("two").write_bytes(other)
    clone = trio.checkout(tmp_path / "clone")
    before = tree(clone)
    assert_expected_inline(
        str(trio.check()[0]),
        """\
two: surroundings changed
  at        fakebase/core.py:29
  expected  `line 29 of version 0.9`
  found     `line 29`
  next      rebase it: integration patches import, mend the commit, export""",
    )
    with pytest.raises(UserError, match="no overlay was built"):
        overlay.build(["two"])
    with pytest.raises(UserError, match="nothing was changed in"):
        apply(clone)
    assert tree(clone) == before
    assert not list((tmp_path / "cache/overlays").iterdir())
    assert_expected_inline(
        snapshot(trio),
        """\
tree 7f4ca99918791077
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
