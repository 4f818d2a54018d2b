"""The newer upstream has a patch word for word: it goes into the history, others stay whole."""

from pathlib import Path

from expecttest import assert_expected_inline

from integration.patchset import pins
from integration.tests.patchset.conftest import House, line
from integration.tests.scenarios.conftest import snapshot
from integration.tests.upstream.conftest import track, wheel
from integration.upstream import newer, rebase


def test_emptied_by_upstream(trio: House, tmp_path: Path) -> None:
    track(trio.root)
    path = wheel(tmp_path / "newer", "fakebase", "2.0", core=line(3, "one"))
    others = newer.parse([f"fakebase=={path}"], pins.load(), "--onto")
    assert isinstance(rebase.start(others, {"pytorch": "c" * 40}), rebase.Done)
    trio.install("fakebase", "2.0")
    (trio.site / "fakebase/core.py").write_text(line(3, "one"))
    assert trio.check() == []
    assert_expected_inline(
        snapshot(trio),
        """\
tree f9f2289b8da76654
fakebase 2.0: two three; touches fakebase/core.py
fakeapp 1.0: -; touches nothing
two: [fake] Change two; requires -
  fakebase/core.py -27,7 (+1 -1)
three: [fake] Change three; requires -
  fakebase/core.py -1,7 (+1 -1)
gone: **one** (pytorch): [fake] Change one. Nothing of it was left on fakebase 2.0
""",
    )
