"""The newer upstream has one of a patch's two hunks: the other is left, and is the patch now."""

from pathlib import Path

from expecttest import assert_expected_inline

from integration.patchset import pins, repository
from integration.tests.patchset.conftest import House, line
from integration.tests.scenarios.conftest import snapshot
from integration.tests.upstream.conftest import wheel
from integration.upstream import newer, rebase
from integration.upstream.drift import drift


def test_partly_merged(house: House, tmp_path: Path) -> None:
    house.add("both", {"fakebase/core.py": line(3, "first part", line(30, "second part"))})
    core = line(3, "first part")
    path = wheel(tmp_path / "newer", "fakebase", "2.0", core=core)
    others = newer.parse([f"fakebase=={path}"], pins.load(), "--onto")
    (seen,) = drift(repository.load(), others)
    assert (seen.verdict.value, seen.detail) == (
        "needs rebase",
        "1 of 2 hunks apply; 1 of 2 hunks there",
    )
    assert isinstance(rebase.start(others, {"pytorch": "c" * 40}), rebase.Done)
    house.install("fakebase", "2.0")
    (house.site / "fakebase/core.py").write_text(core)
    assert house.check() == []
    assert_expected_inline(
        snapshot(house),
        """\
tree 3e7367f3d66e2c75
fakebase 2.0: both; touches fakebase/core.py
fakeapp 1.0: -; touches nothing
both: [fake] Change both; requires -
  fakebase/core.py -27,7 (+1 -1)
""",
    )
