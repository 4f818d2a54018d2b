"""Prove that every patch stands alone and that all of them stand together."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset import exchange, repository, scratch
from integration.patchset import pins as pins_module
from integration.patchset.finding import Finding
from integration.patchset.lint import lint
from integration.patchset.patch import Contribution, pristine_paths
from integration.patchset.pins import Pin, sha256

Reader = Callable[[Pin, Iterable[str]], scratch.Files]


def installed(pin: Pin, wanted: Iterable[str]) -> scratch.Files:
    """Return the pristine files of ``pin`` among ``wanted`` that are installed."""
    return scratch.read(pin.site(), wanted)


def check(pristine_of: Reader = installed) -> list[Finding]:
    """Return everything that is wrong; an empty list proves that

    - series and files name the same patches, and every header field is there and well formed;
    - the touched pristine files are those of ``pins.toml``;
    - each patch applies on the pin with what it requires, every pair applies in both orders with
      the same result, the full set applies, and comes off again;
    - ``export(import(p)) == p`` byte for byte, for every patch p.
    """
    pins = pins_module.load()
    contributions, findings = repository.scan()
    complete = not findings  # what an unreadable patch touches is not known
    listed = [
        name
        for upstream in pins
        for _, name in repository.read_series(paths.patches_of(upstream) / "series")
    ]
    findings += lint(contributions, pins, listed)
    usable = _closed(contributions)
    for upstream, pin in pins.items():
        mine = [c for c in contributions if c.upstream == upstream]
        findings += _outdated(mine)
        try:
            pristine = pristine_of(pin, scratch.touched(mine) | set(pin.files))
        except UserError as error:
            findings.append(_not_installed(pin, error))
            continue
        findings += _hashes(pin, pristine, mine, complete)
        sound = [c for c in mine if c.name in usable]
        findings += _applies(sound, usable, pristine)
        findings += round_trip(sound, pristine, set(usable))
    return list(dict.fromkeys(findings))


def _outdated(contributions: Sequence[Contribution]) -> list[Finding]:
    """Return the patches for a newer upstream whose originals have changed since their rebase."""
    findings = []
    for c in contributions:
        series = c.path.with_name("series")
        origin = re.search(
            rf"^{c.name} +# from ([0-9a-f]{{64}})$", series.read_text(), re.MULTILINE
        )
        today = paths.PATCHES / c.upstream / c.path.name
        found = sha256(today.read_bytes()) if today.is_file() else "no such patch"
        if origin and found != origin[1]:
            mend = "integration patches rebase --onto PACKAGE==VERSION --into NAME, as before"
            told = (
                f"sha256 {origin[1]} of {c.name} today, as was rebased",
                found,
                "outdated",
                mend,
            )
            findings.append(Finding(c.name, c.shown, None, *told))
    return findings


def _closed(contributions: Sequence[Contribution]) -> dict[str, tuple[Contribution, ...]]:
    """Map each name to itself and all that it requires; leave out what lint has refused."""
    closures = {}
    for contribution in contributions:
        try:
            closures[contribution.name] = repository.close(contributions, [contribution.name])
        except UserError:
            continue
    return closures


def _not_installed(pin: Pin, error: UserError) -> Finding:
    message, _, command = str(error).rpartition(": run ")
    expected = f"{pin.package} {pin.version} installed"
    found = message.partition(", found ")[2] or message
    told = (expected, found, "wrong version", command.strip("`"))
    return Finding("(all)", pin.stated, None, *told)


def _hashes(
    pin: Pin, pristine: scratch.Files, contributions: Sequence[Contribution], complete: bool
) -> list[Finding]:
    findings = []
    wanted = pristine_paths(contributions)
    touching = {path: c.name for c in reversed(contributions) for path in c.old_paths & wanted}

    def report(path: str, expected: str, found: str, verdict: str, next: str) -> None:
        patch = touching.get(path, "(none)")
        findings.append(Finding(patch, path, None, expected, found, verdict, next))

    for path, expected, found in pin.changed(pristine):
        report(
            path,
            f"sha256 {expected}",
            found,
            "pristine file changed",
            pins_module.reinstall(pin),
        )
    for path in sorted(set(touching) - set(pin.files)):
        there = path in pristine
        digest = sha256(pristine[path]) if there else "?"
        add = f'add `"{path}" = "{digest}"` under [{pin.upstream}.files] of {pin.stated}'
        if not there:
            add = "integration patches import, mend the commit, integration patches export"
        verdict = "not pinned" if there else "surroundings changed"
        expected = f"its sha256 in {pin.stated}" if there else "a file of the pin"
        report(path, expected, "none", verdict, add)
    for path in sorted(set(pin.files) - set(touching)) if complete else ():
        report(
            path,
            "hashes of touched files alone",
            "no patch touches it",
            "pinned in vain",
            f"remove its line under [{pin.upstream}.files] of {pin.stated}",
        )
    return findings


def _applies(
    contributions: Sequence[Contribution],
    closures: Mapping[str, Sequence[Contribution]],
    pristine: scratch.Files,
) -> list[Finding]:
    """Apply each alone, the pairs in both orders, all, and all in reverse."""
    # The other upstream's patches touch none of these files.
    mine = {c.name for c in contributions}
    sets = {c.name: [r for r in closures[c.name] if r.name in mine] for c in contributions}
    findings = []
    alone = set()
    for contribution in contributions:
        _, failed = scratch.apply(pristine, sets[contribution.name])
        findings += failed
        if not failed:
            alone.add(contribution.name)
    everything = [c for c in contributions if c.name in alone]
    with ThreadPoolExecutor() as threads:  # each pair waits for git, not for Python
        pairs = combinations(everything, 2)
        for found in threads.map(lambda p: _pair(p[0], p[1], sets, pristine), pairs):
            findings += found
    state, failed = scratch.apply(pristine, everything)
    findings += failed
    if not failed:
        back, failed = scratch.apply(state, everything, reverse=True)
        findings += failed
        differing = sorted(p for p in {*back, *pristine} if back.get(p) != pristine.get(p))
        if differing and not failed:
            expected = "the pristine file after taking the full set off"
            mend = "make the hunks' context unambiguous (import, mend, export)"
            told = (expected, "another file", "not reversible", mend)
            findings.append(Finding("(full set)", differing[0], None, *told))
    return findings


def _pair(
    left: Contribution,
    right: Contribution,
    sets: Mapping[str, Sequence[Contribution]],
    pristine: scratch.Files,
) -> list[Finding]:
    first, second = sets[left.name], sets[right.name]
    only_first, only_second = _only(first, second)
    if not scratch.touched(only_first) & scratch.touched(only_second):
        return []
    one, failed = scratch.apply(pristine, [*first, *only_second])
    other, failed_too = scratch.apply(pristine, [*second, *only_first])
    findings = [
        replace(
            finding,
            patch=f"{finding.patch} after {before.name}",
            next=f"move the hunks apart, or let {finding.patch} require {before.name}",
        )
        for found, before in ((failed, left), (failed_too, right))
        for finding in found
    ]
    differing = sorted(path for path in {*one, *other} if one.get(path) != other.get(path))
    if differing and not findings:
        mend = f"move their hunks apart, or let {right.name} require {left.name}"
        told = ("the same file in both orders", "two different ones", "order matters", mend)
        findings.append(Finding(f"{left.name} + {right.name}", differing[0], None, *told))
    return findings


def _only(
    first: Sequence[Contribution], second: Sequence[Contribution]
) -> tuple[list[Contribution], list[Contribution]]:
    """Return what each of two sets has alone.

    Where they share no file they commute by construction: applying one changes nothing that the
    other reads. A required patch is in its dependent's set, so that one of the two is empty.
    """
    return [c for c in first if c not in second], [c for c in second if c not in first]


def meetings(contributions: Sequence[Contribution]) -> dict[str, int]:
    """Return for each name how many others it shares a file with, and is tried with both ways."""
    counts = dict.fromkeys((c.name for c in contributions), 0)
    sets = {c.name: repository.close(contributions, [c.name]) for c in contributions}
    for left, right in combinations(contributions, 2):
        first, second = _only(sets[left.name], sets[right.name])
        if scratch.touched(first) & scratch.touched(second):
            counts[left.name] += 1
            counts[right.name] += 1
    return counts


def round_trip(
    contributions: Sequence[Contribution], pristine: scratch.Files, names: set[str]
) -> list[Finding]:
    """Import the patches as commits, export them again, and compare the bytes."""
    if not contributions:
        return []
    with TemporaryDirectory(prefix="integration-") as temporary:
        folder = Path(temporary) / "checkout"
        exchange.create(folder, pristine)
        complaint = exchange.commit_all(folder, exchange.mailbox(contributions, marked=True))
        if complaint:
            return [_not_imported(contributions, complaint)]
        mine = {c.name for c in contributions}
        try:
            exported = exchange.export(folder, elsewhere=sorted(names - mine))
        except UserError as error:
            return [_not_imported(contributions, str(error))]
    return [
        _difference(contribution, item.data)
        for contribution, item in zip(contributions, exported, strict=True)
        if contribution.data != item.data
    ]


def _not_imported(contributions: Sequence[Contribution], complaint: str) -> Finding:
    named = [c for c in contributions if c.subject in complaint or c.name in complaint.split()]
    patch = named[0] if named else None
    file = patch.shown if patch else Path(contributions[0].shown).parent.as_posix()
    expected = "patches that can be imported and exported"
    mend = "mend the findings above first, then run `integration patches check` again"
    told = (expected, complaint.splitlines()[0], "does not import", mend)
    return Finding(patch.name if patch else "(full set)", file, None, *told)


def _difference(contribution: Contribution, exported: bytes) -> Finding:
    stored = contribution.data.decode().split("\n")
    again = exported.decode("utf-8", "replace").split("\n")
    pairs = enumerate(zip([*stored, "end of file"], [*again, "end of file"], strict=False), 1)
    line, (found, expected) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
    mend = "integration patches import, then integration patches export"
    told = (f"`{expected}`, what export writes", f"`{found}`", "not canonical", mend)
    return Finding(contribution.name, contribution.shown, line, *told)
