"""What a patch's header must say. Every field is checked: what is only agreed upon decays.

(Electron asks every patch for a reason by convention: 94 of 251 carry a link. Yocto's QA enforces
a closed status vocabulary: 1,027 of 1,027 have one.)
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from integration.ground import paths
from integration.ground.errors import nearest
from integration.patchset.finding import Finding
from integration.patchset.patch import Contribution, Trailer
from integration.patchset.pins import Pin

PARAGRAPHS = ("Root cause:", "Behaviour change:", "Test plan:")
_URL = r"https://\S+"
_VERSION = r"\d+(\.\d+)+\S*"

# key: (how often, what the value must match, the same in words)
_TRAILERS: dict[str, tuple[str, str, str]] = {
    "Status": (
        "once",
        rf"pending|submitted {_URL}|upstream \S+|merged {_VERSION}|denied {_URL}|local \S.*",
        "pending, submitted URL, upstream PR-OR-COMMIT, merged VERSION, denied URL or local REASON",
    ),
    "Issue": ("once", rf"{_URL}|none \S.*", "the URL of the upstream issue, or none REASON"),
    "Requires": ("once", r"([a-z][a-z0-9_]*(, *[a-z][a-z0-9_]*)*)?", "names, or nothing"),
    "Test": ("often", r"\S+ -> \S+", "FILE -> path in the upstream repository"),
    "Numerics": ("once", r"bitwise|changes \S.*", "bitwise or changes REASON"),
    "Drop-when": ("once", r"\S.*", "the test that passes once upstream no longer needs the patch"),
}


def lint(
    contributions: Sequence[Contribution], pins: Mapping[str, Pin], names: Sequence[str]
) -> list[Finding]:
    """Check every header, and each against the others.

    Args:
        names: every name in a series, also of patches that could not be read.
    """
    order = {c.name: number for number, c in enumerate(contributions)}
    findings: list[Finding] = []
    for contribution in contributions:
        findings += _message(contribution)
        findings += _trailers(contribution)
        findings += _on_main(contribution, pins[contribution.upstream])
        findings += _requires(contribution, contributions, order, names)
        findings += _tests(contribution)
        if paths.patches_dir() == paths.PATCHES:  # nothing is measured on upstreams to come
            findings += evidence(contribution)
        findings += _paths(contribution, pins[contribution.upstream])
    return findings


def _reporter(contribution: Contribution) -> Callable[..., Finding]:
    def report(
        line: int | None, expected: str, found: str, verdict: str, next: str | None = None
    ) -> Finding:
        mend = "integration patches import, `git commit --amend` or rebase, then export"
        return Finding(
            contribution.name, contribution.shown, line, expected, found, verdict, next or mend
        )

    return report


def _message(contribution: Contribution) -> Iterator[Finding]:
    report = _reporter(contribution)
    if not contribution.subject:
        yield report(4, "a subject", "none", "malformed header")
    if contribution.subject.startswith(("[PATCH", "fixup!", "squash!")):
        yield report(4, "the subject alone", contribution.subject, "malformed header")
    if not contribution.body or contribution.body.startswith(PARAGRAPHS):
        yield report(None, "a summary paragraph first in the message", "none", "missing field")
    starts = contribution.body.split("\n")
    for paragraph in PARAGRAPHS:
        if not any(line.startswith(paragraph) for line in starts):
            yield report(None, f"a paragraph `{paragraph} ...`", "none", "missing field")


def _trailers(contribution: Contribution) -> Iterator[Finding]:
    report = _reporter(contribution)
    for key, (how_often, _, _) in _TRAILERS.items():
        lines = [trailer.line for trailer in contribution.trailers if trailer.key == key]
        if not lines:
            where = None if not contribution.trailers else contribution.trailers[-1].line
            yield report(where, f"`{key}: ...` in the last paragraph", "none", "missing field")
        if how_often == "once" and len(lines) > 1:
            yield report(lines[1], f"`{key}:` once", f"{len(lines)} times", "duplicate field")
    for trailer in contribution.trailers:
        yield from _value(trailer, report)


def _value(trailer: Trailer, report: Callable[..., Finding]) -> Iterator[Finding]:
    if trailer.key not in _TRAILERS:
        expected = f"one of {', '.join(_TRAILERS)}{nearest(trailer.key, list(_TRAILERS))}"
        yield report(trailer.line, expected, f"`{trailer.key}:`", "unknown field")
        return
    _, pattern, words = _TRAILERS[trailer.key]
    if not re.fullmatch(pattern, trailer.value):
        found = f"`{trailer.key}: {trailer.value}`"
        yield report(trailer.line, f"{trailer.key}: {words}", found, "malformed field")


def _on_main(contribution: Contribution, pin: Pin) -> Iterator[Finding]:
    """Check that ``Status: upstream`` names a change of the patch's own upstream, and one only."""
    page = re.escape(pin.repository)
    known = rf"({page}/commit/)?[0-9a-f]{{40}}|{page}/pull/[1-9]\d*"
    change = contribution.on_main
    if len(change.split()) == 1 and not re.fullmatch(known, change):
        yield _reporter(contribution)(
            _line_of(contribution, "Status"),
            f"Status: upstream {pin.repository}/pull/NUMBER, {pin.repository}/commit/SHA or SHA, "
            f"with all 40 digits of the commit",
            f"`{change}`",
            "malformed field",
        )


def _line_of(contribution: Contribution, key: str, text: str = "") -> int | None:
    lines = (t.line for t in contribution.trailers if t.key == key and text in t.value)
    return next(lines, None)


def _requires(
    contribution: Contribution,
    contributions: Sequence[Contribution],
    order: Mapping[str, int],
    names: Sequence[str],
) -> Iterator[Finding]:
    report = _reporter(contribution)
    known = {c.name: c for c in contributions}
    series = f"{contribution.shown.rpartition('/')[0]}/series"
    for name in contribution.requires:
        line = _line_of(contribution, "Requires", name)
        if name not in names:
            expected = f"the name of a contribution{nearest(name, list(names))}"
            yield report(line, expected, f"`{name}`", "unknown contribution")
        elif name in known and contribution.name in _reached(name, known):
            expected = "Requires: without cycles"
            found = f"{name} requires {contribution.name} in turn"
            yield report(line, expected, found, "cycle")
        elif (
            name in known
            and known[name].upstream == contribution.upstream
            and order[name] > order[contribution.name]
        ):
            yield report(
                line,
                f"{name} before {contribution.name} in {series}",
                "after",
                "wrong order",
                f"move {name} up in {series}",
            )


def _reached(name: str, known: Mapping[str, Contribution]) -> set[str]:
    """Return ``name`` and all that it requires; cycles end the walk instead of looping."""
    reached: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        if current not in reached and current in known:
            reached.add(current)
            todo += known[current].requires
    return reached


def _tests(contribution: Contribution) -> Iterator[Finding]:
    report = _reporter(contribution)
    shown = f"{contribution.upstream}_contrib/{contribution.name}"
    listed = {file for file, _ in contribution.tests}
    for file, target in contribution.tests:
        line = _line_of(contribution, "Test", file)
        if file and not (contribution.folder / file).is_file():
            yield report(
                line,
                f"a file {shown}/{file}",
                "no such file",
                "missing test",
                f"add {shown}/{file}",
            )
        if target and (PurePosixPath(target).is_absolute() or ".." in target.split("/")):
            yield report(line, "a path inside the upstream repository", target, "malformed field")
    targets = [target for _, target in contribution.tests if target]
    for value in contribution.values("Drop-when"):
        if targets and not re.fullmatch(r"[^:]+(::\w+){0,2}", value):
            expected, found = "PATH, PATH::CLASS or PATH::CLASS::TEST", f"`{value}`"
            yield report(_line_of(contribution, "Drop-when"), expected, found, "malformed field")
        elif targets and value.partition("::")[0] not in targets:
            expected = f"a test of its own: {' or '.join(targets)}"
            yield report(_line_of(contribution, "Drop-when"), expected, value, "unknown test")
    for test in sorted(contribution.folder.glob("**/test_*.py")):
        file = test.relative_to(contribution.folder).as_posix()
        if file not in listed:
            expected = f"`Test: {file} -> upstream path` for {shown}/{file}"
            yield report(_line_of(contribution, "Test"), expected, "no such line", "missing field")
        for number, text in enumerate(test.read_text(encoding="utf-8").split("\n"), 1):
            if re.match(r"\s*(import|from)\s+integration\b", text):
                expected = "a test that moves upstream unchanged"
                mend = "import the patched package alone"
                told = (expected, f"`{text.strip()}`", "not upstreamable", mend)
                yield Finding(contribution.name, f"{shown}/{file}", number, *told)


def evidence(contribution: Contribution) -> Iterator[Finding]:
    """Evidence counts only for the patch that it was measured on."""
    for file in sorted((contribution.folder / "evidence").glob("*.json")):
        try:
            measured = json.loads(file.read_text(encoding="utf-8"))["patch_sha256"]
        except (ValueError, KeyError, TypeError) as error:
            measured = f"none ({error!r})"
        if measured != contribution.sha256:
            shown = file.relative_to(paths.REPO).as_posix()
            expected = f"patch_sha256 {contribution.sha256}, the stored patch's"
            mend = "measure again, by the `command` in the file, or delete it"
            yield Finding(
                contribution.name, shown, None, expected, measured, "stale evidence", mend
            )


def _paths(contribution: Contribution, pin: Pin) -> Iterator[Finding]:
    report = _reporter(contribution)
    for path in sorted(contribution.paths):
        if not path.startswith(f"{pin.package}/") or ".." in path.split("/"):
            line = _diff_line(contribution, path)
            yield report(line, f"paths below {pin.package}/", path, "outside the package")


def _diff_line(contribution: Contribution, path: str) -> int | None:
    lines = contribution.data.decode().split("\n")
    starts = (n for n, s in enumerate(lines, 1) if s.startswith("diff --git ") and path in s)
    return next(starts, None)
