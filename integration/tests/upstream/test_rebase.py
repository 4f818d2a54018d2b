"""Rebase onto a newer pin: conflicts, interruptions, and patches that upstream has taken."""

import re
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from integration.cli.main import main
from integration.ground.errors import UserError
from integration.patchset import git as git_module
from integration.patchset import pins, repository
from integration.tests.patchset.conftest import LINES, PRISTINE, House, line, tree, user_git
from integration.tests.upstream.conftest import track, wheel
from integration.upstream import newer, rebase
from integration.upstream.rebase import Done, Stopped

CORE = "fakebase/core.py"
COMMIT = "c" * 40


@pytest.fixture
def full(house: House) -> House:
    house.add("one", {CORE: line(3, "one")})
    house.add("two", {CORE: line(30, "two"), "fakebase/new.py": "new\n"})
    house.add("three", {CORE: line(4, "three", line(3, "one"))}, requires=["one"])
    house.add("app", {"fakeapp/train.py": line(5, "app")}, upstream="torchtitan", requires=["one"])
    track(house.root)
    return house


def onto(tmp_path: Path, **edits: str | None) -> Stopped | Done:
    """Rebase pytorch's fake onto version 2.0, a wheel with ``edits``."""
    path = wheel(tmp_path / "newer", "fakebase", "2.0", **edits)
    others = newer.parse([f"fakebase=={path}"], pins.load(), "--onto")
    return rebase.start(others, {"pytorch": COMMIT})


def install(house: House, **edits: str | None) -> None:
    """Install what the wheel of ``onto`` holds."""
    house.install("fakebase", "2.0")
    for stem, text in edits.items():
        file = house.site / "fakebase" / f"{stem}.py"
        file.unlink() if text is None else file.write_text(text)


def test_moved_lines(full: House, tmp_path: Path) -> None:
    core = LINES.replace("line 15\n", "line 15\nmore\nmore\n")
    done = onto(tmp_path, core=core)
    assert isinstance(done, Done)
    assert done.said == (
        "pytorch/one: changed",  # its `index` line names the newer file
        "pytorch/two: changed",
        "pytorch/three: changed",
    )
    install(full, core=core)
    assert full.check() == []
    assert "@@ -29,7 +29,7 @@ line 26" in full.patch("two").read_text()
    text = (full.root / "patches/pins.toml").read_text()
    assert_expected_inline(
        re.sub(r"[0-9a-f]{64}", "SHA", text),
        """\
# kept comment

[pytorch]
package = "fakebase"
version = "2.0"
repository = "https://example.org/fakebase"
tag = "v2.0"
commit = "cccccccccccccccccccccccccccccccccccccccc"

[pytorch.files]
"fakebase/core.py" = "SHA"

[torchtitan]
package = "fakeapp"
version = "1.0"
repository = "https://example.org/fakeapp"
tag = "v1.0"
commit = "0000000000000000000000000000000000000000"

[torchtitan.files]
"fakeapp/train.py" = "SHA"
""",
    )
    assert not rebase.folder().exists()


def test_a_moved_file_is_followed(full: House, tmp_path: Path) -> None:
    assert isinstance(onto(tmp_path, core=None, kernel=LINES), Done)
    install(full, core=None, kernel=LINES)
    assert full.check() == []
    assert full.get("two").old_paths == {"fakebase/kernel.py"}


def test_conflict_mended(full: House, tmp_path: Path, run) -> None:
    before = tree(full.root)
    path = wheel(tmp_path / "newer", "fakebase", "2.0", core=line(30, "thirty"))
    ran = run("patches", "rebase", "--onto", f"fakebase=={path}", "--commit", f"fakebase=={COMMIT}")
    here = rebase.folder() / "pytorch"
    assert (ran.code, ran.out) == (
        1,
        f"""\
pytorch stopped at two:
CONFLICT (content): Merge conflict in {CORE}

look      git -C {here} show REBASE_HEAD
mend      edit {CORE} there, then git -C {here} add -A
go on     integration patches rebase --continue
or        integration patches rebase --abort

patches/ is as it was until all is done
""",
    )
    ran = run("patches", "rebase", "--continue")
    assert (ran.code, f"found {CORE} in conflict" in ran.err) == (2, True)
    user_git(here, "add", "-A")
    assert f"found {CORE}:" in run("patches", "rebase", "--continue").err  # with its markers
    assert tree(full.root) == before
    (here / CORE).write_text(line(3, "one", line(30, "thirty and two")))
    assert "edited and not added" in run("patches", "rebase", "--continue").err
    user_git(here, "add", "-A")
    ran = run("patches", "rebase", "--continue")
    assert ran.code == 0
    assert "fakebase: 1.0 -> 2.0 (v2.0, cccccccccccc)" in ran.out
    assert 'git commit -m "Move the pin to fakebase 2.0"' in ran.out
    install(full, core=line(30, "thirty"))
    assert full.check() == []
    assert "-thirty\n+thirty and two\n" in full.patch("two").read_text()


def test_abort(full: House, tmp_path: Path, run) -> None:
    before = tree(full.root)
    assert isinstance(onto(tmp_path, core=line(30, "thirty")), Stopped)
    with pytest.raises(UserError, match="expected no rebase under way"):
        onto(tmp_path)
    assert run("patches", "rebase", "--abort").code == 0
    assert tree(full.root) == before
    assert not rebase.folder().exists()
    for option in ("--continue", "--abort"):
        assert "expected a rebase under way, found none" in run("patches", "rebase", option).err
    assert "expected one of --onto" in run("patches", "rebase").err


@pytest.mark.parametrize("killed_at", ["rebase", "export"])
def test_killed_and_taken_up(
    full: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    before = tree(full.root)
    core = line(15, "changed")
    attempt = git_module.attempt

    def dies(arguments, *rest, **options):
        command = "rebase" if killed_at == "rebase" else "diff-tree"
        if arguments[0] == command:
            raise KeyboardInterrupt
        return attempt(arguments, *rest, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(git_module, "attempt", dies)
        onto(tmp_path, core=core)
    assert tree(full.root) == before
    assert isinstance(rebase.go_on(), Done)
    install(full, core=core)
    assert full.check() == []


def test_killed_with_a_resolution(
    full: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a person has mended is not lost, and git's half of something is not taken for it."""
    stopped = onto(tmp_path, core=line(30, "thirty"))
    assert isinstance(stopped, Stopped)
    (stopped.checkout / CORE).write_text(line(3, "one", line(30, "thirty and two")))
    user_git(stopped.checkout, "add", "-A")
    attempt = git_module.attempt

    def dies(arguments, *rest, **options):
        if arguments[0] == "rebase":
            (stopped.checkout / "fakebase/new.py").write_text("half")
            raise KeyboardInterrupt
        return attempt(arguments, *rest, **options)

    with monkeypatch.context() as patched, pytest.raises(SystemExit) as stop:
        patched.setattr(git_module, "attempt", dies)
        main(["patches", "rebase", "--continue"])
    assert stop.value.code == 130
    assert capsys.readouterr().err == (
        "error: interrupted; patches/ is as it was: run `integration patches rebase --continue`, "
        "which takes up what is done, or `--abort`\n"
    )
    assert isinstance(rebase.go_on(), Done)
    install(full, core=line(30, "thirty"))
    assert full.check() == []
    patch = full.patch("two").read_text()
    assert "-thirty\n+thirty and two\n" in patch
    assert "+new\n" in patch


def test_killed_while_it_begins(
    full: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(rebase, "_prepare", dies)
        onto(tmp_path)
    assert list(rebase.folder().parent.iterdir()) == []
    assert isinstance(onto(tmp_path), Done)


def test_a_patch_that_upstream_has_taken(full: House, tmp_path: Path) -> None:
    """It goes into the history; those that required it, of either upstream, no longer do."""
    head = user_git(full.root, "rev-parse", "--short=12", "HEAD").strip()
    digest = full.get("one").sha256
    core = line(3, "one")
    done = onto(tmp_path, core=core)
    assert isinstance(done, Done)
    assert done.said == (
        "pytorch/two: changed",
        "pytorch/three: changed",
        "pytorch/one: removed, as its commit is gone",
        "torchtitan/app: changed, no longer requires what upstream has",
    )
    install(full, core=core)
    assert full.check() == []
    assert [(c.name, c.requires) for c in repository.load()] == [
        ("two", ()),
        ("three", ()),
        ("app", ()),
    ]
    assert not (full.root / "pytorch_contrib/one").exists()
    last = (full.root / "patches/HISTORY.md").read_text().splitlines()[-1]
    assert re.sub(r"^- \d{4}-\d\d-\d\d ", "- DATE ", last) == (
        "- DATE **one** (pytorch): [fake] Change one. Nothing of it was left on fakebase 2.0. "
        f"Upstream: no link. Commit {head}: `patches/pytorch/one.patch` "
        f"(sha256 {digest}), `pytorch_contrib/one/`, evidence: none."
    )


def test_a_conflict_resolved_to_what_upstream_has(full: House, tmp_path: Path) -> None:
    stopped = onto(tmp_path, core=line(30, "two, but better"), new="new\n")
    assert isinstance(stopped, Stopped)
    user_git(stopped.checkout, "checkout", "-q", "--ours", CORE)
    user_git(stopped.checkout, "add", "-A")
    assert isinstance(rebase.go_on(), Done)
    assert [c.name for c in repository.load()] == ["one", "three", "app"]
    assert "**two**" in (full.root / "patches/HISTORY.md").read_text()


def test_both_upstreams_at_once(full: House, tmp_path: Path) -> None:
    base = wheel(tmp_path / "newer", "fakebase", "2.0", core=line(15, "changed"))
    app = wheel(tmp_path / "newer", "fakeapp", "1.1", train=line(15, "changed"))
    values = [f"fakebase=={base}", f"fakeapp=={app}"]
    others = newer.parse(values, pins.load(), "--onto")
    assert isinstance(rebase.start(others, {"pytorch": COMMIT, "torchtitan": COMMIT}), Done)
    assert [(p.version, p.tag) for p in pins.load().values()] == [("2.0", "v2.0"), ("1.1", "v1.1")]


def test_patches_changed_meanwhile_are_not_overwritten(full: House, tmp_path: Path) -> None:
    stopped = onto(tmp_path, core=line(30, "thirty"))
    assert isinstance(stopped, Stopped)
    full.add("late", {"fakebase/block.py": "late\n"})
    before = tree(full.root)
    (stopped.checkout / CORE).write_text(line(3, "one", line(30, "two")))
    user_git(stopped.checkout, "add", "-A")
    with pytest.raises(UserError, match="that the rebase began with, found others"):
        rebase.go_on()
    assert tree(full.root) == before


def test_where_the_commit_comes_from(full: House, tmp_path: Path) -> None:
    """The package's version.py, or the tag of its repository; else it has to be given."""
    upstream = full.checkout(tmp_path / "upstream")
    user_git(upstream, "tag", "-a", "-m", "2.0", "v2.0")
    toml = full.root / "patches/pins.toml"
    toml.write_text(toml.read_text().replace("https://example.org/fakebase", str(upstream)))
    plain = newer.parse([f"fakebase=={wheel(tmp_path, 'fakebase', '2.0')}"], pins.load(), "--onto")
    assert (
        rebase._pin_of(plain["pytorch"], None).commit
        == user_git(upstream, "rev-parse", "HEAD").strip()
    )
    told = wheel(tmp_path, "fakebase", "2.1", version=f"git_version = '{'d' * 40}'\n")
    other = newer.parse([f"fakebase=={told}"], pins.load(), "--onto")
    assert rebase._pin_of(other["pytorch"], None).commit == "d" * 40
    none = newer.parse([f"fakebase=={wheel(tmp_path, 'fakebase', '2.2')}"], pins.load(), "--onto")
    with pytest.raises(UserError, match=r"give it with --commit fakebase==SHA"):
        rebase._pin_of(none["pytorch"], None)


def test_the_pins_own_version(full: House, tmp_path: Path) -> None:
    others = newer.parse([f"fakebase=={wheel(tmp_path, 'fakebase', '1.0')}"], pins.load(), "--onto")
    with pytest.raises(UserError, match="expected another version of fakebase than the pin"):
        rebase.start(others, {"pytorch": COMMIT})


@pytest.mark.parametrize("value", ["fakebase", "fakebase==abc", f"fakeapp=={COMMIT}"])
def test_a_commit_that_is_none(full: House, tmp_path: Path, run, value: str) -> None:
    path = wheel(tmp_path, "fakebase", "2.0")
    ran = run("patches", "rebase", "--onto", f"fakebase=={path}", "--commit", value)
    assert (ran.code, "expected --commit fakebase==SHA with all 40 digits, got" in ran.err) == (
        2,
        True,
    )
    assert not rebase.folder().exists()


def test_a_checkout_is_no_pin(full: House, tmp_path: Path) -> None:
    upstream = full.checkout(tmp_path / "upstream")
    others = newer.parse([f"fakebase=={upstream}"], pins.load(), "--onto")
    with pytest.raises(UserError, match="integration patches drift --against fakebase=="):
        rebase.start(others, {})
    assert PRISTINE[CORE] == LINES
