"""Every verdict on a newer upstream, from a checkout, a wheel, and a wheel on a server."""

import http.server
import json
import threading
from pathlib import Path

import pytest

from integration.ground.errors import UserError
from integration.patchset import pins, repository
from integration.tests.patchset.conftest import LINES, House, line
from integration.tests.upstream.conftest import tools, wheel
from integration.upstream import index, newer
from integration.upstream.drift import Drift, Verdict, drift, worst

CORE = "fakebase/core.py"
TWO = {"one thing more": 3, "another thing more": 30}  # new lines long enough to tell


def judge(house: House, tmp_path: Path, core: str, **others: str) -> dict[str, Drift]:
    checkout = house.checkout(tmp_path / "newer", core=core, **others)
    against = newer.parse([f"fakebase=={checkout}"], pins.load(), "--against")
    return {d.name: d for d in drift(repository.load(), against)}


@pytest.fixture
def two(house: House) -> House:
    text = LINES
    for new, number in TWO.items():
        text = line(number, new, text)
    house.add("two", {CORE: text})
    return house


def test_applies(two: House, tmp_path: Path) -> None:
    got = judge(two, tmp_path, LINES)["two"]
    assert (got.verdict, got.detail, got.drop_when) == (Verdict.APPLIES, "", "not run")


def test_applies_with_offset(two: House, tmp_path: Path) -> None:
    got = judge(two, tmp_path, LINES.replace("line 15\n", "line 15\nmore\nmore\n"))["two"]
    assert (got.verdict, got.detail) == (Verdict.OFFSET, "1 of 2 hunks, up to +2 lines")


def test_needs_rebase(two: House, tmp_path: Path) -> None:
    got = judge(two, tmp_path, line(31, "changed"))["two"]
    assert (got.verdict, got.detail) == (Verdict.REBASE, "1 of 2 hunks apply; 0 of 2 hunks there")
    (finding,) = got.findings
    assert (finding.where, finding.expected) == (f"{CORE}:31", "`line 31`")
    assert finding.found == "`changed`"


def test_already_there_identical(two: House, tmp_path: Path) -> None:
    merged = line(3, "one thing more", line(30, "another thing more"))
    got = judge(two, tmp_path, merged.replace("line 15\n", "moved\n" * 5))["two"]
    assert got.verdict is Verdict.IDENTICAL


def test_already_there_modified(two: House, tmp_path: Path) -> None:
    """As upstream merges: one hunk as it was, the other with a line of its own beside."""
    merged = line(3, "one thing more", line(30, "another thing more\nand upstream's own"))
    got = judge(two, tmp_path, merged)["two"]
    assert got.verdict is Verdict.MODIFIED
    assert got.detail == "1 of 2 hunks and 2 of 2 telling new lines are there"


def test_partly_merged_is_still_needed(two: House, tmp_path: Path) -> None:
    got = judge(two, tmp_path, line(3, "one thing more"))["two"]
    assert (got.verdict, got.detail) == (Verdict.REBASE, "1 of 2 hunks apply; 1 of 2 hunks there")


def test_rewritten_surroundings_are_not_a_merge(two: House, tmp_path: Path) -> None:
    rewritten = line(3, "other", line(30, "different"))
    assert judge(two, tmp_path, rewritten)["two"].verdict is Verdict.REBASE


def test_a_removed_file_and_a_taken_name(house: House, tmp_path: Path) -> None:
    house.add("gone", {"fakebase/block.py": "a text of its own\n"})
    house.add("fresh", {"fakebase/fresh.py": "fresh\n"})
    checkout = house.checkout(tmp_path / "newer", fresh="upstream's own\n")
    (checkout / "fakebase/block.py").unlink()
    against = newer.parse([f"pytorch=={checkout}"], pins.load(), "--against")
    gone, fresh = drift(repository.load(), against)
    assert (gone.verdict, gone.findings[0].found) == (Verdict.REBASE, "no such file")
    assert (fresh.verdict, fresh.findings[0].found) == (Verdict.REBASE, "a file")


def test_requirements_are_below(house: House, tmp_path: Path) -> None:
    """A merged requirement is in the newer files; one to be rebased is named first."""
    house.add("low", {CORE: line(3, "a line of low")})
    house.add("high", {CORE: line(4, "a line of high", line(3, "a line of low"))}, requires=["low"])
    merged = judge(house, tmp_path / "a", line(3, "a line of low"))
    assert [d.verdict for d in merged.values()] == [Verdict.IDENTICAL, Verdict.APPLIES]
    plain = judge(house, tmp_path / "b", LINES)
    assert [d.verdict for d in plain.values()] == [Verdict.APPLIES, Verdict.APPLIES]
    broken = judge(house, tmp_path / "c", line(2, "changed"))
    assert [d.verdict for d in broken.values()] == [Verdict.REBASE, Verdict.REBASE]
    assert broken["high"].detail.startswith("after low, which it requires; ")


def test_the_worst_verdict_is_the_exit_code(two: House, tmp_path: Path) -> None:
    assert worst([]) == 0
    assert worst(list(judge(two, tmp_path / "a", line(15, "new\nnew")).values())) == 0
    both = line(3, "one thing more", line(30, "another thing more"))
    assert worst(list(judge(two, tmp_path / "b", both).values())) == 3
    two.add("late", {CORE: line(20, "late")})
    assert worst(list(judge(two, tmp_path / "c", line(20, "moved on", both)).values())) == 5


def test_table_json_and_exit_code(two: House, tmp_path: Path, run) -> None:
    newer_wheel = wheel(tmp_path / "mine", "fakebase", "2.0", core=line(31, "changed"))
    ran = run("patches", "drift", "--against", f"fakebase=={newer_wheel}")
    assert ran.code == 5
    assert [" ".join(row.split()) for row in ran.out.splitlines()[:2]] == [
        "name against verdict Drop-when what",
        "two fakebase 2.0 needs rebase not run 1 of 2 hunks apply; 0 of 2 hunks there",
    ]
    assert "next      integration patches rebase --onto fakebase==2.0" in ran.out
    ran = run("patches", "drift", "--against", f"fakebase=={newer_wheel}", "--json")
    (record,) = json.loads(ran.out)
    assert (ran.code, record["verdict"], record["drop_when"]) == (5, "needs rebase", "not run")
    assert record["findings"][0]["line"] == 31


def test_drop_when_in_a_throwaway_environment(two: House, offline: Path, run) -> None:
    """One test passes on what upstream made of it, in other lines; one does not."""
    two.add("late", {"fakebase/block.py": "late\n"})
    for name, expected in (("two", "newer"), ("late", "late")):
        (two.root / f"pytorch_contrib/{name}/test_{name}.py").write_text(
            f"import fakebase, fakeapp, unittest\n\n"
            f"class Test(unittest.TestCase):\n    def test_{name}(self):\n"
            f"        self.assertEqual(fakebase.VALUE, {expected!r})\n"
            f"        self.assertEqual(fakeapp.APP, 'pristine')\n"
        )
    wheel(offline, "fakebase", "2.0", __init__="VALUE = 'newer'\n", core=line(31, "changed"))
    wheel(offline, "fakeapp", "1.0")
    tools(offline)
    against = ("--against", "fakebase==2.0", "--run-drop-when", "--json")
    ran = run("patches", "drift", *against)
    assert [(d["name"], d["verdict"], d["drop_when"]) for d in json.loads(ran.out)] == [
        ("two", "needs rebase", "passes"),
        ("late", "applies", "fails"),
    ]
    assert not list((two.root.parent / "cache").glob("drift-*"))


def test_no_environment_is_said_beside_the_verdict(
    two: House,
    tmp_path: Path,
    run,
) -> None:
    checkout = two.checkout(tmp_path / "newer")
    ran = run("patches", "drift", "--against", f"fakebase=={checkout}", "--run-drop-when")
    assert ran.code == 0
    assert f"Drop-when not run: no pyproject.toml in {checkout}" in ran.out


def test_constraints_are_about_what_is_installed(
    two: House,
    tmp_path: Path,
    offline: Path,
    monkeypatch: pytest.MonkeyPatch,
    run,
) -> None:
    """The files of a version that may not be installed can be read; why it was not is told."""
    wheel(offline, "fakebase", "2.0")
    wheel(offline, "fakeapp", "1.0")
    tools(offline)
    (tmp_path / "constraints.txt").write_text("fakebase<2\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    ran = run("patches", "drift", "--against", "fakebase==2.0", "--run-drop-when")
    assert (ran.code, "two   fakebase 2.0  applies" in ran.out) == (0, True)
    assert "The user requested (constraint) fakebase<2; nothing was changed" in ran.out


class Ranged(http.server.SimpleHTTPRequestHandler):
    """Serves ranges, as package indexes do, and counts the bytes."""

    sent = 0

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path)).read_bytes()
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        part = data[int(first) : int(last) + 1]
        type(self).sent += len(part)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_wheel_is_read_where_it_lies(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = "".join(f"{number * 7919 % 1000003}\n" for number in range(60_000))
    path = wheel(offline, "fakebase", "2.0", aaa=big, zzz=big)
    monkeypatch.chdir(offline)
    monkeypatch.setattr(index, "_READ_AHEAD", 4096)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ranged) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{path.name}"
        assert index.open_wheel(url).read(CORE).decode() == LINES
        server.shutdown()
    assert Ranged.sent < path.stat().st_size / 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fakebas==2", "did you mean fakebase"),
        (
            "fakebase",
            r"expected --against PACKAGE==VERSION or PACKAGE==PATH, got 'fakebase'; nothing",
        ),
        ("fakebase>=2", r"got 'fakebase>=2'; nothing was done: name a version or a path"),
        ("fakebase==./nowhere", "expected a checkout of fakebase at nowhere"),
        ("fakebase==9.9", r"expected a wheel of fakebase==9.9, pip said: .*No matching"),
    ],
)
def test_what_cannot_be_compared(house: House, value: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        newer.parse([value], pins.load(), "--against")


def test_one_package_twice(house: House, tmp_path: Path) -> None:
    checkout = house.checkout(tmp_path / "newer")
    values = [f"fakebase=={checkout}", f"pytorch=={checkout}"]
    with pytest.raises(UserError, match="expected --against pytorch once"):
        newer.parse(values, pins.load(), "--against")
