"""`patches apply --to` with the real set, on clones as users have them.

The stand-ins hold the pins' own files on the touched paths, with a history and a submodule around
them; one is cloned shallow, one has a worktree, one is checked out with CRLF.
"""

from pathlib import Path

import pytest

from integration.ground.errors import UserError
from integration.patchset import pins, repository, scratch
from integration.patchset.apply import apply, take_off
from integration.patchset.patch import Contribution
from integration.tests.patchset.conftest import tree, user_git
from integration.upstream import branch

ALLOWED = ("-c", "protocol.file.allow=always")


def mine(upstream: str) -> list[Contribution]:
    return [c for c in repository.load() if c.upstream == upstream]


@pytest.fixture(params=["pytorch", "torchtitan"])
def upstream(request: pytest.FixtureRequest, plain_git: None) -> str:
    if not mine(request.param):
        pytest.skip("no contribution")
    return request.param


@pytest.fixture
def clone(upstream: str, tmp_path: Path) -> Path:
    pin = pins.load()[upstream]
    library = tmp_path / "library"
    scratch.write(library, {"lib.c": b"int main;\n"})
    user_git(tmp_path, "init", "-q", "library")
    user_git(library, "add", "-A")
    user_git(library, "commit", "-qm", "A library")
    folder = tmp_path / "clone"
    scratch.write(folder, {"README.md": b"upstream\n", f"{pin.package}/extra.py": b"extra = 1\n"})
    user_git(tmp_path, "init", "-q", "clone")
    user_git(folder, *ALLOWED, "submodule", "--quiet", "add", str(library), "third_party/library")
    user_git(folder, "add", "-A")
    user_git(folder, "commit", "-qm", "Before")
    scratch.write(folder, scratch.read(pin.site(), scratch.touched(mine(upstream))))
    user_git(folder, "add", "-A")
    user_git(folder, "commit", "-qm", "The release")
    user_git(folder, "tag", pin.tag)
    return folder


def subjects(folder: Path) -> list[str]:
    return user_git(folder, "log", "--reverse", "--format=%s").splitlines()


def test_the_set_as_commits_and_back(upstream: str, clone: Path) -> None:
    """A dirty file and a changed submodule that no patch touches stay as they are."""
    (clone / "README.md").write_text("mine\n")
    (clone / "third_party/library/lib.c").write_text("mine\n")
    before = tree(clone)
    said = apply(clone, commits=True)
    assert [s for s in said if s.endswith(": committed")] == [
        f"{c.name}: committed" for c in mine(upstream)
    ]
    assert subjects(clone)[2:] == [c.subject for c in mine(upstream)]
    assert user_git(clone, "status", "--porcelain").splitlines() == [
        " M README.md",
        " M third_party/library",
    ]
    take_off(clone)
    assert tree(clone) == before


def test_a_shallow_clone_and_a_worktree(upstream: str, clone: Path, tmp_path: Path) -> None:
    user_git(tmp_path, "clone", "-q", "--depth=1", f"file://{clone}", "shallow")
    shallow = tmp_path / "shallow"
    user_git(shallow, "worktree", "add", "-q", "-b", "work", str(tmp_path / "work"))
    apply(tmp_path / "work", commits=True)
    assert subjects(tmp_path / "work")[1:] == [c.subject for c in mine(upstream)]
    user_git(shallow, "fsck", "--no-dangling")
    assert subjects(shallow) == ["The release"]
    apply(shallow, commits=True, three_way=True)
    assert user_git(shallow, "diff", "HEAD", "work") == ""


def test_crlf(upstream: str, clone: Path, tmp_path: Path) -> None:
    user_git(tmp_path, "clone", "-q", "-c", "core.autocrlf=true", str(clone), "crlf")
    crlf = tmp_path / "crlf"
    first = sorted(mine(upstream)[0].old_paths)[0]
    assert b"\r\n" in (crlf / first).read_bytes()
    before = tree(crlf)
    for commits in (False, True):
        with pytest.raises(UserError, match=r"found CRLF.*config core.autocrlf false"):
            apply(crlf, commits=commits)
    assert tree(crlf) == before


@pytest.mark.parametrize("objects", ["blob:none", "tree:0"])
def test_a_partial_clone_fetches_what_it_lacks(
    upstream: str, clone: Path, tmp_path: Path, objects: str
) -> None:
    """Its HEAD is another commit, so that not one object of the release is there."""
    scratch.write(clone, {path: b"newer\n" for path in scratch.touched(mine(upstream))})
    user_git(clone, "commit", "-qam", "Newer")
    user_git(clone, "config", "uploadpack.allowFilter", "true")
    user_git(tmp_path, "clone", "-q", f"--filter={objects}", f"file://{clone}", "partial")
    tag = pins.load()[upstream].tag
    for contribution in mine(upstream)[:1] + mine(upstream)[-1:]:
        branch.make(tmp_path / "partial", contribution.name, tag)
        log = user_git(tmp_path / "partial", "log", "-1", "--format=%s", contribution.name)
        assert log.strip() == contribution.subject


def test_a_partial_clone_without_its_origin(upstream: str, clone: Path, tmp_path: Path) -> None:
    scratch.write(clone, {path: b"newer\n" for path in scratch.touched(mine(upstream))})
    user_git(clone, "commit", "-qam", "Newer")
    user_git(clone, "config", "uploadpack.allowFilter", "true")
    user_git(tmp_path, "clone", "-q", "--filter=blob:none", f"file://{clone}", "partial")
    clone.rename(tmp_path / "gone")
    name = mine(upstream)[0].name
    with pytest.raises(UserError, match=r"expected to fetch what the partial clone .* --refetch"):
        branch.make(tmp_path / "partial", name, pins.load()[upstream].tag)
    assert user_git(tmp_path / "partial", "branch", "--list", name) == ""


def test_a_users_own_change_in_the_way(upstream: str, clone: Path) -> None:
    contribution = mine(upstream)[0]
    path = next(f.path for f in contribution.files if f.is_modified_file)
    text = (clone / path).read_text()
    removed = next(
        hunk[0].value
        for file in contribution.files
        for hunk in file
        if file.path == path and hunk[0].value.strip()
    )
    (clone / path).write_text(text.replace(removed, "mine = 1  # in the way\n", 1))
    before = tree(clone)
    with pytest.raises(UserError, match=f"expected {path} of"):
        apply(clone, [contribution.name])
    with pytest.raises(UserError, match="it could be lost"):
        apply(clone, [contribution.name], three_way=True)
    assert tree(clone) == before
