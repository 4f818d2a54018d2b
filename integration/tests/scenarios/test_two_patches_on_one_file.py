"""Two patches of one file: in either order the same file, and each comes off alone."""

from pathlib import Path

from expecttest import assert_expected_inline

from integration.patchset.apply import apply, take_off
from integration.tests.patchset.conftest import LINES, House, line
from integration.tests.scenarios.conftest import snapshot

CORE = "fakebase/core.py"


def test_two_patches_on_one_file(trio: House, tmp_path: Path) -> None:
    one = trio.checkout(tmp_path / "a")
    other = trio.checkout(tmp_path / "b")
    apply(one, ["one"])
    apply(one, ["two"])
    apply(other, ["two"])
    apply(other, ["one"])
    both = line(3, "one", line(30, "two"))
    assert (one / CORE).read_text() == (other / CORE).read_text() == both
    take_off(one, ["one"])
    take_off(other, ["two"])
    assert (one / CORE).read_text() == line(30, "two")
    assert (other / CORE).read_text() == line(3, "one")
    take_off(one)
    assert (one / CORE).read_text() == LINES
    assert_expected_inline(
        snapshot(trio),
        """\
tree 9190fe926b86dab4
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
