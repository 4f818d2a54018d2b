"""Files with a space and with letters beyond ASCII: changed, created, applied, and taken off."""

from pathlib import Path

from expecttest import assert_expected_inline

from integration.patchset import overlay
from integration.patchset.apply import apply, take_off
from integration.tests.patchset.conftest import House, folder, tree
from integration.tests.scenarios.conftest import edit, snapshot
from integration.upstream import checkout

NEW, SPACED = "fakebase/größe δ.py", "fakebase/a name.py"


def test_odd_file_names(house: House, tmp_path: Path) -> None:
    house.add("odd", {NEW: "new = 1\n", SPACED: "new = 2\n", "fakebase/core.py": "é\n"})
    assert house.get("odd").paths == {NEW, SPACED, "fakebase/core.py"}
    assert house.check() == []
    built = folder(overlay.build())
    assert (built / NEW).read_text() == "new = 1\n"
    clone = house.checkout(tmp_path / "clone")
    before = tree(clone)
    assert apply(clone, commits=True) == ["odd: committed"]
    assert (clone / SPACED).read_text() == "new = 2\n"
    assert take_off(clone) == ["odd: taken off"]
    assert tree(clone) == before
    repo = edit(house, tmp_path)
    assert checkout.export_set(repo.parent)[0] == "pytorch/odd: unchanged"
    assert_expected_inline(
        snapshot(house),
        """\
tree bb54cf221717f759
fakebase 1.0: odd; touches fakebase/core.py
fakeapp 1.0: -; touches nothing
odd: [fake] Change odd; requires -
  fakebase/a name.py -0,0 (+1 -0)
  fakebase/core.py -1,40 (+1 -40)
  fakebase/größe δ.py -0,0 (+1 -0)
""",
    )
