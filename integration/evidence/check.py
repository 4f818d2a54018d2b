"""Everything that is wrong in the repository: with the patches, and with what is bound to them.

Evidence may be of a set of patches: ladders, profiles of trainings, the proof of the set. A file of
it names its patches, ``"patches": {name: sha256}``, and so does each row of the proof. It
counts only while each of them is stored as it was; a ladder and the proof, also while they name all
that there are. An allocator snapshot, which is a pickle, is bound by the ladder with whose name
its own begins.
"""

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from integration.evidence import readme
from integration.evidence.record import unpacked
from integration.ground import paths
from integration.patchset import check as patches
from integration.patchset import repository
from integration.patchset.finding import Finding
from integration.patchset.patch import Contribution

LADDERS = "integration/evidence/*.json"
DIGITS = 8  # of a patch's sha256, in a row of the proof
SNAPSHOTS = "integration/evidence/*.snapshot.pickle.gz"
TRACES = ("*_contrib/*/evidence/trace-*.json.gz", "integration/evidence/trace-*.json.gz")


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


def stale(root: Path, contributions: Sequence[Contribution]) -> Iterator[Finding]:
    """Yield a finding for each file under ``root`` whose patches are no longer the stored ones."""
    now = {c.name: c.sha256 for c in contributions}
    for file in sorted(root.glob(LADDERS)):
        yield from _compare(root, file, record(file).get("patches"), now, whole=True)
    for file in sorted(f for pattern in TRACES for f in root.glob(pattern)):
        yield from _compare(root, file, record(file).get("patches"), now)
    for file in sorted(root.glob(SNAPSHOTS)):
        if not file.with_name(f"{file.name.partition('.')[0]}.json").is_file():
            yield from _compare(root, file, None, now)
    short = {name: digest[:DIGITS] for name, digest in now.items()}
    proven = _proven(root / readme.PROOF_FILE)
    if proven:  # else not recorded yet, as the file then says
        again = "integration test --prove --full --record"
        file = root / readme.PROOF_FILE
        yield from _compare(root, file, proven, short, True, "stale proof", again)


def _proven(file: Path) -> dict[str, str]:
    """Return name -> the first digits of the sha256 for each row of the proof of the set."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    body = text.partition(readme.PROOF_BEGIN)[2].partition(readme.PROOF_END)[0]
    return dict(re.findall(r"^\| (\w+) \|.*\| `([0-9a-f]+)` \|$", body, re.MULTILINE))


def record(file: Path) -> dict[str, Any]:
    """Return the JSON object in the file, compressed or not; an empty one where there is none."""
    try:
        found = json.loads(unpacked(file))
    except (OSError, EOFError, ValueError, zlib.error):
        return {}
    return found if isinstance(found, dict) else {}


def _compare(
    root: Path,
    file: Path,
    measured: Any,
    now: dict[str, str],
    whole: bool = False,
    verdict: str = "stale evidence",
    again: str = "measure again, by the `command` in the file, or delete it",
) -> Iterator[Finding]:
    """Yield a finding unless ``measured`` is name -> sha256 as ``now``; of all, where ``whole``."""
    if not isinstance(measured, dict):
        expected, found = '`"patches": {name: sha256}`', "none"
    elif changed := sorted(n for n, digest in measured.items() if now.get(n) != digest):
        name = changed[0]
        expected = f"{name} {now.get(name, 'not in the set')}"
        found = f"{name} {measured[name]}" + (
            f", and {len(changed) - 1} more that differ" if changed[1:] else ""
        )
    elif whole and (missing := sorted(set(now) - set(measured))):
        expected, found = f"all {len(now)} patches of the set", f"none of {', '.join(missing)}"
    else:
        return
    yield Finding(
        patch="(full set)",
        file=file.relative_to(root).as_posix(),
        line=None,
        expected=expected,
        found=found,
        verdict=verdict,
        next=again,
    )
