"""Four processes build at once, two of them the same set: each set once, and nothing half-made."""

import multiprocessing
from pathlib import Path

from expecttest import assert_expected_inline

from integration.patchset import overlay
from integration.tests.patchset.conftest import House
from integration.tests.scenarios.conftest import snapshot


def build(names: list[str], queue: multiprocessing.Queue) -> None:
    queue.put((names, str(overlay.build(names).path)))


def test_two_concurrent_overlays(trio: House, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    sets = [["one"], ["one"], ["two"], ["one", "two", "three"]]
    builders = [context.Process(target=build, args=(names, queue)) for names in sets]
    for builder in builders:
        builder.start()
    got = [queue.get(timeout=120) for _ in builders]
    for builder in builders:
        builder.join()
    made = {"+".join(names): Path(path) for names, path in got}
    assert len({path for _, path in got}) == 3
    assert sorted((tmp_path / "cache/overlays").iterdir()) == sorted(made.values())
    for name, path in made.items():
        text = (path / "fakebase/core.py").read_text()
        assert [n for n in ("one", "two", "three") if f"{n}\n" in text] == name.split("+")
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
