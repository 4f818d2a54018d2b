"""Carry evidence over to a patch of which only the words have changed.

[Note: Only words]
Evidence names the sha256 of the patch that it was measured on, message and all. Polishing the
message is most of a pull request's life and changes nothing that was measured: where the diff and
the trailers that say what was run (``RUN``) stay, the evidence stays. What names the old sha256
then names the new one, and says beside it which file was measured: ``patch_sha256`` has
``measured_patch_sha256``, the map ``patches`` has ``measured_patches``. What does not name the old
one was stale before, and is left so.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.evidence import check, readme, trace
from integration.patchset.patch import Contribution

RUN = ("Requires", "Test", "Numerics", "Drop-when")  # trailers
Pairs = Mapping[str, tuple[Contribution, Contribution]]  # a patch before and after, by its name


def carry(
    root: Path, stored: Sequence[Contribution], exported: Sequence[Contribution]
) -> tuple[dict[str, bytes], list[str]]:
    """Return what is to be written, by its path below ``root``, and what to say of it.

    It is said for each changed patch that anything names. Writing is the caller's: patches and
    evidence must change at once.
    """
    before = {(c.upstream, c.name): c for c in stored}
    pairs = {c.name: (before.get((c.upstream, c.name), c), c) for c in exported}
    changed = {name: pair for name, pair in pairs.items() if pair[0].data != pair[1].data}
    reworded = {name: pair for name, pair in changed.items() if not differing(*pair)}
    written, carried = _follow(root, reworded)
    _, lost = _follow(root, {name: changed[name] for name in changed.keys() - reworded.keys()})
    told = []
    for name, (old, new) in changed.items():
        if name in carried:
            short = new.sha256[: check.DIGITS]
            told.append(f"{name}: only its words changed; {short} now stands in {carried[name]}")
        elif name in lost:
            what = ", ".join(differing(old, new))
            told.append(f"{name}: more than words changed ({what}); measure again: {lost[name]}")
    return written, told


def differing(old: Contribution, new: Contribution) -> list[str]:
    """Name what differs beside words; where that is nothing, what was measured still holds."""
    trailers = [f"{key}:" for key in RUN if old.values(key) != new.values(key)]
    return ["diff"] * (old.diff != new.diff) + trailers


def _follow(root: Path, pairs: Pairs) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the files that name an old patch, naming the new one, and where each was named."""
    written: dict[str, bytes] = {}
    files: Counter[str] = Counter()
    for file, key, owner in _evidence(root, [new for _, new in pairs.values()]):
        record, named = _carried(check.record(file), key, owner, pairs)
        if named:
            written[file.relative_to(root).as_posix()] = _packed(record, file)
            files.update(named)
    text, rows = _proof(root / readme.PROOF_FILE, pairs)
    if rows:
        written[readme.PROOF_FILE] = text.encode()
    places: dict[str, list[str]] = {name: [] for name in pairs if name in files or name in rows}
    for name, words in places.items():
        if count := files[name]:
            words.append(f"{count} file{'s' * (count > 1)} of evidence")
        if name in rows:
            words.append("its row of the proof")
    return written, {name: " and ".join(words) for name, words in places.items()}


def _evidence(root: Path, of: Sequence[Contribution]) -> Iterator[tuple[Path, str, str]]:
    """Yield each file that may name one of them, under which key, and whose alone it is."""
    for c in of:
        for file in sorted((c.folder / "evidence").glob("*.json")):
            yield file, "patch_sha256", c.name
    for pattern in (check.LADDERS, *check.TRACES) if of else ():
        for file in sorted(root.glob(pattern)):
            yield file, "patches", ""


def _carried(
    record: dict[str, Any], key: str, owner: str, reworded: Pairs
) -> tuple[dict[str, Any], list[str]]:
    """Return the record with the new sha256 under ``key`` and, behind it, what was measured.

    A patch reworded twice was measured as it was first; where those words return, the note goes.

    Returns:
        The record, and the names of the patches that it named as they were.
    """
    note = f"measured_{key}"
    of_set = isinstance(record.get(key), dict)
    now = dict(record[key]) if of_set else {owner: record.get(key)}
    first = dict(record.get(note, {})) if of_set else {owner: record.get(note)}
    carried = [name for name, (old, _) in reworded.items() if now.get(name) == old.sha256]
    for name in carried:
        old, new = reworded[name]
        now[name] = new.sha256
        first[name] = first.get(name) or old.sha256
    first = {name: digest for name, digest in first.items() if digest != now.get(name)}
    items = []
    for each, value in record.items():
        if each == key:
            items.append((key, now if of_set else now[owner]))
            items += [(note, first if of_set else first[owner])] if first else []
        elif each != note:
            items.append((each, value))
    return dict(items), carried


def _packed(record: dict[str, Any], file: Path) -> bytes:
    """Return the bytes of ``file`` for another record, laid out as before: git shows a line."""
    if file.suffix == ".gz":
        return trace.packed(record)
    text = file.read_text(encoding="utf-8")
    indent = re.match(r"\{\n( +)", text)
    spaces = len(indent[1]) if indent else None
    end = text[len(text.rstrip()) :]
    return (json.dumps(record, indent=spaces, ensure_ascii=text.isascii()) + end).encode()


def _proof(file: Path, reworded: Pairs) -> tuple[str, set[str]]:
    """Return the file's text with the new digits in the rows of the proof, and whose rows."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    before, begin, rest = text.partition(readme.PROOF_BEGIN)
    body, end, after = rest.partition(readme.PROOF_END)
    rows = set()
    for name, (old, new) in reworded.items():
        row = rf"^(\| {name} \|.*\| `){old.sha256[: check.DIGITS]}(` \|)$"
        digits = rf"\g<1>{new.sha256[: check.DIGITS]}\g<2>"
        body, found = re.subn(row, digits, body, flags=re.MULTILINE)
        rows |= {name} if found else set()
    return f"{before}{begin}{body}{end}{after}", rows
