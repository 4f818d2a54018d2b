"""Apply patches to a few files in a temporary folder, and say why one does not fit."""

import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from integration.patchset import git
from integration.patchset.finding import Finding
from integration.patchset.patch import Contribution, strip_prefix

Files = Mapping[str, bytes]  # path as in the upstream repository -> contents


def read(folder: Path, wanted: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of those of ``wanted`` that exist below ``folder``."""
    existing = ((path, folder / path) for path in sorted(wanted))
    return {path: file.read_bytes() for path, file in existing if file.is_file()}


def write(folder: Path, files: Files) -> None:
    """Write ``files`` below ``folder``."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


@contextmanager
def folder_with(files: Files) -> Generator[Path, None, None]:
    """Yield a temporary folder that holds ``files``."""
    with tempfile.TemporaryDirectory(prefix="integration-") as name:
        write(Path(name), files)
        yield Path(name)


def touched(contributions: Iterable[Contribution]) -> set[str]:
    """Return every path that any of ``contributions`` reads or writes."""
    return set().union(*(contribution.paths for contribution in contributions))


def apply(
    files: Files, contributions: Sequence[Contribution], *, reverse: bool = False
) -> tuple[dict[str, bytes], list[Finding]]:
    """Apply ``contributions`` in the order given (from last to first when ``reverse``).

    Returns:
        The files as they are then, and what stopped the first patch that does not fit (the files
        are those before it in that case).
    """
    if reverse:
        contributions = contributions[::-1]
    paths = touched(contributions)
    rest = {path: data for path, data in files.items() if path not in paths}
    with folder_with({path: files[path] for path in sorted(paths & set(files))}) as folder:
        # Git 2.29 and older take the sections of `apply --reverse` from first to last; one patch
        # a call is right for all. Forward, one call for all is atomic and quick.
        if reverse or git.apply(folder, b"".join(c.data for c in contributions)):
            for contribution in contributions:
                complaint = git.apply(folder, contribution.data, reverse=reverse)
                if complaint:
                    state = {**rest, **read(folder, paths)}
                    return state, explain(contribution, state, complaint, reverse=reverse)
        return {**rest, **read(folder, paths)}, []


def explain(
    contribution: Contribution, files: Files, complaint: str, *, reverse: bool = False
) -> list[Finding]:
    """Say for each hunk that does not fit what it expects and what is there.

    Git names only the first hunk that fails, so each is compared with the file's text here. Line
    numbers are those of the pristine (or patched) file, which is what has to be looked at.
    """
    findings = []
    for changed in contribution.files:
        source, target = changed.source_file, changed.target_file
        old, new = (target, source) if reverse else (source, target)
        path = strip_prefix(new if old == "/dev/null" else old)
        current = files.get(path)

        def report(
            line: int | None, expected: str, found: str, verdict: str, path: str = path
        ) -> None:
            place = (contribution.name, path, line)
            findings.append(Finding(*place, expected, found, verdict, _NEXT[verdict]))

        if old == "/dev/null":
            if current is not None:
                lines = [line.value for hunk in changed for line in hunk if not line.is_removed]
                same = "".join(lines).encode() == current
                verdict = "already present" if same else "surroundings changed"
                report(None, "no such file, as the patch creates it", "a file", verdict)
            continue
        if current is None:
            report(None, "a file", "no such file", "surroundings changed")
            continue
        text = current.decode("utf-8", "replace").split("\n")
        for hunk in changed:
            before = [line.value.rstrip("\n") for line in hunk if not line.is_added]
            after = [line.value.rstrip("\n") for line in hunk if not line.is_removed]
            start = hunk.source_start
            if reverse:
                before, after, start = after, before, hunk.target_start
            if _find(text, before):
                continue
            if _find(text, after):
                line = _find(text, after)[0] + 1
                report(line, f"`{_first_difference(before, after)}`", "the patched lines", PRESENT)
                continue
            line, expected, found = _mismatch(text, before, start)
            report(line, f"`{expected}`", f"`{found}`", "surroundings changed")
    if not findings:  # each hunk fits alone, but git refused them together (order, mode, encoding)
        told = ("a patch that git applies", complaint.splitlines()[0], "does not apply")
        mend = _NEXT["does not apply"]
        findings.append(Finding(contribution.name, contribution.shown, None, *told, mend))
    return findings


PRESENT = "already present"
_NEXT = {
    "surroundings changed": "rebase it: integration patches import, mend the commit, export",
    "already present": "drop the patch if upstream has it; else it is applied twice",
    "does not apply": "integration patches import, mend the commit, integration patches export",
}


def _find(text: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Return every 0-based line at which ``wanted`` stands in ``text``."""
    size = len(wanted)
    if not size:
        return [0]
    starts = (n for n, line in enumerate(text) if line == wanted[0])
    return [n for n in starts if list(text[n : n + size]) == list(wanted)]


def _first_difference(before: Sequence[str], after: Sequence[str]) -> str:
    pairs = zip(before, after, strict=False)
    return next((old for old, new in pairs if old != new), before[-1] if before else "")


def _mismatch(text: Sequence[str], wanted: Sequence[str], start: int) -> tuple[int, str, str]:
    """Return line, expected and found where ``wanted`` first leaves ``text``.

    The hunk is laid where most of its lines match, nearest to the line that it names.
    """

    def matches(at: int) -> int:
        pairs = zip(wanted, text[at : at + len(wanted)], strict=False)
        return sum(a == b for a, b in pairs)

    candidates = range(max(0, len(text) - len(wanted) + 1)) or range(1)
    best = max(candidates, key=lambda at: (matches(at), -abs(at - (start - 1))))
    for offset, line in enumerate(wanted):
        found = text[best + offset] if best + offset < len(text) else "end of file"
        if found != line:
            return best + offset + 1, line, found
    return best + 1, wanted[0], text[best]
