"""A patch of 10,000 lines: the same guarantees, in seconds."""

import time
from pathlib import Path

from expecttest import assert_expected_inline

from integration.patchset import overlay
from integration.tests.patchset.conftest import House, folder, line
from integration.tests.scenarios.conftest import edit, snapshot
from integration.upstream import checkout


def test_ten_thousand_lines(house: House, tmp_path: Path) -> None:
    text = "".join(f"value_{number} = {number * number}\n" for number in range(10_000))
    house.add("large", {"fakebase/large.py": text, "fakebase/core.py": line(3, "import large")})
    house.add("small", {"fakebase/core.py": line(30, "small")})
    start = time.process_time()
    assert house.check() == []
    assert time.process_time() - start < 10
    assert (folder(overlay.build()) / "fakebase/large.py").read_text() == text
    repo = edit(house, tmp_path)
    assert checkout.export_set(repo.parent) == [
        "pytorch/large: unchanged",
        "pytorch/small: unchanged",
    ]
    assert_expected_inline(
        snapshot(house),
        """\
tree 41567ef7c92f88b5
fakebase 1.0: large small; touches fakebase/core.py
fakeapp 1.0: -; touches nothing
large: [fake] Change large; requires -
  fakebase/core.py -1,6 (+1 -1)
  fakebase/large.py -0,0 (+10000 -0)
small: [fake] Change small; requires -
  fakebase/core.py -27,7 (+1 -1)
""",
    )
