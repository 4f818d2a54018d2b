"""What upstream has done since the pin to the lines that a patch changes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.patchset import git, repository, scratch
from integration.patchset import pins as pins_module
from integration.patchset.patch import Contribution, strip_prefix
from integration.patchset.pins import Pin

Span = tuple[int, int]  # the first and the last line, from 1 on
_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of upstream; ``date`` is the committer's."""

    abbreviated: str
    date: str
    subject: str


@dataclass(frozen=True, slots=True)
class Since:
    """The commits since the pin that touch a patch's lines, newest first.

    ``unknown`` says in a sentence why they could not be listed; it is empty where they are.
    """

    pin: str
    base: str
    commits: tuple[Commit, ...] = ()
    unknown: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """Return a sentence, then a line for each commit."""
        if self.unknown:
            return (self.unknown,)
        count = len(self.commits)
        words = {0: "No commit", 1: "1 commit"}.get(count, f"{count} commits")
        verb = "touches" if count < 2 else "touch"
        head = f"{words} between {self.pin} and {self.base[:12]} {verb} the lines of the patch."
        return (head, *(f"{c.abbreviated} {c.date} {c.subject}" for c in self.commits))


def since_pin(contribution: Contribution, clone: Path, base: str) -> Since:
    """List the commits of ``clone`` that ``base`` has and the pin lacks, on the patch's lines.

    A line of the patch is one of its hunks', with their context. Its place in ``base`` follows
    from the difference between the file that the patch was made on and the file there; where
    upstream has replaced a line together with its neighbours by another number of lines, commits
    on all that stands there now are listed.
    """
    pin = pins_module.load()[contribution.upstream]
    shown = f"{pin.package} {pin.version}"
    start = _start(pin, clone)
    if start is None:
        told = (
            f"The commits since {shown} cannot be listed, as {clone} has neither its commit "
            f"{pin.commit[:12]} nor its tag {pin.tag}: run `git -C {clone} fetch --tags "
            f"{pin.repository}`, with `--unshallow` in a shallow clone."
        )
        return Since(shown, base, unknown=told)
    if _cut(clone, f"{start}..{base}"):
        told = (
            f"The commits since {shown} cannot be listed, as the shallow clone {clone} lacks some "
            f"of them: run `git -C {clone} fetch --unshallow`."
        )
        return Since(shown, base, unknown=told)
    try:
        touching = _touching(contribution, pin, clone, f"{start}..{base}", base)
        between = ["--topo-order", "-z", "--format=%H%x09%h%x09%cs%x09%s", f"{start}..{base}"]
        rows = [row.split("\t", 3) for row in _git(["log", *between], clone).split("\0") if row]
    except RuntimeError as error:
        told = f"The commits since {shown} cannot be listed, as git says: {error}"
        return Since(shown, base, unknown=told)
    found = (Commit(*rest) for sha, *rest in rows if sha in touching)
    return Since(shown, base, tuple(found))


def _start(pin: Pin, clone: Path) -> str | None:
    for revision in (pin.commit, f"refs/tags/{pin.tag}"):
        # A partial clone would ask its remote for a commit that it does not have.
        line = ["rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
        found = git.attempt(line, clone, env={"GIT_NO_LAZY_FETCH": "1"})
        if not found.code:
            return found.text
    return None


def _cut(clone: Path, between: str) -> bool:
    """Tell whether the history of a shallow clone ends in the range.

    The commit where it ends would count as one that adds every file.
    """
    shallow = git.attempt(["rev-parse", "--is-shallow-repository"], clone).text == "true"
    line = ["rev-list", "--max-parents=0", "--max-count=1", between]
    return shallow and bool(git.attempt(line, clone).text)


def _git(arguments: Sequence[str], clone: Path) -> str:
    return git.run(arguments, clone).text


def _touching(
    contribution: Contribution, pin: Pin, clone: Path, between: str, base: str
) -> set[str]:
    """Return the commits of the range, each with all its digits."""
    contributions = repository.load()
    required = repository.close(contributions, contribution.requires)
    below = [c for c in required if c.upstream == contribution.upstream]
    pristine = scratch.read(pin.site(), scratch.touched([*below, contribution]))
    made_on, _ = scratch.apply(pristine, below)
    touching: set[str] = set()
    asked: dict[str, list[str]] = {}  # the commit to begin at, to the -L options there
    for file in contribution.files:
        source = strip_prefix(file.source_file)
        new = file.source_file == "/dev/null"
        path, end, moves = _follow(
            clone, between, base, strip_prefix(file.target_file) if new else source
        )
        touching |= moves
        there = git.attempt(["cat-file", "blob", f"{end}:{path}"], clone)
        spans = [(h.source_start, h.source_start + h.source_length - 1) for h in file]
        if new or not spans or there.code or not there.out or source not in made_on:
            # There are no lines to follow: what has touched the file counts.
            log = ["log", "--format=%H", between, "--", f":(top,literal){path}"]
            touching |= set(_git(log, clone).split())
            continue
        for first, last in moved(spans, made_on[source], there.out):
            asked.setdefault(end, []).append(f"-L{first},{last}:{path}")
    start = between.partition("..")[0]
    for end, options in asked.items():
        line = ["log", "--no-patch", "--format=%H", *options, f"{start}..{end}"]
        touching |= set(_git(line, clone).split())
    return touching


def _follow(clone: Path, between: str, base: str, path: str) -> tuple[str, str, set[str]]:
    """Return where ``path`` of the pin is in ``base``: path, commit to begin at, what moved it.

    A file that upstream has removed is looked at in the commit before.
    """
    moves: set[str] = set()
    while git.attempt(["cat-file", "-e", f"{base}:{path}"], clone).code:
        line = ["log", "-1", "--no-renames", "--diff-filter=D", "--format=%H", between]
        removed = _git([*line, "--", f":(top,literal){path}"], clone)
        if not removed or removed in moves:
            break
        moves.add(removed)
        line = ["diff-tree", "-r", "-M", "-z", "--name-status", "--diff-filter=R", "--no-commit-id"]
        told = _git([*line, removed], clone).split("\0")
        renamed = {old: new for old, new in zip(told[1::3], told[2::3], strict=False)}
        if path not in renamed:
            return path, f"{removed}^", moves
        path = renamed[path]
    return path, base, moves


def moved(spans: Sequence[Span], old: bytes, new: bytes) -> list[Span]:
    """Return where ``spans`` of ``old`` are in ``new``.

    Lines that are gone count as standing between their neighbours, which are then included.
    """
    with scratch.folder_with({"old": old, "new": new}) as folder:
        line = ["diff", "--no-index", "--text", "--no-color", "--no-ext-diff", "-U0", "old", "new"]
        told = git.attempt(line, folder).out
    changes = []
    for match in _HUNK.finditer(told):
        a, size, b, into = (1 if part is None else int(part) for part in match.groups())
        changes.append((a, size, b, into))
    count = new.count(b"\n") + (not new.endswith(b"\n"))
    found = []
    for first, last in spans:
        start, end = _place(first, changes, last=False), _place(last, changes, last=True)
        start = min(max(start, 1), count)
        found.append((start, max(start, min(end, count))))
    return found


def _place(line: int, changes: Sequence[tuple[int, int, int, int]], *, last: bool) -> int:
    shift = 0
    for a, size, b, into in changes:
        if size and a <= line < a + size:  # one of the lines that were replaced or removed
            if size == into:
                return b + line - a
            if not into:
                return b + last
            return b + into - 1 if last else b
        if (a + size - 1 if size else a) < line:
            shift += into - size
    return line + shift
