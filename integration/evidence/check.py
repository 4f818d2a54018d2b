"""Everything that is wrong in the repository: with the patches, and with what is bound to them."""

from integration.evidence import readme
from integration.evidence.stale import stale
from integration.ground import paths
from integration.patchset import check as patches
from integration.patchset import repository
from integration.patchset.finding import Finding


def check(pristine_of: patches.Reader = patches.installed) -> list[Finding]:
    """Return everything that is wrong; an empty list proves what ``patchset.check`` does, and that

    - the README's table is made of the patches, and its figures of the evidence;
    - the evidence, of one patch or of a set, was measured on the patches as they are.
    """
    findings = patches.check(pristine_of)
    contributions, unreadable = repository.scan()
    # What an unreadable patch is bound to is not known; nothing is bound to newer upstreams.
    if not unreadable and paths.patches_dir() == paths.PATCHES:
        findings += [*readme.stale(contributions), *stale(paths.REPO, contributions)]
    return list(dict.fromkeys(findings))
