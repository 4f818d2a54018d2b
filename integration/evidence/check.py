"""Everything that is wrong in the repository: with the patches, and with what is bound to them."""

from pathlib import Path

from integration.evidence import readme
from integration.evidence.stale import stale
from integration.ground import paths
from integration.patchset import check as patches
from integration.patchset import repository
from integration.patchset.finding import Finding


def check(root: Path | None = None) -> list[Finding]:
    """Return everything that is wrong; an empty list proves what ``patchset.check`` does, and that

    - the README's table is made of the patches, and its figures of the evidence;
    - the evidence, of one patch or of a set, was measured on the patches as they are.
    """
    root = root or paths.REPO
    findings = patches.check(root)
    contributions, unreadable = repository.scan(root)
    if not unreadable:  # what an unreadable patch is bound to is not known
        findings += [*readme.stale(contributions, root), *stale(root, contributions)]
    return list(dict.fromkeys(findings))
