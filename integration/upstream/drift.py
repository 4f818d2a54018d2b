"""What a newer upstream means for each contribution: `integration patches drift`.

The verdict is textual, from the files alone, with git's own zero-fuzz apply. Whether an upstream
that changed the same lines now does what the patch does, only a test can tell: ``Drop-when``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from integration.patchset import git, repository, scratch
from integration.patchset.finding import Finding
from integration.patchset.patch import Contribution, strip_prefix
from integration.upstream.newer import Newer
from integration.upstream.newer import pristine as pristine_files


class Verdict(StrEnum):
    """From nothing to do to most to do."""

    APPLIES = "applies"
    OFFSET = "applies with offset"
    IDENTICAL = "already there, identical"
    MODIFIED = "already there, modified"
    REBASE = "needs rebase"


# An offset asks for nothing: the stored patch applies as it is. 1 and 2 are other failures'.
EXIT_CODES = {
    Verdict.APPLIES: 0,
    Verdict.OFFSET: 0,
    Verdict.IDENTICAL: 3,
    Verdict.MODIFIED: 4,
    Verdict.REBASE: 5,
}
NOT_RUN = "not run"
# Shorter lines (`)`, `else:`) stand in any file.
_TELLING = 8  # characters
_MOSTLY_THERE = 0.5  # share of a patch's telling new lines


@dataclass(frozen=True, slots=True)
class Drift:
    """One contribution against one newer upstream; a finding for each hunk that does not fit."""

    name: str
    upstream: str
    against: str
    verdict: Verdict
    detail: str
    findings: tuple[Finding, ...] = ()
    drop_when: str = NOT_RUN


def drift(contributions: Sequence[Contribution], newer: Mapping[str, Newer]) -> list[Drift]:
    """Judge every contribution of the upstreams in ``newer``, in series order.

    Each is tried on the newer files and those of its requirements that still apply there.
    """
    found: dict[str, Drift] = {}
    for upstream, other in newer.items():
        mine = [c for c in contributions if c.upstream == upstream]
        files = other.read(scratch.touched(mine))
        pristine = pristine_files(other.pin, scratch.touched(mine))
        for contribution in mine:
            required = repository.close(contributions, contribution.requires)
            below = [r for r in required if r.upstream == upstream]
            going = (Verdict.APPLIES, Verdict.OFFSET)
            on = [r for r in below if found[r.name].verdict in going]
            state, _ = scratch.apply(files, on)
            first = [r.name for r in below if found[r.name].verdict is Verdict.REBASE]
            result = _judge(contribution, state, pristine, other)
            if first and result.verdict is Verdict.REBASE:
                detail = f"after {', '.join(first)}, which it requires; {result.detail}"
                result = replace(result, detail=detail)
            found[contribution.name] = result
    return [found[c.name] for c in contributions if c.name in found]


def worst(drifts: Sequence[Drift]) -> int:
    """Return the exit code of the verdict that asks for most."""
    return max((EXIT_CODES[d.verdict] for d in drifts), default=0)


def _judge(
    contribution: Contribution, files: scratch.Files, pristine: scratch.Files, newer: Newer
) -> Drift:
    with scratch.folder_with({p: files[p] for p in contribution.paths & set(files)}) as folder:
        forward = git.attempt(["apply", "--verbose", "-"], folder, stdin=contribution.data)
    if not forward.code:
        moved = re.findall(r"\(offset (-?\d+) lines?\)", forward.err)
        if not moved:
            return _with(contribution, newer, Verdict.APPLIES, "")
        far = max(moved, key=lambda lines: abs(int(lines)))
        detail = f"{len(moved)} of {_hunks(contribution)} hunks, up to {int(far):+d} lines"
        return _with(contribution, newer, Verdict.OFFSET, detail)
    _, complaints = scratch.apply(files, [contribution], reverse=True)
    if not complaints:
        return _with(contribution, newer, Verdict.IDENTICAL, "every hunk")
    findings = tuple(
        _to_rebase(finding, newer)
        for finding in scratch.explain(contribution, files, forward.err or "git apply failed")
    )
    there, telling = _lines_there(contribution, files, pristine)
    present = sum(f.verdict == scratch.PRESENT for f in findings)
    hunks = _hunks(contribution)
    detail = f"{present} of {hunks} hunks and {there} of {telling} telling new lines are there"
    # While a hunk still applies, the code that it changes is there as it was: upstream has not
    # done this patch's work, or not all of it.
    if len(findings) == hunks and telling and there / telling >= _MOSTLY_THERE:
        return _with(contribution, newer, Verdict.MODIFIED, detail, findings)
    fits = hunks - len(findings)
    if fits:
        detail = f"{fits} of {hunks} hunks apply; " + detail.partition(" and ")[0] + " there"
    return _with(contribution, newer, Verdict.REBASE, detail, findings)


def _with(
    contribution: Contribution,
    newer: Newer,
    verdict: Verdict,
    detail: str,
    findings: tuple[Finding, ...] = (),
) -> Drift:
    name, upstream = contribution.name, contribution.upstream
    return Drift(name, upstream, newer.label, verdict, detail, findings)


def _hunks(contribution: Contribution) -> int:
    """Count the hunks; a file that is only created or renamed counts as one."""
    return sum(max(1, len(file)) for file in contribution.files)


def _to_rebase(finding: Finding, newer: Newer) -> Finding:
    # A pin is a published version: of a checkout only the look is to be had now.
    version = newer.shown if newer.url else "VERSION"
    mend = f"integration patches rebase --onto {newer.pin.package}=={version}"
    there = "read the newer file; once its Drop-when test passes there, the patch can go"
    return replace(finding, next=there if finding.verdict == scratch.PRESENT else mend)


def _lines_there(
    contribution: Contribution, files: scratch.Files, pristine: scratch.Files
) -> tuple[int, int]:
    """Count the patch's new lines that the newer file has, and all: none that the pin had."""

    def lines(data: bytes) -> set[str]:
        return {line.strip() for line in data.decode("utf-8", "replace").split("\n")}

    there = telling = 0
    for file in contribution.files:
        path = strip_prefix(file.target_file)
        before, now = lines(pristine.get(path, b"")), lines(files.get(path, b""))
        added = (line.value.strip() for hunk in file for line in hunk if line.is_added)
        new = [line for line in added if len(line) >= _TELLING and line not in before]
        telling += len(new)
        there += sum(line in now for line in new)
    return there, telling
