"""An upstream's own tests, chosen by their imports, and compared with the patches and without."""

from pathlib import Path

import pytest

from integration.ground.errors import UserError
from integration.tests.patchset.conftest import House
from integration.upstream import unittests
from integration.upstream.imports import Imports
from integration.upstream.unittests import Difference, differences


@pytest.mark.parametrize(
    ("test", "reached"),
    [
        ("import fakebase.deep.inner.leaf", True),
        ("from fakebase.deep.inner import leaf", True),
        ("from fakebase.deep import LEAF", True),  # an __init__ hands it on
        ("from fakebase.deep import OTHER", False),  # the same __init__, another module
        ("from fakebase.user import use", True),  # one module between
        ("from fakebase.far import far", False),  # two between
        ("def test():\n    from fakebase.user import use", True),
        ("import fakebase.block", False),
        ("import unittest", False),
        ("not python (", False),
    ],
)
def test_what_a_test_touches(tmp_path: Path, test: str, reached: bool) -> None:
    files = {
        "fakebase/__init__.py": "from .deep.inner.leaf import LEAF\n",
        "fakebase/deep/__init__.py": "from .inner import LEAF\nfrom .side import OTHER\n",
        "fakebase/deep/side.py": "OTHER = 1\n",
        "fakebase/deep/inner/__init__.py": "from .leaf import LEAF\n",
        "fakebase/deep/inner/leaf.py": "LEAF = 1\n",
        "fakebase/user.py": "from fakebase.deep.inner.leaf import LEAF\nuse = LEAF\n",
        "fakebase/far.py": "from fakebase.user import use\nfar = use\n",
        "fakebase/block.py": "",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "test_it.py").write_text(test)
    graph = Imports(tmp_path, ["fakebase"])
    touched = frozenset(["fakebase/deep/inner/leaf.py"])
    assert graph.touches(tmp_path / "test_it.py", touched) is reached


def test_differences() -> None:
    before = {"a": "passed", "b": "failed", "c": "passed", "d": "passed", "e": "failed"}
    after = {"a": "passed", "b": "failed", "c": "failed", "e": "passed", "f": "error"}
    assert differences(before, after) == [
        Difference("c", "passed", "failed"),
        Difference("d", "passed", "missing"),
        Difference("f", "missing", "error"),
        Difference("e", "failed", "passed"),
    ]
    assert [d.worse for d in differences(before, after)] == [True, True, True, False]


TEST = """\
import fakebase.deep.inner.leaf as leaf
def test_pristine(): assert leaf.LEAF == "pristine"
def test_patched(): assert leaf.LEAF == "patched"
def test_upstreams_own_failure(): assert False
def test_always(): assert True
"""


def test_only_differences_are_told(house: House, tmp_path: Path, run) -> None:
    house.add("leaf", {"fakebase/deep/inner/leaf.py": "LEAF = 'patched'\n"})
    house.add("far", {"fakebase/block.py": "far\n"})
    checkout = house.checkout(tmp_path / "checkout")
    # What lies in the checkout is not what is tested: the installed pin is.
    (checkout / "fakebase/deep/inner/leaf.py").write_text("LEAF = 'newer'\n")
    (checkout / "test").mkdir()
    (checkout / "test/test_leaf.py").write_text(TEST)
    (checkout / "test/test_else.py").write_text("def test_else(): pass\n")
    (checkout / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    run_pytest = unittests.run_pytest

    def with_site(*arguments, **options):
        # A process of its own finds the fake pins after the overlay, as it would site-packages.
        (options["folder"] / "conftest.py").write_text(
            f"import sys; sys.path.append({str(house.site)!r})\n"
        )
        return run_pytest(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(unittests, "run_pytest", with_site)
        ran = run("test", "--upstream", str(checkout))
        assert "1 of 2 test files touch what the set touches" in ran.out
        assert "worse  test.test_leaf::test_pristine: passed -> failed" in ran.out
        assert "other  test.test_leaf::test_patched: failed -> passed" in ran.out
        assert "1.0 and with the set: 1 failed, 1 passed" in ran.out
        assert "upstreams_own" not in ran.out
        assert (ran.code, ran.out.splitlines()[-1]) == (1, "2 passed, 1 failed")
        ran = run("test", "far", "--upstream", str(checkout))
        assert (ran.code, ran.out.splitlines()[-1]) == (0, "0 passed, 0 failed")


def test_what_fails_beside_others_only_is_no_difference(
    house: House,
    tmp_path: Path,
    run,
    monkeypatch,
) -> None:
    """Upstream's distributed tests share a port: two files at once, and one of them fails."""
    house.add("leaf", {"fakebase/deep/inner/leaf.py": "LEAF = 'patched'\n"})
    checkout = house.checkout(tmp_path / "checkout")
    (checkout / "test").mkdir()
    for name in ("port", "port_too"):
        (checkout / f"test/test_{name}.py").write_text("import fakebase.deep.inner.leaf\n")
    started: list[str] = []

    def outcomes(report: Path) -> dict[str, str]:
        module, _, stage = report.name.removesuffix(".xml").partition(".py.")
        first = report.name not in started
        started.append(report.name)
        taken = first and stage == "patched" and module == "test.test_port"
        return {f"{module}::test": "error" if taken else "passed"}

    monkeypatch.setattr(unittests, "run_pytest", lambda *_, **__: None)
    monkeypatch.setattr(unittests, "outcomes", outcomes)
    ran = run("test", "--upstream", str(checkout))
    assert "worse in 1 test file(s); once more, one after the other" in ran.out
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "2 passed, 0 failed")
    assert len(started) == 4 + 2


def test_no_upstream_there(house: House, tmp_path: Path, run) -> None:
    with pytest.raises(UserError, match="expected fakebase/ and test/ or fakeapp/ and tests/unit"):
        unittests.run([], house.checkout(tmp_path / "checkout"))
    ran = run("test", "--upstream", str(tmp_path), "--full")
    assert (ran.code, "expected --upstream alone" in ran.err) == (2, True)
