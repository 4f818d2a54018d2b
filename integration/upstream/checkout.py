"""The scratch checkout: the set as commits on the pinned sources, to be edited with git.

``import_set`` makes one repository an upstream below a folder, ``export_set`` writes its commits
back to ``patches/``. What lies between is the reader's own git: amend, rebase, add, drop.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from integration.evidence import reword
from integration.ground import paths
from integration.ground.errors import UserError
from integration.ground.files import replace_all
from integration.patchset import exchange, git, repository
from integration.patchset import pins as pins_module
from integration.patchset.patch import Contribution, parse, pristine_paths
from integration.patchset.pins import Pin, sha256

_RECORD = Path(".git") / "integration.json"  # which patches a checkout was made from
_BUILT_FOLDERS = {"bin", "include", "lib", "share"}  # of a wheel: compiled code and its headers
_BUILT_SUFFIXES = {".pyc", ".so"}


def default_folder() -> Path:
    """Return where `import` puts the checkouts when no folder is given."""
    return paths.cache_dir() / "checkout"


def sources(pin: Pin) -> dict[str, bytes]:
    """Return the installed sources of ``pin``: what a patch can change without a compiler."""
    return sources_below(pin.site(), pin.package)


def sources_below(root: Path, package: str) -> dict[str, bytes]:
    """Return the sources of ``root/package``, by their path below ``root``."""
    found = {}
    for folder, folders, files in os.walk(root / package):
        skipped = {"__pycache__", *(_BUILT_FOLDERS if Path(folder) == root / package else ())}
        folders[:] = sorted(set(folders) - skipped)
        for name in files:
            file = Path(folder) / name
            path = file.relative_to(root)
            if is_source(PurePosixPath(path), package) and not file.is_symlink():
                found[path.as_posix()] = file.read_bytes()
    return found


def is_source(path: PurePosixPath, package: str) -> bool:
    """Tell whether ``path``, below the folder that holds ``package``, is a source of it."""
    parts = path.parts
    built = len(parts) > 2 and parts[1] in _BUILT_FOLDERS
    return parts[0] == package and not built and path.suffix not in _BUILT_SUFFIXES


@dataclass(frozen=True, slots=True)
class Imported:
    """One upstream's checkout. ``stopped`` is git's complaint about the patch that does not fit."""

    upstream: str
    path: Path
    stopped: str | None


def import_set(folder: Path) -> list[Imported]:
    """Make ``folder/<upstream>`` for each upstream.

    A checkout that exists is never overwritten: it may hold work. Where a patch does not fit, its
    checkout is left inside `git am`, to be mended there and continued.
    """
    contributions = repository.load()
    pins = pins_module.load()
    for upstream in pins:
        if (folder / upstream).exists():
            raise UserError(
                f"expected no {folder / upstream}, found one, which may hold your work; "
                f"nothing was imported: export it and run `rm -r {folder / upstream}`, or name "
                f"another folder"
            )
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    # All or none: the checkouts are renamed into place when the last one is complete.
    with TemporaryDirectory(prefix=".importing-", dir=folder) as temporary:
        for upstream, pin in pins.items():
            mine = [c for c in contributions if c.upstream == upstream]
            building = Path(temporary) / upstream
            pins_module.refuse_changed(pin, pin.site(), pin.files)
            exchange.create(building, sources(pin))
            box = exchange.mailbox(mine, marked=True)
            stopped = exchange.commit_all(building, box, stay=True)
            made.append(Imported(upstream, folder / upstream, stopped))
            for_people(building)
            _record(building, mine)
        for checkout in made:
            (Path(temporary) / checkout.upstream).rename(checkout.path)
    return made


def for_people(checkout: Path) -> None:
    """Let a person's own git commit there as ours does, without compiled files."""
    git.run(["config", "user.name", git.NAME], checkout)
    git.run(["config", "user.email", git.EMAIL], checkout)
    (checkout / ".git" / "info" / "exclude").write_text("__pycache__/\n")


def _record(checkout: Path, contributions: Sequence[Contribution]) -> None:
    (checkout / _RECORD).write_text(json.dumps({c.name: c.sha256 for c in contributions}, indent=2))


def export_set(folder: Path) -> list[str]:
    """Write the commits of ``folder/<upstream>`` back to ``patches/``: all files or none.

    Series order is commit order; a patch whose commit is gone is removed; ``pins.toml`` gets the
    hashes of the files that are touched now. Evidence of a patch of which only the words have
    changed is carried over with it ([Note: Only words] in reword.py).

    Returns:
        One line for each patch that is new, changed, removed or unchanged; then, one for each that
        has changed, what that means for its evidence.
    """
    pins = pins_module.load()
    held = [upstream for upstream in pins if (folder / upstream / ".git").is_dir()]
    if not held:
        raise UserError(
            f"expected a checkout at {folder}/{next(iter(pins))}, found none; nothing can be "
            f"exported: run `integration patches import {folder}`"
        )
    stored, _ = repository.scan()
    for upstream in held:
        refuse_unfinished(folder / upstream)
        _refuse_newer(folder / upstream, upstream, stored)
    line = {upstream: exchange.commits(folder / upstream) for upstream in held}
    names = {c.name for c in stored if c.upstream not in held}
    names |= {commit.name for commits in line.values() for commit in commits}

    new: dict[str, bytes | None] = {}
    said: list[str] = []
    hashes: dict[str, dict[str, Mapping[str, str]]] = {}  # by the file that they go into
    exported: dict[str, list[Contribution]] = {}
    for upstream in held:
        mine = {commit.name for commit in line[upstream]}
        items = exchange.export(folder / upstream, elsewhere=sorted(names - mine))
        place = paths.patches_of(upstream)
        exported[upstream] = parsed(items, upstream, place)
        said += changes(place, stored, exported[upstream], new)
        hashes.setdefault(pins[upstream].stated, {})[upstream] = hashes_of(
            pins[upstream], exported[upstream]
        )
    for stated, of in hashes.items():
        new[stated] = pins_module.with_files(of, paths.REPO / stated).encode()
    every = [c for mine in exported.values() for c in mine]
    evidence, told = reword.carry(paths.REPO, stored, every)
    replace_all(paths.REPO, {**new, **evidence})
    for upstream in held:
        _record(folder / upstream, exported[upstream])
    return said + told


def parsed(items: Sequence[exchange.Exported], upstream: str, place: Path) -> list[Contribution]:
    """Return the contributions that ``items`` are once they are stored in ``place``."""
    return [parse(item.name, upstream, place / f"{item.name}.patch", item.data) for item in items]


def refuse_unfinished(checkout: Path) -> None:
    """Refuse work that is not in a commit: an export would leave it out without a word."""
    for state in ("rebase-merge", "rebase-apply"):
        if (checkout / ".git" / state).exists():
            raise UserError(
                f"expected finished commits in {checkout}, found git stopped at one ({state}); "
                f"the patches after it would be dropped: run `git -C {checkout} status`, which "
                f"says how to go on"
            )
    dirty = git.run(["status", "--porcelain", "--untracked-files=all"], checkout).out.decode()
    if dirty:
        raise UserError(
            f"expected every change in a commit, found {dirty.splitlines()[0][3:]} changed in "
            f"{checkout}; it would be left out: commit it there, or run `git -C {checkout} stash`"
        )


def _refuse_newer(checkout: Path, upstream: str, stored: Sequence[Contribution]) -> None:
    """Refuse to write over patches that have changed since the checkout was made."""
    try:
        recorded = json.loads((checkout / _RECORD).read_text())
    except (OSError, ValueError):
        recorded = None
    now = {c.name: c.sha256 for c in stored if c.upstream == upstream}
    if recorded != now:
        place = paths.patches_of(upstream).relative_to(paths.REPO).as_posix()
        differing = sorted(
            n for n in {*now, *(recorded or {})} if (recorded or {}).get(n) != now.get(n)
        )
        raise UserError(
            f"expected the patches that {checkout} was made from, found {', '.join(differing)} "
            f"changed in {place} since; they would be overwritten: import into another "
            f"folder and carry your commits over with `git fetch` and `git cherry-pick`"
        )


def hashes_of(pin: Pin, contributions: Sequence[Contribution]) -> dict[str, str]:
    touched = sorted(pristine_paths(contributions))
    return {path: sha256((pin.site() / path).read_bytes()) for path in touched}


def changes(
    place: Path,
    stored: Sequence[Contribution],
    exported: Sequence[Contribution],
    new: dict[str, bytes | None],
) -> list[str]:
    """Put patches and series of ``place``, patches/pytorch say, into ``new``, by their paths below
    the repository's root; return a line a patch.
    """
    upstream, shown = place.name, place.relative_to(paths.REPO).as_posix()
    before = {c.name: c.data for c in stored if c.upstream == upstream}
    said = []
    for c in exported:
        old = before.pop(c.name, None)
        verdict = "new" if old is None else "unchanged" if old == c.data else "changed"
        said.append(f"{upstream}/{c.name}: {verdict}")
        new[c.shown] = c.data
    for name in before:
        said.append(f"{upstream}/{name}: removed, as its commit is gone")
        new[f"{shown}/{name}.patch"] = None
    new[f"{shown}/series"] = series_text(place / "series", [c.name for c in exported])
    return said


def series_text(series: Path, names: Sequence[str]) -> bytes:
    """Return the series file's bytes; comments stay as long as the names do."""
    old = series.read_bytes() if series.is_file() else b""
    if [name for _, name in repository.read_series(series)] == list(names):
        return old
    return "".join(f"{name}\n" for name in names).encode()
