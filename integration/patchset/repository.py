"""All contributions of the repository, in series order, and sets of them."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from integration.ground import paths
from integration.ground.errors import UserError, nearest
from integration.patchset import pins as pins_module
from integration.patchset.finding import Finding
from integration.patchset.patch import Contribution, MalformedPatchError, parse

NAME_PATTERN = r"[a-z][a-z0-9_]*"


def read_series(path: Path) -> list[tuple[int, str]]:
    """Return ``(line number, name)`` for each name listed; ``#`` starts a comment."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    stripped = ((number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1))
    return [(number, name) for number, name in stripped if name]


def scan() -> tuple[tuple[Contribution, ...], list[Finding]]:
    """Read every patch that can be read, and say what is wrong with the others.

    Series and files must name the same patches, once each; a name is unique across upstreams, as
    that is what the command line and ``Requires:`` call a contribution by.

    Raises:
        UserError: git has given the patches the line ends of another system.
    """
    contributions: list[Contribution] = []
    findings: list[Finding] = []
    seen: dict[str, str] = {}
    for upstream in pins_module.load():
        folder = paths.patches_of(upstream)
        series = folder / "series"
        place = folder.relative_to(paths.REPO).as_posix()
        shown = f"{place}/series"
        for line, name in read_series(series):
            file = folder / f"{name}.patch"
            stored = f"{place}/{name}.patch"
            if name in seen:
                found = f"already listed in {seen[name]}"
                mend = f"remove the line, or rename one of the patches, in {shown}"
                expected = "a name that is listed once"
                findings.append(Finding(name, shown, line, expected, found, "duplicate", mend))
                continue
            seen[name] = f"{shown}:{line}"
            if not file.is_file():
                mend = f"git checkout {stored}, or remove the line"
                rest = (f"a file {stored}", "no such file", "missing", mend)
                findings.append(Finding(name, shown, line, *rest))
                continue
            data = file.read_bytes()
            if data.partition(b"\n")[0].endswith(b"\r"):
                raise _crlf(file)
            try:
                contributions.append(parse(name, upstream, file, data))
            except MalformedPatchError as error:
                mend = f"git checkout {stored}; edit by import and export"
                told = (error.line, error.expected, error.found)
                findings.append(Finding(name, stored, *told, "malformed", mend))
        for file in sorted(folder.glob("*.patch")):
            if f"{shown}:" not in seen.get(file.stem, ""):
                mend = f"add {file.stem} to {shown}, or delete the file"
                stored = f"{place}/{file.name}"
                rest = (f"its name in {shown}", "not listed", "unlisted", mend)
                findings.append(Finding(file.stem, stored, None, *rest))
    return tuple(contributions), findings


def _crlf(file: Path) -> UserError:
    root = paths.REPO
    return UserError(
        f"expected LF at the ends of the lines of {file.relative_to(root)}, found CRLF, which git "
        f"puts there where core.autocrlf is true; hashes and hunks cannot fit: run `git -C {root} "
        f"config core.autocrlf false`, then `git -C {root} checkout-index --force --all`"
    )


def load() -> tuple[Contribution, ...]:
    """Return every contribution in series order, pytorch's first; refuse a broken repository."""
    contributions, findings = scan()
    if findings:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise UserError(
            f"{findings[0].sentence()}{more}; no set can be built: run `integration patches check`"
        )
    return contributions


def find(
    contributions: Sequence[Contribution], names: Iterable[str] | None
) -> tuple[Contribution, ...]:
    """Return exactly the contributions called ``names`` (all for None), in series order.

    ``upstream/name`` is accepted for ``name``, and one of ``names`` may hold several, with commas
    between.
    """
    if names is None:
        return tuple(contributions)
    known = {contribution.name: contribution for contribution in contributions}
    wanted = set()
    for asked in (part.strip() for name in names for part in name.split(",")):
        upstream, _, name = asked.rpartition("/")
        if name not in known or upstream not in ("", known[name].upstream):
            full = [f"{c.upstream}/{c.name}" for c in contributions] if upstream else list(known)
            raise UserError(
                f"unknown contribution {asked or repr(asked)}{nearest(asked, full)} "
                f"(`integration patches list` shows all)"
            )
        wanted.add(name)
    return tuple(contribution for contribution in contributions if contribution.name in wanted)


def select(
    contributions: Sequence[Contribution], names: Iterable[str] | None
) -> tuple[Contribution, ...]:
    """Return the contributions called ``names`` (all for None) with all that they require."""
    return close(contributions, [c.name for c in find(contributions, names)])


def leave_out(
    contributions: Sequence[Contribution], names: Iterable[str]
) -> tuple[Contribution, ...]:
    """Return ``contributions`` without those called ``names`` and all that require one of them."""
    gone = set(names)
    return tuple(
        c for c in contributions if gone.isdisjoint(n.name for n in close(contributions, [c.name]))
    )


def without(names: Sequence[str]) -> tuple[str, ...] | None:
    """Return what every verb keeps for ``--without``: the names of the set, in series order.

    What requires one of ``names`` cannot stay. The user is told so on stderr, as some verbs print
    a script or JSON on stdout.

    Returns:
        The names; None, which stands for all of them, where ``names`` is empty.

    Raises:
        UserError: there is no contribution of that name.
    """
    if not names:
        return None
    every = load()
    asked = {c.name for c in find(every, names)}
    kept = tuple(c.name for c in leave_out(every, asked))
    if also := [c.name for c in every if c.name not in asked.union(kept)]:
        print(
            f"left out too, as they require {', '.join(names)}: {', '.join(also)}", file=sys.stderr
        )
    return kept


def close(contributions: Sequence[Contribution], names: Iterable[str]) -> tuple[Contribution, ...]:
    """Add everything that ``names`` require, across upstreams; refuse cycles and unknown names."""
    known = {contribution.name: contribution for contribution in contributions}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            cycle = " -> ".join((*trail[trail.index(name) :], name))
            raise UserError(
                f"expected Requires: without cycles, found {cycle}; no order can apply them: drop "
                f"one of these lines and run `integration patches check`"
            )
        if name in done:
            return
        if name not in known:
            raise UserError(
                f"{trail[-1] if trail else 'the set'} requires {name}, which is not a contribution"
                f"{nearest(name, list(known))}; it cannot be applied: mend its Requires: line"
            )
        for required in known[name].requires:
            visit(required, (*trail, name))
        done.add(name)

    for name in names:
        visit(name, ())
    return tuple(contribution for contribution in contributions if contribution.name in done)
