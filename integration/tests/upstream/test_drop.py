"""A contribution goes only when its test passes without it."""

import re
from pathlib import Path

import pytest

from integration.evidence import readme
from integration.ground import paths
from integration.patchset import repository
from integration.tests.patchset.conftest import House, line, tree, user_git
from integration.tests.upstream.conftest import track

TEST = """\
import fakebase, unittest


class Test(unittest.TestCase):
    def test_two(self):
        {body}
"""


@pytest.fixture
def three(house: House, monkeypatch: pytest.MonkeyPatch) -> House:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    issue = "submitted https://example.org/pull/7"
    house.add("two", {"fakebase/block.py": "two\n"}, requires=["one"], status=issue)
    house.add("last", {"fakebase/core.py": line(30, "last")})
    evidence = house.root / "pytorch_contrib/two/evidence"
    evidence.mkdir()
    (evidence / "bench.json").write_text(f'{{"patch_sha256": "{house.get("two").sha256}"}}')
    # A Python of its own runs the test; it finds the fake pins as a user's finds site-packages.
    monkeypatch.setattr("integration.testing.suite.REPO", house.site)
    return house


def test_of_two(house: House, body: str) -> None:
    (house.root / "pytorch_contrib/two/test_two.py").write_text(TEST.format(body=body))
    track(house.root)


test_of_two.__test__ = False  # pyrefly: ignore[missing-attribute]


def test_dropped(three: House, run) -> None:
    (three.root / "order.py").write_text('ORDER = ("one", "two", "last")\n')
    test_of_two(three, "self.assertEqual(fakebase.VALUE, 'pristine')")
    head = user_git(three.root, "rev-parse", "--short=12", "HEAD").strip()
    digest = three.get("two").sha256
    ran = run("patches", "drop", "two")
    assert (ran.code, ran.out.startswith("two: upstream no longer needs it")) == (0, True), ran.err
    assert ran.err == "Running the Drop-when test of two\n"
    assert "still naming two: order.py\n" in ran.out
    assert [c.name for c in repository.load()] == ["one", "last"]
    assert three.series().read_text() == "one\nlast\n"
    assert not (three.root / "pytorch_contrib/two").exists()
    assert "fakebase/block.py" not in (three.root / "patches/pins.toml").read_text()
    history = (three.root / "patches/HISTORY.md").read_text()
    assert re.sub(r"- \d{4}-\d\d-\d\d ", "- DATE ", history.splitlines()[-1]) == (
        "- DATE **two** (pytorch): [fake] Change two. Its Drop-when test "
        "`test/test_two.py::Test::test_two` passes on the unpatched fakebase 1.0. Upstream: "
        f"https://example.org/pull/7. Commit {head}: `patches/pytorch/two.patch` (sha256 "
        f"{digest}), `pytorch_contrib/two/`, evidence: bench.json."
    )
    user_git(three.root, "cat-file", "-e", f"{head}:patches/pytorch/two.patch")
    assert three.check() == []


def test_a_status_is_a_link_where_upstream_has_it(three: House, run) -> None:
    """In README's table, in the list of patches, and in the history once the patch goes."""
    path, sha = three.patch("two"), "a1" * 20
    text = path.read_text().replace("submitted https://example.org/pull/7", f"upstream {sha}")
    path.write_text(text)
    (three.root / "pytorch_contrib/two/evidence/bench.json").unlink()
    table = readme.table([three.get("two")])
    link = f"https://example.org/fakebase/commit/{sha}"
    assert f"[fake] Change two ([on upstream's main]({link}), not in the pin)" in table
    assert f"| upstream {sha} |" in readme.details([three.get("two")])
    assert f"upstream {sha}" in run("patches", "list").out
    test_of_two(three, "self.assertEqual(fakebase.VALUE, 'pristine')")
    assert run("patches", "drop", "two").code == 0
    assert f"Upstream: {link}. Commit" in (three.root / "patches/HISTORY.md").read_text()


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("self.fail('no')", 1, "found that it fails: .*no; two is still needed and was kept"),
        ("self.skipTest('no GPU')", 1, "found that it is skipped here; two is still needed"),
        ("from fakebase import gone", 1, "found that it fails"),
    ],
)
def test_kept(three: House, run, body: str, code: int, message: str) -> None:
    test_of_two(three, body)
    refused(three, run, "two", code, message)


def test_required_by_another(three: House, run) -> None:
    track(three.root)
    refused(three, run, "one", 2, "expected no contribution to require one, found two")


def test_nothing_that_is_in_no_commit_goes(three: House, run) -> None:
    refused(three, run, "two", 2, "found none; what goes must be found again")
    track(three.root)
    (three.root / "pytorch_contrib/two/evidence/new.json").write_text("{}")
    refused(three, run, "two", 2, "evidence/new.json changed; what goes must be found again")


def test_a_drop_when_of_another_test(three: House, run) -> None:
    path: Path = three.patch("two")
    path.write_text(path.read_text().replace("Drop-when: test/", "Drop-when: tests/"))
    track(three.root)
    refused(three, run, "two", 2, "expected Drop-when: of two to name one of its tests")


def refused(house: House, run, name: str, code: int, message: str) -> None:
    reports = paths.REPO / "reports"
    before = {p: d for p, d in tree(house.root).items() if not p.startswith(reports.name)}
    ran = run("patches", "drop", name)
    assert ran.code == code
    assert re.search(message, ran.err), ran.err
    after = {p: d for p, d in tree(house.root).items() if not p.startswith(reports.name)}
    assert after == before
