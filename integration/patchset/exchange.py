"""Between stored patches and commits: the bytes that go out are the bytes that came in.

[Note: Canonical patches]
A checkout holds the set as a line of commits, the form in which people edit. A stored patch is
not the diff between two neighbours of that line: its line numbers and `index` hashes would then
change with every patch before it. It is `git format-patch` of the same change on the pin and what
the patch requires, and nothing else. So editing one patch leaves the bytes of the others, and
each is what its pull request will show. Moving a commit's change back to the pin is a three-way
merge by git; where that conflicts, the patch needs another one and has to say so in `Requires:`.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from integration.ground.errors import UserError, nearest
from integration.patchset import git, scratch
from integration.patchset.patch import Contribution, split_trailers, without_requirements

MARK = "Patch-Name"  # names a commit's patch; added on import, taken off on export
BASE = "pin"  # the tag of the pristine commit


@dataclass(frozen=True, slots=True)
class Exported:
    """One commit as it is stored."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class _Commit:
    id: str
    author: str
    email: str
    date: str  # seconds since 1970 and time zone, as git stores it
    subject: str
    message: str  # without the mark
    name: str
    requires: tuple[str, ...]

    @property
    def by(self) -> dict[str, str]:
        """Return the environment that gives a copy of the commit its author and date."""
        return {
            "GIT_AUTHOR_NAME": self.author,
            "GIT_AUTHOR_EMAIL": self.email,
            "GIT_AUTHOR_DATE": self.date,
        }


def create(folder: Path, files: scratch.Files) -> None:
    """Make ``folder`` a git repository whose one commit holds ``files``, tagged as the base."""
    scratch.write(folder, files)
    git.run(["init", "--quiet"], folder)
    # `#` begins lines of the message that name an issue; git would drop them from an edited one.
    git.run(["config", "core.commentChar", ";"], folder)
    # --force: no ignore rule, of whatever origin, may hide a file.
    git.run(["add", "--all", "--force", "."], folder)
    git.run(["commit", "--quiet", "--allow-empty", "--message", "The pristine pin"], folder)
    git.run(["tag", BASE], folder)


def mailbox(contributions: Sequence[Contribution], *, marked: bool) -> bytes:
    """Return the patches as one mailbox for `git am`, with the name of each in it if ``marked``."""
    return b"".join(mark(c) if marked else c.data for c in contributions)


def mark(contribution: Contribution) -> bytes:
    """Add the mark as the message's last line."""
    head, start, diff = contribution.data.partition(b"\ndiff --git ")
    head = head.rstrip(b"\n")
    if (
        b"\n\n" not in head
    ):  # a subject alone: without an empty line the mark would be a mail header
        head += b"\n"
    return head + f"\n{MARK}: {contribution.name}\n".encode() + start + diff


def commit_all(
    folder: Path,
    box: bytes,
    *,
    three_way: bool = False,
    stay: bool = False,
    env: Mapping[str, str] | None = None,
) -> str | None:
    """Commit a mailbox with `git am`; on failure leave the folder as it was.

    Args:
        stay: on failure stop at the patch that does not fit instead, for `git am --continue`.

    Returns:
        None when done, git's complaint otherwise.
    """
    if not box:
        return None
    # Not --quiet: that would hide the conflicts, too.
    arguments = ["am", "--keep", "--keep-cr", "--no-scissors"]
    arguments.append("--3way" if three_way else "--no-3way")
    done = git.attempt(arguments, folder, stdin=box, env=env)
    if done.code:
        if not stay:
            git.attempt(["am", "--abort"], folder, env=env)
        told = f"{done.text}\n{done.err}".strip().split("\n")
        noise = ("Applying: ", "hint: ", "Using index info", "Falling back", "Auto-merging")
        noise += ("A\t", "D\t", "M\t")  # files of the merge, each with its state
        return "\n".join(line for line in told if not line.startswith(noise))
    return None


def commits(folder: Path) -> list[_Commit]:
    """Return the commits on the base, oldest first, with the name of each one's patch."""
    if git.attempt(["rev-parse", "--verify", "--quiet", f"{BASE}^{{commit}}"], folder).code:
        raise UserError(
            f"expected a checkout made by `integration patches import`, found no tag `{BASE}` in "
            f"{folder}; nothing can be exported: run `integration patches import` first"
        )
    span = f"{BASE}..HEAD"
    merge = git.run(["rev-list", "--merges", "--max-count=1", span], folder).text
    if merge:
        raise UserError(
            f"expected one commit a patch in a line, found the merge {merge[:12]} in {folder}; a "
            f"merge cannot be stored as a patch: run `git rebase {BASE}`"
        )
    form = "%H%x00%an%x00%ae%x00%ad%x00%B%x01"
    log = git.run(["log", "--reverse", "--date=raw", f"--format={form}", span], folder).out
    records = log.decode("utf-8").split("\x01")[:-1]
    found = [_commit(*record.lstrip("\n").split("\x00")) for record in records]
    for number, commit in enumerate(found):
        if any(earlier.name == commit.name for earlier in found[:number]):
            raise UserError(
                f"expected one commit a patch, found two with `{MARK}: {commit.name}` in {folder}; "
                f"one patch is one commit: squash them with `git rebase -i {BASE}`"
            )
    return found


def _commit(id: str, author: str, email: str, date: str, message: str) -> _Commit:
    lines = message.rstrip("\n").split("\n")
    _, trailers = split_trailers(lines, 1)
    names = [trailer.value for trailer in trailers if trailer.key == MARK]
    if lines[0].startswith(("fixup!", "squash!", "amend!")):
        raise UserError(
            f"expected finished commits, found `{lines[0]}` ({id[:12]}); it belongs into another "
            f"commit: run `git rebase -i --autosquash {BASE}`"
        )
    if len(names) != 1:
        raise UserError(
            f"expected one line `{MARK}: NAME` in the last paragraph of commit {id[:12]} "
            f"(`{lines[0]}`), found {len(names)}; its patch would have no name: run "
            f'`git commit --amend --trailer "{MARK}: NAME"`'
        )
    values = [trailer.value for trailer in trailers if trailer.key == "Requires"]
    requires = tuple(n.strip() for value in values for n in value.split(",") if n.strip())
    kept = "\n".join(line for line in lines if not line.startswith(f"{MARK}:")).rstrip("\n")
    return _Commit(id, author, email, date, lines[0], kept + "\n", names[0], requires)


def export(folder: Path, elsewhere: Sequence[str] = ()) -> list[Exported]:
    """Return each commit of a checkout as the bytes to store, in order.

    Args:
        elsewhere: names of the other upstream's patches, which `Requires:` may name too.

    Raises:
        UserError: a commit without a name, or one that needs another without saying so.
    """
    line = commits(folder)
    exported: list[Exported] = []
    with TemporaryDirectory(prefix="integration-") as temporary:
        index = {"GIT_INDEX_FILE": os.path.join(temporary, "index")}
        for commit in line:
            parent = _base_of(folder, index, commit, line, exported, elsewhere)
            change = git.run(
                ["diff-tree", "-p", "--binary", "--full-index", f"{commit.id}^", commit.id], folder
            ).out
            git.run(["read-tree", parent], folder, env=index)
            merged = git.attempt(
                ["apply", "--cached", "--3way", "-"], folder, stdin=change, env=index
            )
            if merged.code or not change:
                raise _needs_another(commit, line, folder, merged.err)
            data = _format(folder, index, commit, parent)
            exported.append(Exported(commit.name, data))
        _prove(folder, index, line, exported)
    return exported


def _base_of(
    folder: Path,
    index: Mapping[str, str],
    commit: _Commit,
    line: Sequence[_Commit],
    exported: Sequence[Exported],
    elsewhere: Sequence[str],
) -> str:
    """Return a commit that holds the pin and all that ``commit`` requires of this upstream."""
    known = {other.name: other for other in line}
    needed: set[str] = set()
    todo = list(commit.requires)
    while todo:
        name = todo.pop()
        if name in needed or name in elsewhere:
            continue
        earlier = [item.name for item in exported]
        if name not in earlier:
            place = "comes later" if name in known else f"is no patch{nearest(name, list(known))}"
            raise UserError(
                f"expected what {commit.name} requires to come before it, but {name} {place}; it "
                f"cannot be applied: reorder with `git rebase -i {BASE}` or mend its Requires: line"
            )
        needed.add(name)
        todo += known[name].requires
    if not needed:
        return git.run(["rev-parse", f"{BASE}^{{commit}}"], folder).text
    patches = b"".join(item.data for item in exported if item.name in needed)
    git.run(["read-tree", BASE], folder, env=index)
    git.run(["apply", "--cached", "-"], folder, stdin=patches, env=index)
    tree = git.run(["write-tree"], folder, env=index).text
    return git.run(["commit-tree", tree, "-p", BASE, "-m", "base"], folder).text


def forget(folder: Path, names: Collection[str]) -> None:
    """Take ``names`` out of every commit's ``Requires:``: upstream has them, or they are gone."""
    parent = git.run(["rev-parse", f"{BASE}^{{commit}}"], folder).text
    for commit in commits(folder):
        message = git.run(["log", "-1", "--format=%B", commit.id], folder).text + "\n"
        arguments = ["commit-tree", f"{commit.id}^{{tree}}", "-p", parent, "-F", "-"]
        data = without_requirements(message, names).encode()
        parent = git.run(arguments, folder, stdin=data, env=commit.by).text
    git.run(["update-ref", "HEAD", parent], folder)


def _format(folder: Path, index: Mapping[str, str], commit: _Commit, parent: str) -> bytes:
    tree = git.run(["write-tree"], folder, env=index).text
    arguments = ["commit-tree", tree, "-p", parent, "-F", "-"]
    moved = git.run(arguments, folder, stdin=commit.message.encode(), env=commit.by).text
    return git.run([*git.FORMAT_PATCH, "-1", moved], folder).out


def _needs_another(
    commit: _Commit, line: Sequence[_Commit], folder: Path, complaint: str
) -> UserError:
    def files(of: _Commit) -> set[str]:
        return set(
            git.run(["diff-tree", "-r", "--name-only", f"{of.id}^", of.id], folder).text.split()
        )

    mine = files(commit)
    if not mine:
        return UserError(
            f"expected commit {commit.id[:12]} to carry the patch {commit.name}, found it empty; "
            f"drop it with `git rebase -i {BASE}`"
        )
    earlier = line[: line.index(commit)]
    sharing = [c.name for c in earlier if c.name not in commit.requires and files(c) & mine]
    first = complaint.splitlines()[0] if complaint else "a conflict"
    return UserError(
        f"expected {commit.name} to apply on the pin and what it requires, found: {first}; it "
        f"would not stand alone: add what it needs ({', '.join(sharing) or 'see git log'}) to its "
        f"Requires: line, or move the lines apart, with `git rebase -i {BASE}`"
    )


def _prove(
    folder: Path, index: Mapping[str, str], line: Sequence[_Commit], exported: Sequence[Exported]
) -> None:
    """The stored patches, applied in order, must give the checkout's files."""
    git.run(["read-tree", BASE], folder, env=index)
    for commit, item in zip(line, exported, strict=True):
        applied = git.attempt(["apply", "--cached", "-"], folder, stdin=item.data, env=index)
        tree = git.run(["write-tree"], folder, env=index).text
        if applied.code or tree != git.run(["rev-parse", f"{commit.id}^{{tree}}"], folder).text:
            raise _needs_another(commit, line, folder, applied.err or "it lands elsewhere")
