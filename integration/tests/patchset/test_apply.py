"""``apply --to``: all or nothing on a user's own checkout, and it says what it found."""

import os
from pathlib import Path
from typing import Any

import pytest

from integration.ground import files as atomic
from integration.ground.errors import UserError
from integration.patchset import apply as module
from integration.patchset.apply import apply, take_off
from integration.tests.patchset.conftest import LINES, House, line, tree, user_git

CORE = "fakebase/core.py"


@pytest.fixture
def full(house: House) -> House:
    """Three patches: two that commute, one that needs the first; and one of the other upstream."""
    house.add("one", {CORE: line(3, "one"), "fakebase/fresh/new.py": "new\n"})
    house.add("two", {CORE: line(30, "two"), "fakebase/other/__init__.py": None})
    house.add("three", {CORE: line(4, "three", line(3, "one"))}, requires=["one"])
    house.add("app", {"fakeapp/train.py": line(5, "app")}, upstream="torchtitan")
    return house


@pytest.fixture
def checkout(full: House, tmp_path: Path) -> Path:
    return full.checkout(tmp_path / "checkout")


def refused(checkout: Path, *names: str, **options: bool) -> str:
    """Return the refusal, having seen that neither files, commits nor index have changed."""
    before = tree(checkout), user_git(checkout, "status", "--porcelain", "--branch")
    head = user_git(checkout, "rev-parse", "HEAD")
    with pytest.raises(UserError) as caught:
        apply(checkout, list(names) or None, **options)
    assert (tree(checkout), user_git(checkout, "status", "--porcelain", "--branch")) == before
    assert user_git(checkout, "rev-parse", "HEAD") == head
    return str(caught.value)


def test_the_set_is_applied(checkout: Path) -> None:
    assert apply(checkout) == [
        "app: belongs to torchtitan, not here",
        "one: applied",
        "two: applied",
        "three: applied",
    ]
    expected = line(30, "two", line(4, "three", line(3, "one")))
    assert (checkout / CORE).read_text() == expected
    assert (checkout / "fakebase/fresh/new.py").read_text() == "new\n"
    assert not (checkout / "fakebase/other/__init__.py").exists()
    assert [f for f in tree(checkout) if ".integration" in f] == []


def test_again_says_already_applied(checkout: Path) -> None:
    apply(checkout)
    before = tree(checkout)
    assert apply(checkout) == [
        "app: belongs to torchtitan, not here",
        "one: already applied",
        "two: already applied",
        "three: already applied",
    ]
    assert tree(checkout) == before


def test_one_more_on_top_of_some(checkout: Path) -> None:
    assert apply(checkout, ["two"]) == ["two: applied"]
    assert apply(checkout, ["three"]) == ["one: applied", "three: applied"]
    assert apply(checkout, ["three"]) == ["one: already applied", "three: already applied"]


def test_reverse_gives_the_pristine_files(checkout: Path) -> None:
    before = tree(checkout)
    apply(checkout)
    assert (
        take_off(checkout)
        == [
            "app: not applied",
            "one: taken off",
            "two: taken off",
            "three: taken off",
        ][1:]
    )
    assert tree(checkout) == before
    assert not (checkout / "fakebase/fresh").exists()
    assert take_off(checkout, ["one"]) == ["one: not applied"]


def test_reverse_takes_exactly_what_is_named(checkout: Path) -> None:
    apply(checkout)
    assert take_off(checkout, ["three"]) == ["three: taken off"]
    assert (checkout / CORE).read_text() == line(30, "two", line(3, "one"))


def test_reverse_of_a_required_patch_is_refused(checkout: Path) -> None:
    apply(checkout)
    before = tree(checkout)
    with pytest.raises(UserError, match="three, which is applied, requires it"):
        take_off(checkout, ["one"])
    assert tree(checkout) == before


def test_reverse_does_not_guess_at_a_merge(checkout: Path) -> None:
    (checkout / CORE).write_text(line(27, "newer"))
    user_git(checkout, "commit", "-qam", "newer")
    apply(checkout, ["two"], three_way=True)
    before = tree(checkout)
    with pytest.raises(UserError, match=r"expected two in .* exactly as it is stored"):
        take_off(checkout, ["two"])
    assert tree(checkout) == before


def test_reverse_of_a_half_applied_patch_is_refused(checkout: Path) -> None:
    """One of its two files is as patched; what is whole beside it does not go either."""
    apply(checkout, ["one", "two"])
    (checkout / CORE).write_text(line(30, "two"))
    before = tree(checkout)
    for names in (["one"], ["two", "one"], None):
        with pytest.raises(UserError, match=r"expected one in .* found another state: .*core.py"):
            take_off(checkout, names)
    assert tree(checkout) == before
    assert take_off(checkout, ["two"]) == ["two: taken off"]


def test_a_folder_without_git_will_do(full: House, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    (folder / "fakebase/other").mkdir(parents=True)
    (folder / CORE).write_text(LINES)
    (folder / "fakebase/other/__init__.py").write_text("OTHER = 1\n")
    apply(folder)
    assert "two" in (folder / CORE).read_text()


def test_a_folder_inside_another_repository(full: House, tmp_path: Path) -> None:
    """`git apply` below the root of a repository skips every path without a word."""
    outer = full.checkout(tmp_path / "outer")
    inner = full.checkout(outer / "third_party")
    apply(inner, ["two"])
    assert "two" in (inner / CORE).read_text()
    assert (outer / CORE).read_text() == LINES


def test_a_file_that_differs_from_the_pin_is_refused(checkout: Path) -> None:
    (checkout / CORE).write_text(line(15, "newer"))
    user_git(checkout, "commit", "-qam", "newer")
    message = refused(checkout, "two")
    assert f"expected {CORE} of fakebase 1.0 (sha256 " in message
    assert "check out v1.0, or merge with --3way" in message
    assert "fakebase/core.py" in refused(checkout, "three", commits=True)


def test_other_changed_files_do_not_matter(checkout: Path) -> None:
    (checkout / "README.md").write_text("mine\n")
    (checkout / "fakebase/block.py").write_text("mine\n")
    assert apply(checkout, ["two"], commits=True) == ["two: committed"]
    assert (checkout / "README.md").read_text() == "mine\n"
    assert user_git(checkout, "status", "--porcelain").split() == [
        "M", "README.md", "M", "fakebase/block.py",
    ]  # fmt: skip


def test_3way_merges_into_a_newer_checkout(checkout: Path) -> None:
    newer = "more\n" * 7 + line(15, "newer", line(27, "newer", line(33, "newer")))
    (checkout / CORE).write_text(newer)
    user_git(checkout, "commit", "-qam", "newer")
    apply(checkout, ["two", "three"], three_way=True)
    text = (checkout / CORE).read_text()
    assert text == newer.replace("line 3\n", "one\n").replace("line 4\n", "three\n").replace(
        "line 30\n", "two\n"
    )


def test_3way_conflict_leaves_the_tree(checkout: Path) -> None:
    (checkout / CORE).write_text(line(30, "newer"))
    user_git(checkout, "commit", "-qam", "newer")
    for commits in (False, True):  # "one" merges, "two" conflicts: neither is applied
        message = refused(checkout, "one", "two", three_way=True, commits=commits)
        assert "CONFLICT (content): Merge conflict in fakebase/core.py" in message


def test_3way_says_what_upstream_has(checkout: Path) -> None:
    (checkout / CORE).write_text("more\n" + line(30, "two"))
    (checkout / "fakebase/other/__init__.py").unlink()
    user_git(checkout, "commit", "-qam", "two, merged upstream")
    assert apply(checkout, ["one", "two"], three_way=True) == [
        "two: already applied",
        "one: applied",
    ]


def test_3way_refuses_uncommitted_work(checkout: Path) -> None:
    (checkout / CORE).write_text(line(15, "mine"))
    assert "found fakebase/core.py changed" in refused(checkout, "two", three_way=True)


def test_commits_carry_the_patches_messages(checkout: Path, full: House) -> None:
    said = apply(checkout, ["two", "three"], commits=True)
    assert said == ["one: committed", "two: committed", "three: committed"]
    assert user_git(checkout, "log", "--format=%an|%s").split("\n")[:4] == [
        "Patch-set maintainers|[fake] Change three",
        "Patch-set maintainers|[fake] Change two",
        "Patch-set maintainers|[fake] Change one",
        "user|upstream",
    ]
    body = user_git(checkout, "log", "-1", "--format=%b").strip()
    trailers = "\n".join(f"{t.key}: {t.value}" for t in full.get("three").trailers)
    assert body == f"{full.get('three').body}\n\n{trailers}"
    assert user_git(checkout, "status", "--porcelain") == ""
    assert user_git(checkout, "fsck", "--no-dangling") == ""
    assert apply(checkout, ["two"], commits=True) == ["two: already applied"]


def test_commits_3way(checkout: Path) -> None:
    (checkout / CORE).write_text("more\n" + line(27, "newer"))
    user_git(checkout, "commit", "-qam", "newer")
    apply(checkout, ["one", "two"], commits=True, three_way=True)
    assert user_git(checkout, "log", "--format=%s").split("\n")[:2] == [
        "[fake] Change two",
        "[fake] Change one",
    ]
    assert user_git(checkout, "status", "--porcelain") == ""
    assert (checkout / CORE).read_text().startswith("more\nline 1\nline 2\none\n")


def test_commits_on_a_branch_of_a_worktree(checkout: Path, tmp_path: Path) -> None:
    user_git(checkout, "worktree", "add", "-q", "-b", "work", str(tmp_path / "work"))
    apply(tmp_path / "work", ["two"], commits=True)
    assert "[fake] Change two" in user_git(checkout, "log", "--format=%s", "work")
    assert (checkout / CORE).read_text() == LINES


def test_commits_refuse_uncommitted_work(checkout: Path) -> None:
    apply(checkout, ["one"])
    assert "found fakebase/core.py changed" in refused(checkout, "two", commits=True)


def test_commits_refuse_a_file_in_the_way(checkout: Path) -> None:
    (checkout / "fakebase/fresh").mkdir()
    (checkout / "fakebase/fresh/new.py").write_text("mine\n")
    assert "found fakebase/fresh/new.py changed" in refused(checkout, "one", commits=True)
    assert "expected fakebase/fresh/new.py" in refused(checkout, "one")


def test_commits_want_a_repository(full: House, tmp_path: Path) -> None:
    (tmp_path / "plain/fakebase").mkdir(parents=True)
    (tmp_path / "plain" / CORE).write_text(LINES)
    with pytest.raises(UserError, match="expected the root of a git checkout"):
        apply(tmp_path / "plain", ["three"], commits=True)


@pytest.mark.parametrize("failing", range(1, 4))
def test_a_failure_between_two_files_puts_the_first_back(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    calls = 0
    replace = os.replace

    def breaks(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(atomic.os, "replace", breaks)
    if failing < 3:  # two files are written, one is removed
        assert "No space left on device" in refused(checkout)
    else:
        apply(checkout)


def test_git_failing_half_way_leaves_the_tree(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast-forward that writes one file and stops, as with a read-only file or a full disk."""
    attempt = module.git.attempt

    def breaks(arguments: list[str], directory: Path, **options: Any) -> module.git.Result:
        if arguments[0] == "merge":
            (checkout / CORE).write_text("half\n")
            (checkout / "fakebase/fresh").mkdir()
            (checkout / "fakebase/fresh/new.py").write_text("half\n")
            return module.git.Result(128, b"", "error: unable to create file")
        return attempt(arguments, directory, **options)

    monkeypatch.setattr(module.git, "attempt", breaks)
    assert "unable to create file" in refused(checkout, commits=True)


def test_wrong_folders(full: House, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a folder at .*nowhere"):
        apply(tmp_path / "nowhere")
    with pytest.raises(UserError, match="to hold fakebase/ or fakeapp/, found neither"):
        apply(tmp_path / "home")
    with pytest.raises(UserError, match="found the installed packages"):
        apply(full.site)
    with pytest.raises(UserError, match="expected a checkout of torchtitan for app"):
        apply(full.checkout(tmp_path / "base"), ["app"])
    with pytest.raises(UserError, match="did you mean three"):
        apply(tmp_path / "base", ["thre"])
