"""What upstream has done since the pin to a patch's lines, and to its Drop-when test."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from integration.tests.patchset.conftest import LINES, House, line, user_git
from integration.tests.upstream.conftest import tools, wheel
from integration.upstream.since import moved, since_pin

CORE = "fakebase/core.py"


@pytest.fixture
def one(house: House) -> House:
    """A patch of line 20: its hunk is the lines 17 to 23."""
    house.add("one", {CORE: line(20, "one = 1")})
    return house


@pytest.fixture
def clone(one: House, tmp_path: Path) -> Path:
    folder = one.checkout(tmp_path / "clone")
    user_git(folder, "branch", "-m", "main")
    user_git(folder, "tag", "v1.0")
    return folder


def commit(clone: Path, subject: str, text: str | None = None, file: str = CORE) -> None:
    if text is not None:
        (clone / file).write_text(text)
    user_git(clone, "add", "-A")
    user_git(clone, "commit", "--allow-empty", "-qm", subject)


def listed(house: House, clone: Path, name: str = "one") -> list[str]:
    base = user_git(clone, "rev-parse", "main").strip()
    since = since_pin(house.get(name), clone, base)
    assert not since.unknown
    return [c.subject for c in since.commits]


def edit(clone: Path, old: str, new: str, file: str = CORE) -> None:
    text = (clone / file).read_text()
    assert old in text
    commit(clone, f"{old!r} to {new!r}", text.replace(old, new, 1), file)


@pytest.mark.parametrize(
    ("old", "new", "touches"),
    [
        ("line 20\n", "changed\n", True),
        ("line 17\n", "context\n", True),
        ("line 23\n", "context\n", True),
        ("line 16\n", "before\n", False),
        ("line 24\n", "after\n", False),
        ("line 20\n", "", True),
        ("line 17\n", "", True),
        ("line 23\n", "", True),
        ("line 16\n", "", False),
        ("line 24\n", "", False),
        ("line 16\nline 17\n", "", True),
        ("line 23\nline 24\n", "", True),
        ("".join(f"line {n}\n" for n in range(17, 24)), "", True),
        ("line 19\n", "line 19\ninserted\n", True),
        ("line 16\n", "line 16\ninserted\n", False),
        ("line 23\n", "line 23\ninserted\n", False),
        ("line 1\n", "more\nmore\nmore\nline 1\n", False),
        ("line 20\n", "more\nmore\nmore\n", True),
        (LINES, "all of it\n", True),
        (LINES, "", True),
        ("line 40\n", "line 40", False),
    ],
)
def test_one_commit(one: House, clone: Path, old: str, new: str, touches: bool) -> None:
    edit(clone, old, new)
    assert listed(one, clone) == ([f"{old!r} to {new!r}"] if touches else [])


def test_newest_first_and_none_of_the_neighbours(one: House, clone: Path) -> None:
    """Lines move before and between; what is undone in the end has touched them, too."""
    commit(clone, "Nothing")
    edit(clone, "line 2\n", "two\nmore\nmore\n")
    edit(clone, "line 20\n", "twenty\n")
    edit(clone, "line 16\n", "beside\n")
    edit(clone, "line 17\n", "context\n")
    edit(clone, "more\n", "")
    edit(clone, "twenty\n", "line 20\n")
    assert listed(one, clone) == [
        r"'twenty\n' to 'line 20\n'",
        r"'line 17\n' to 'context\n'",
        r"'line 20\n' to 'twenty\n'",
    ]


def test_of_a_branch_that_was_merged(one: House, clone: Path) -> None:
    user_git(clone, "switch", "-qc", "side")
    edit(clone, "line 20\n", "twenty\n")
    user_git(clone, "switch", "-q", "main")
    edit(clone, "line 3\n", "three\n")
    user_git(clone, "merge", "-q", "--no-ff", "-m", "Merge", "side")
    assert listed(one, clone) == [r"'line 20\n' to 'twenty\n'"]


def test_a_file_that_was_renamed_twice_and_removed(one: House, clone: Path) -> None:
    edit(clone, "line 20\n", "twenty\n")
    user_git(clone, "mv", CORE, "fakebase/heart.py")
    commit(clone, "Rename")
    edit(clone, "line 18\n", "eighteen\n", "fakebase/heart.py")
    edit(clone, "line 2\n", "two\n", "fakebase/heart.py")
    user_git(clone, "mv", "fakebase/heart.py", "fakebase/soul.py")
    commit(clone, "Rename again")
    edit(clone, "line 19\n", "nineteen\n", "fakebase/soul.py")
    expected = [
        r"'line 19\n' to 'nineteen\n'",
        "Rename again",
        r"'line 18\n' to 'eighteen\n'",
        "Rename",
        r"'line 20\n' to 'twenty\n'",
    ]
    assert listed(one, clone) == expected
    user_git(clone, "rm", "-q", "fakebase/soul.py")
    commit(clone, "Remove")
    assert listed(one, clone) == ["Remove", *expected]


def test_lines_are_counted_on_what_the_patch_requires(one: House, clone: Path) -> None:
    below = line(2, "two\n" + "more\n" * 9)
    one.add("low", {CORE: below})
    one.add("high", {CORE: below.replace("line 30\n", "thirty\n")}, requires=["low"])
    edit(clone, "line 30\n", "upstream's\n")
    edit(clone, "line 39\n", "far\n")
    edit(clone, "line 20\n", "also far\n")
    assert listed(one, clone, "high") == [r"'line 30\n' to \"upstream's\n\"".replace('\\"', '"')]


def test_a_file_that_the_patch_makes(one: House, clone: Path) -> None:
    one.add("new", {"fakebase/new.py": "new\n"})
    assert listed(one, clone, "new") == []
    commit(clone, "Take the name", "upstream's\n", "fakebase/new.py")
    assert listed(one, clone, "new") == ["Take the name"]


def test_the_pins_commit_comes_before_its_tag(one: House, clone: Path) -> None:
    edit(clone, "line 20\n", "before the pin\n")
    pin = user_git(clone, "rev-parse", "HEAD").strip()
    edit(clone, "before the pin\n", "since the pin\n")
    file = one.root / "patches/pins.toml"
    file.write_text(file.read_text().replace("0" * 40, pin))
    assert listed(one, clone) == [r"'before the pin\n' to 'since the pin\n'"]


SPANS = st.tuples(st.integers(1, 30), st.integers(0, 9)).map(lambda s: (s[0], min(30, sum(s))))


@settings(max_examples=60, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 4), st.integers(0, 4)), max_size=4),
    span=SPANS,
)
def test_what_is_left_of_a_span_is_in_it(edits: list[tuple[int, int, int]], span: tuple) -> None:
    """Against the lines themselves, no two of which are equal."""
    old = [f"line {n}\n" for n in range(1, 31)]
    new = list(old)
    for number, (at, gone, come) in enumerate(edits):
        new[at : at + gone] = [f"new {number}.{n}\n" for n in range(come)]
    if not new:
        return
    first, last = span
    ((start, end),) = moved([span], "".join(old).encode(), "".join(new).encode())
    assert 1 <= start <= end <= len(new)
    covered, kept = new[start - 1 : end], [s for s in old[first - 1 : last] if s in new]
    assert [s for s in covered if s in kept] == kept
    if kept == old[first - 1 : last]:  # both ends are there: nothing beyond them is
        assert (covered[0], covered[-1]) == (kept[0], kept[-1])


def test_told_on_the_terminal_and_in_the_text(one: House, clone: Path, run) -> None:
    edit(clone, "line 17\n", "context\n")
    edit(clone, "context\n", "line 17\n")
    ran = run("patches", "pr", "one", "--checkout", str(clone), "--no-test")
    assert ran.code == 0, ran.err
    base = user_git(clone, "rev-parse", "--short=12", "main").strip()
    rows = user_git(clone, "log", "--format=%h %cs %s", "v1.0..main").splitlines()
    told = [
        f"2 commits between fakebase 1.0 and {base} touch the lines of the patch.",
        *rows,
        f"Its Drop-when test on {base} without the patch: not run, as asked by --no-test.",
    ]
    assert [s[10:] for s in ran.out.splitlines()[:4]] == told
    text = Path(ran.out.partition("text      ")[2].splitlines()[0]).read_text()
    assert "\n".join(f"- {s}" for s in told) in text.partition("before sending. -->")[2]


def test_told_where_the_patch_no_longer_fits(one: House, clone: Path, run) -> None:
    edit(clone, "line 20\n", "twenty\n")
    ran = run("patches", "pr", "one", "--checkout", str(clone))
    assert ran.code == 2
    assert "1 commit between fakebase 1.0 and " in ran.out
    assert "not run: a checkout of torch has no compiled code" in ran.out
    assert "CONFLICT" in ran.err


def test_a_clone_without_the_pin(one: House, clone: Path, tmp_path: Path, run) -> None:
    edit(clone, "line 30\n", "thirty\n")
    shallow = tmp_path / "shallow"
    user_git(tmp_path, "clone", "-q", "--depth=1", "--no-tags", f"file://{clone}", str(shallow))
    ran = run("patches", "pr", "one", "--checkout", str(shallow), "--no-test")
    assert ran.code == 0, ran.err
    assert ran.out.startswith(
        f"upstream  The commits since fakebase 1.0 cannot be listed, as {shallow} has neither its "
        f"commit 000000000000 nor its tag v1.0: run `git -C {shallow} fetch --tags "
    )
    assert "\nbranch    one of " in ran.out


def test_a_shallow_clone_with_the_pin(one: House, clone: Path, tmp_path: Path) -> None:
    """Its oldest commit looks as if it had added every file."""
    for number in range(30, 40):
        edit(clone, f"line {number}\n", "changed\n")
    shallow = tmp_path / "shallow"
    user_git(tmp_path, "clone", "-q", "--depth=3", "--no-tags", f"file://{clone}", str(shallow))
    user_git(shallow, "fetch", "-q", "--depth=1", "origin", "tag", "v1.0")
    base = user_git(shallow, "rev-parse", "main").strip()
    since = since_pin(one.get("one"), shallow, base)
    assert since.lines == (
        f"The commits since fakebase 1.0 cannot be listed, as the shallow clone {shallow} lacks "
        f"some of them: run `git -C {shallow} fetch --unshallow`.",
    )
    user_git(shallow, "fetch", "-q", "--unshallow")
    assert since_pin(one.get("one"), shallow, base).commits == ()


BACKEND = """\
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "fakeapp-2.0-py3-none-any.whl"
    info = "fakeapp-2.0.dist-info"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as archive:
        archive.write("fakeapp/__init__.py")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: fakeapp\\nVersion: 2.0\\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(f"{info}/RECORD", "")
    return name
"""  # noqa: E501


@pytest.mark.parametrize(
    ("value", "verdict"), [("newer", "passes."), ("older", "fails: "), (None, "not run: no pyproj")]
)
def test_drop_when_on_the_base(
    house: House, tmp_path: Path, offline: Path, run, value: str | None, verdict: str
) -> None:
    """It runs on the commit of --base, in an environment of its own, without the patch."""
    house.add("app", {"fakeapp/train.py": line(20, "app = 1")}, upstream="torchtitan")
    (house.root / "torchtitan_contrib/app/test_app.py").write_text(
        "import fakeapp, unittest\n\n\nclass Test(unittest.TestCase):\n"
        "    def test_app(self):\n        self.assertEqual(fakeapp.APP, 'newer')\n"
    )
    clone = house.checkout(tmp_path / "clone", "torchtitan")
    user_git(clone, "tag", "v1.0")
    if value:
        (clone / "backend.py").write_text(BACKEND)
        (clone / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
    commit(clone, "Newer", f"APP = {value!r}\n", "fakeapp/__init__.py")
    user_git(clone, "branch", "there")
    commit(clone, "Not the base", "APP = 'of the checkout'\n", "fakeapp/__init__.py")
    wheel(offline, "fakebase", "1.0")
    tools(offline)
    before = user_git(clone, "worktree", "list")
    ran = run("patches", "pr", "app", "--checkout", str(clone), "--base", "there")
    assert ran.code == 0, ran.err
    assert f"without the patch: {verdict}" in ran.out
    assert user_git(clone, "worktree", "list") == before


def test_what_upstreams_main_has_is_prepared_on_a_base_alone(one: House, clone: Path, run) -> None:
    link = "https://example.org/fakebase/pull/7"
    one.add("two", {CORE: line(30, "two = 2")}, status=f"upstream {link}")
    asked = ("patches", "pr", "two", "--checkout", str(clone), "--no-test")
    before = user_git(clone, "for-each-ref")
    ran = run(*asked)
    assert (ran.code, ran.out) == (2, "")
    assert (
        f"expected a change that the main branch of pytorch lacks, found that it has two ({link}), "
        f"while the pin 1.0 does not; nothing was prepared: name a revision with --base"
    ) in " ".join(ran.err.split())
    assert user_git(clone, "for-each-ref") == before
    ran = run(*asked, "--base", "v1.0")
    assert ran.code == 0, ran.err
    assert user_git(clone, "branch", "--list", "two")
