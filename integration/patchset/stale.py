"""Evidence of a set of patches, not of one: measured ladders and profiles of whole trainings.

Such a file names its patches, ``"patches": {name: sha256}``. It counts only while each of them is
stored as it was; a ladder, also while it names all that there are.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from integration.patchset.finding import Finding
from integration.patchset.patch import Contribution

LADDERS = "integration/evidence/*.json"
TRACES = ("*_contrib/*/evidence/trace-*.json.gz", "integration/evidence/trace-*.json.gz")


def stale(root: Path, contributions: Sequence[Contribution]) -> Iterator[Finding]:
    """Yield a finding for each file under ``root`` whose patches are no longer the stored ones."""
    now = {c.name: c.sha256 for c in contributions}
    for file in sorted(root.glob(LADDERS)):
        measured = _patches(file)
        yield from _compare(root, file, measured, now, missing=set(now) - set(measured or ()))
    for file in sorted(f for pattern in TRACES for f in root.glob(pattern)):
        yield from _compare(root, file, _patches(file), now, missing=set())


def _patches(file: Path) -> dict[str, str] | None:
    """Return name -> sha256 as the file has them, or None where it has none."""
    try:
        data = file.read_bytes()
        found = json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)["patches"]
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _compare(
    root: Path,
    file: Path,
    measured: dict[str, str] | None,
    now: dict[str, str],
    missing: set[str],
) -> Iterator[Finding]:
    if measured is None:
        expected, found = '`"patches": {name: sha256}`', "none"
    elif changed := sorted(n for n, digest in measured.items() if now.get(n) != digest):
        name = changed[0]
        expected = f"{name} {now.get(name, 'not in the set')}"
        found = f"{name} {measured[name]}" + (
            f", and {len(changed) - 1} more that differ" if changed[1:] else ""
        )
    elif missing:
        expected, found = (
            f"all {len(now)} patches of the set",
            f"none of {', '.join(sorted(missing))}",
        )
    else:
        return
    yield Finding(
        patch="(full set)",
        file=file.relative_to(root).as_posix(),
        line=None,
        expected=expected,
        found=found,
        verdict="stale evidence",
        next="measure again, by the `command` in the file, or delete it",
    )
