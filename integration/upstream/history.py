"""``patches/HISTORY.md``: the contributions that are no longer needed, a dated line each."""

import datetime
from collections.abc import Mapping, Sequence

from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset import git
from integration.patchset import pins as pins_module
from integration.patchset.patch import Contribution

FILE = "patches/HISTORY.md"
_HEAD = """\
# Contributions that are no longer needed

A line each, the newest last: when, what, why, where upstream has it, and where the patch, its tests
and its evidence are to be found as they were.

"""


def retire(gone: Sequence[Contribution], why: Mapping[str, str]) -> dict[str, bytes | None]:
    """Return what to write below the repository's root: a line for each, its folder removed.

    Args:
        why: name of the contribution to the reason, as it stands in the line.

    Raises:
        UserError: something of it is in no commit, and would be lost.
    """
    root = paths.REPO
    commit = _commit_with(gone) if gone else ""
    file = root / FILE
    text = file.read_text(encoding="utf-8") if file.is_file() else _HEAD
    pins = pins_module.load()
    new: dict[str, bytes | None] = {}
    for c in gone:
        folder = f"{c.upstream}_contrib/{c.name}"
        links = [*c.values("Status"), *c.values("Issue")]
        if c.on_main:
            links[0] = pins[c.upstream].url(c.on_main)
        upstream = ", ".join(w for link in links for w in link.split() if w.startswith("https://"))
        evidence = sorted(f.name for f in (c.folder / "evidence").glob("*") if f.is_file())
        text += (
            f"- {datetime.date.today().isoformat()} **{c.name}** ({c.upstream}): {c.subject}. "
            f"{why[c.name]}. Upstream: {upstream or 'no link'}. Commit {commit}: "
            f"`{c.shown}` (sha256 {c.sha256}), `{folder}/`, "
            f"evidence: {', '.join(evidence) or 'none'}.\n"
        )
        files = (f for f in c.folder.rglob("*") if f.is_file())
        new |= {f.relative_to(root).as_posix(): None for f in files}
    return {**new, FILE: text.encode()} if gone else {}


def _commit_with(gone: Sequence[Contribution]) -> str:
    """Return the commit that holds all of them as they are."""
    kept = [c.shown for c in gone]
    kept += [f"{c.upstream}_contrib/{c.name}" for c in gone]
    status = git.attempt(
        ["status", "--porcelain", "--untracked-files=all", "--", *kept], paths.REPO
    )
    head = git.attempt(["rev-parse", "--short=12", "HEAD"], paths.REPO)
    lost = status.text.splitlines()
    if status.code or head.code or lost:
        raise UserError(
            f"expected {kept[0]} and {kept[-1]} in a commit, found "
            f"{lost[0][3:] + ' changed' if lost else 'none'}; what goes must be found again: "
            f"commit first"
        )
    return head.text
