"""Patches to commits and back: the bytes return, and edits land in their own patch alone."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.ground.errors import UserError
from integration.patchset import scaffold
from integration.patchset.check import round_trip
from integration.patchset.patch import parse
from integration.tests.patchset.conftest import LINES, PRISTINE, House, line, tree, user_git
from integration.upstream import checkout


@pytest.fixture
def full(house: House) -> House:
    house.add("one", {"fakebase/core.py": line(3, "one\nuno")})
    house.add("two", {"fakebase/core.py": line(30, "two"), "fakebase/new.py": "new\n"})
    house.add("three", {"fakebase/core.py": line(3, "three\nuno")}, requires=["one"])
    house.add("app", {"fakeapp/train.py": line(5, "app")}, upstream="torchtitan", requires=["one"])
    return house


@pytest.fixture
def work(full: House, tmp_path: Path) -> Path:
    """An imported checkout; returns the folder that holds one for each upstream."""
    checkout.import_set(tmp_path / "work")
    return tmp_path / "work"


def edit(repo: Path, path: str, old: str, new: str) -> None:
    text = (repo / path).read_text()
    assert old in text
    (repo / path).write_text(text.replace(old, new, 1))


def test_round_trip(full: House, work: Path) -> None:
    before = tree(full.root)
    assert checkout.export_set(work) == [
        "pytorch/one: unchanged",
        "pytorch/two: unchanged",
        "pytorch/three: unchanged",
        "torchtitan/app: unchanged",
    ]
    assert tree(full.root) == before


def test_the_checkout_holds_sources_and_commits(full: House, work: Path) -> None:
    base = work / "pytorch"
    assert user_git(base, "log", "--format=%s").split("\n")[:-1] == [
        "[fake] Change three",
        "[fake] Change two",
        "[fake] Change one",
        "The pristine pin",
    ]
    assert user_git(base, "show", "pin:fakebase/core.py") == LINES
    assert "Patch-Name: one\n" in user_git(base, "log", "--format=%B")
    pristine = {path for path in PRISTINE if path.startswith("fakebase/")}
    assert {*tree(base)} == {*pristine, "fakebase/new.py"}


def test_an_edit_changes_its_own_patch_alone(full: House, work: Path) -> None:
    """Lines added early move every later hunk of the stack; the other patches keep their bytes."""
    repo = work / "pytorch"
    before = {name: full.patch(name).read_bytes() for name in ("two", "three")}
    edit(repo, "fakebase/core.py", "line 10\n", "line 10\n" + "more\n" * 20)
    user_git(repo, "commit", "-qam", "fixup! [fake] Change one")
    with pytest.raises(UserError, match="rebase -i --autosquash pin"):
        checkout.export_set(work)
    os.environ["GIT_SEQUENCE_EDITOR"] = "true"  # the isolation fixture takes it away again
    user_git(repo, "rebase", "-q", "-i", "--autosquash", "pin")
    del os.environ["GIT_SEQUENCE_EDITOR"]
    assert checkout.export_set(work)[:3] == [
        "pytorch/one: changed",
        "pytorch/two: unchanged",
        "pytorch/three: changed",  # it is made on "one"
    ]
    assert full.patch("two").read_bytes() == before["two"]
    assert full.check() == []


def test_export_twice(full: House, work: Path) -> None:
    edit(work / "pytorch", "fakebase/core.py", "three\n", "drei\n")
    user_git(work / "pytorch", "commit", "-qa", "--amend", "--no-edit")
    assert "pytorch/three: changed" in checkout.export_set(work)
    assert "pytorch/three: unchanged" in checkout.export_set(work)


def test_an_editor_keeps_lines_that_begin_with_an_issue(full: House, work: Path) -> None:
    """`(cascade_sum;` was all that an edited message kept of a sentence with #151761 in it."""
    os.environ["GIT_EDITOR"] = "sed -i 's/^Root cause: /&as\\n#7 says, /'"
    user_git(work / "pytorch", "commit", "-q", "--amend")
    del os.environ["GIT_EDITOR"]
    assert "pytorch/three: changed" in checkout.export_set(work)
    text = full.patch("three").read_text()
    assert "Root cause: as\n#7 says, it was so.\n" in text
    assert "Please enter the commit message" not in text


@pytest.mark.parametrize("blocked", ["cache/messages", "pytorch_contrib"])
def test_new_leaves_nothing_behind_that_is_half_made(
    full: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    """A file stands where a folder is needed: it stops root too, as a read-only one would not."""
    monkeypatch.setenv("INTEGRATION_CACHE", str(full.root / "cache"))
    (full.root / "cache").mkdir()
    if (full.root / blocked).is_dir():
        (full.root / blocked).rename(tmp_path / "away")
    (full.root / blocked).write_text("")
    before = tree(full.root)
    with pytest.raises((UserError, OSError)):
        scaffold.new("leaf_value", "pytorch")
    assert tree(full.root) == before


def test_new_contribution_goes_through(full: House, work: Path) -> None:
    folder, message = scaffold.new("leaf_value", "pytorch")
    assert "self.fail(" in (folder / "test_leaf_value.py").read_text()
    repo = work / "pytorch"
    edit(repo, "fakebase/deep/inner/leaf.py", "pristine", "leaf")
    user_git(repo, "commit", "-qa", "-F", str(message))
    assert "pytorch/leaf_value: new" in checkout.export_set(work)
    assert full.series().read_text() == "one\ntwo\nthree\nleaf_value\n"
    assert "Patch-Name" not in full.patch("leaf_value").read_text()
    pins = (full.root / "patches/pins.toml").read_text()
    assert '"fakebase/deep/inner/leaf.py" = ' in pins
    assert pins.startswith("# kept comment\n")
    assert full.check() == []


def test_reordered_and_dropped(full: House, work: Path) -> None:
    repo = work / "pytorch"
    tips = user_git(repo, "log", "--format=%H", "--reverse", "pin..").split()
    user_git(repo, "reset", "-q", "--hard", "pin")
    user_git(repo, "cherry-pick", tips[1], tips[0])
    assert checkout.export_set(work)[:3] == [
        "pytorch/two: unchanged",
        "pytorch/one: unchanged",
        "pytorch/three: removed, as its commit is gone",
    ]
    assert full.series().read_text() == "two\none\n"
    assert not full.patch("three").exists()
    assert full.check() == []


def test_pins_forget_files_that_no_patch_touches(full: House, work: Path) -> None:
    user_git(work / "pytorch", "reset", "-q", "--hard", "pin")
    checkout_app = work / "torchtitan"
    edit(checkout_app, "fakeapp/train.py", "app", "APP")
    message = user_git(checkout_app, "log", "-1", "--format=%B").replace(
        "Requires: one", "Requires:"
    )
    user_git(checkout_app, "commit", "-qa", "--amend", "-F", "-", stdin=message)
    checkout.export_set(work)
    assert "fakebase/core.py" not in (full.root / "patches/pins.toml").read_text()
    assert full.check() == []


def export_refusal(full: House, work: Path) -> str:
    before = tree(full.root)
    with pytest.raises(UserError) as caught:
        checkout.export_set(work)
    assert tree(full.root) == before
    return str(caught.value)


def test_undeclared_need_is_named(full: House, work: Path) -> None:
    repo = work / "pytorch"
    edit(repo, "fakebase/core.py", "two\n", "zwei\n")
    edit(repo, "fakebase/core.py", "line 31\n", "line 31 too\n")
    user_git(repo, "commit", "-qam", "[fake] More\n\nPatch-Name: more")
    message = export_refusal(full, work)
    assert "expected more to apply on the pin and what it requires" in message
    assert "add what it needs (one, two, three) to its Requires: line" in message


def test_commit_without_a_name(full: House, work: Path) -> None:
    edit(work / "pytorch", "fakebase/core.py", "line 20", "twenty")
    user_git(work / "pytorch", "commit", "-qam", "Twenty")
    message = export_refusal(full, work)
    assert 'git commit --amend --trailer "Patch-Name: NAME"' in message


def test_two_commits_of_one_name(full: House, work: Path) -> None:
    edit(work / "pytorch", "fakebase/core.py", "line 20", "twenty")
    user_git(work / "pytorch", "commit", "-qam", "Twenty\n\nPatch-Name: one")
    assert "found two with `Patch-Name: one`" in export_refusal(full, work)


def test_uncommitted_work_is_not_left_out(full: House, work: Path) -> None:
    edit(work / "pytorch", "fakebase/core.py", "line 20", "twenty")
    assert "found fakebase/core.py changed" in export_refusal(full, work)


def test_unfinished_rebase_drops_nothing(full: House, work: Path) -> None:
    repo = work / "pytorch"
    os.environ["GIT_SEQUENCE_EDITOR"] = "sed -i 1s/pick/edit/"
    user_git(repo, "rebase", "-q", "-i", "pin")
    del os.environ["GIT_SEQUENCE_EDITOR"]
    assert "git stopped at one (rebase-merge)" in export_refusal(full, work)


def test_patches_changed_since_the_import_are_not_overwritten(full: House, work: Path) -> None:
    full.add("late", {"fakebase/other/__init__.py": "OTHER = 2\n"})
    assert "found late changed in patches/pytorch since" in export_refusal(full, work)


def test_a_failing_export_writes_nothing(
    full: House, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from integration.ground import files as atomic

    edit(work / "pytorch", "fakebase/core.py", "three\n", "drei\n")
    user_git(work / "pytorch", "commit", "-qa", "--amend", "--no-edit")
    before = tree(full.root)
    replace, calls = os.replace, []

    def breaks(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(atomic.os, "replace", breaks)
    with pytest.raises(UserError, match=r"No space.*nothing was changed"):
        checkout.export_set(work)
    assert tree(full.root) == before


def test_import_refuses_to_overwrite(full: House, work: Path) -> None:
    with pytest.raises(UserError, match="which may hold your work"):
        checkout.import_set(work)


def test_import_stops_at_a_patch_that_does_not_fit(full: House, tmp_path: Path) -> None:
    """The way on when the pin has moved below a patch: mend it, and `git am --continue`."""
    data = full.patch("two").read_bytes().replace(b" line 29\n", b" line twenty-nine\n")
    full.patch("two").write_bytes(data)
    one, app = checkout.import_set(tmp_path / "mend")
    assert one.stopped is not None
    assert "patch does not apply" in one.stopped
    assert app.stopped is None
    repo = one.path
    assert "git stopped at one (rebase-apply)" in export_refusal(full, tmp_path / "mend")
    edit(repo, "fakebase/core.py", "line 30\n", "two\n")
    (repo / "fakebase/new.py").write_text("new\n")
    user_git(repo, "add", "-A")
    user_git(repo, "am", "--continue")
    assert "pytorch/two: changed" in checkout.export_set(tmp_path / "mend")
    assert full.check() == []


def test_names_that_cannot_be(full: House) -> None:
    with pytest.raises(UserError, match="expected a name of lower-case letters"):
        scaffold.new("Bad Name", "pytorch")
    with pytest.raises(UserError, match="found one in patches/pytorch already"):
        scaffold.new("one", "torchtitan")
    with pytest.raises(UserError, match="did you mean torchtitan"):
        scaffold.new("free", "torchtitn")


def test_written_files_are_plain(full: House, work: Path) -> None:
    edit(work / "pytorch", "fakebase/core.py", "three\n", "drei\n")
    user_git(work / "pytorch", "commit", "-qa", "--amend", "--no-edit")
    full.patch("three").chmod(0o644)
    checkout.export_set(work)
    assert stat.S_IMODE(full.patch("three").stat().st_mode) == 0o644


texts = st.lists(
    st.sampled_from(
        [f"line {n}" for n in range(1, 13)] + ["", "new", "-- ", "From x", "\ttab ", "é"]
    ),
    max_size=14,
).map(lambda lines: "".join(f"{text}\n" for text in lines))


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(core=texts, leaf=texts, new=texts, cut=st.booleans())
def test_any_edit_round_trips(house: House, core: str, leaf: str, new: str, cut: bool) -> None:
    house.series().write_text("")
    edits = {"fakebase/core.py": core, "fakebase/deep/inner/leaf.py": leaf}
    if new:
        edits["fakebase/new.py"] = new[:-1] if cut else new
    data = house.add("any", edits)
    contribution = parse("any", "pytorch", house.patch("any"), data)
    pristine = {path: text.encode() for path, text in PRISTINE.items() if path in edits}
    assert round_trip([contribution], pristine, {"any"}) == []
