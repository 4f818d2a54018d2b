"""An `index` line edited by hand: applies, but is not what export writes; import mends it."""

from pathlib import Path

from expecttest import assert_expected_inline

from integration.tests.patchset.conftest import House
from integration.tests.scenarios.conftest import edit, snapshot
from integration.upstream import checkout


def test_corrupted_index_line(trio: House, tmp_path: Path) -> None:
    good = trio.patch("two").read_bytes()
    start = good.index(b"\nindex ") + len(b"\nindex ")
    trio.patch("two").write_bytes(good[:start] + b"0123abcd" + good[start + 8 :])
    (finding,) = trio.check()
    assert (finding.patch, finding.verdict) == ("two", "not canonical")
    assert finding.found.startswith("`index 0123abcd")
    repo = edit(trio, tmp_path)
    assert "pytorch/two: changed" in checkout.export_set(repo.parent)
    assert trio.patch("two").read_bytes() == good
    assert trio.check() == []
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
