"""Overlays: folders that, first on ``PYTHONPATH``, make Python import the patched packages.

[Note: What an overlay is made of]
site-packages is never written. Below ``<overlay>/torch`` only the folders on the way to a patched
file are real; every other entry of theirs is a symlink into site-packages. A patched file is a
real file, written before the first link is made, so no write can follow a link. ``__pycache__``
of a real folder is not linked: Python would write the patched module's bytecode through the link
over the pristine one's. A package that no patch touches is left out and comes from site-packages.

The folder's name is a fingerprint of everything that went in, so sets stand side by side and an
overlay, once in place, never changes.
"""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.ground import paths, processes
from integration.ground.errors import UserError
from integration.patchset import git, repository
from integration.patchset import pins as pins_module
from integration.patchset.patch import Contribution, pristine_paths
from integration.patchset.pins import Pin, sha256

LAYOUT = 1  # raise when the layout changes, so that older overlays are not taken for new ones
MANIFEST = "overlay.json"
_BUILDING = ".building-"
_FORGOTTEN_S = 60.0  # an unlocked half-made folder older than this has lost its builder


@dataclass(frozen=True, slots=True)
class Overlay:
    """A built overlay. ``path`` is None for the pristine pins, which need none."""

    path: Path | None
    names: tuple[str, ...]
    fingerprint: str

    def pythonpath(self, existing: str = "") -> str:
        """Return ``PYTHONPATH`` with this overlay first, and ``existing`` without other overlays.

        Two overlays never mix: a set that leaves torch pristine must not find another set's torch
        further down the path.
        """
        entries = [entry for entry in existing.split(os.pathsep) if entry]
        kept = [entry for entry in entries if not (Path(entry) / MANIFEST).is_file()]
        return os.pathsep.join([str(self.path), *kept] if self.path else kept)

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return ``base`` (by default what a training inherits) with the overlay switched on."""
        env = dict(processes.environment() if base is None else base)
        env["PYTHONPATH"] = self.pythonpath(env.get("PYTHONPATH", ""))
        if not env["PYTHONPATH"]:
            del env["PYTHONPATH"]
        return env


def build(names: Sequence[str] | None = None) -> Overlay:
    """Build, or find, the overlay of the contributions ``names`` and all that they require.

    Args:
        names: None for the full set, an empty sequence for the pristine pins.

    Raises:
        UserError: an unknown name, an installed version other than the pinned one, a touched
            pristine file that differs from its pin, a patch that does not apply.
    """
    chosen = repository.select(repository.load(), names)
    pins = pins_module.load()
    sites = {upstream: pin.site() for upstream, pin in pins.items()}
    for upstream, pin in pins.items():
        _refuse_unknown(pin, sites[upstream], chosen)
    manifest = _manifest(pins, sites, chosen)
    text = json.dumps(manifest, indent=2, sort_keys=True)
    fingerprint = sha256(text.encode())[:16]
    set_names = tuple(contribution.name for contribution in chosen)
    if not chosen:
        return Overlay(None, (), fingerprint)

    final = paths.cache_dir() / "overlays" / fingerprint
    for path, variable in ((final, " (INTEGRATION_CACHE)"), (paths.REPO, "")):
        _refuse_separator(path, variable)
    if not final.is_dir():
        try:
            _build_at(final, manifest, pins, sites, chosen)
        except OSError as error:
            raise UserError(
                f"expected to write the overlay below {final.parent}, found: {error}; none was "
                f"built: make room or the folder writable, or name another with INTEGRATION_CACHE"
            ) from error
    _refuse_edited(final)
    return Overlay(final, set_names, fingerprint)


def _refuse_separator(path: Path, variable: str) -> None:
    if os.pathsep in str(path):
        raise UserError(
            f"expected a folder that PYTHONPATH can hold, got {path}{variable}: it has a "
            f"{os.pathsep!r}, at which Python splits the path, and would import the pins "
            f"unpatched; no overlay was built: name another folder"
        )


def refuse_other_modules(final: Path) -> None:
    """Refuse an imported module that the overlay patches, where it comes from elsewhere.

    Raises:
        UserError: with the module, and the file that it comes from.
    """
    files = _manifest_of(final)["files"]
    for name, module in list(sys.modules.items()):
        path = name.replace(".", "/")
        for relative in (f"{path}.py", f"{path}/__init__.py"):
            found = getattr(module, "__file__", None)
            if relative in files and found and Path(found) != final / relative:
                raise UserError(
                    f"expected {name} from the overlay {final}, found {found}; the run would train "
                    f"without its patches: take what comes first off PYTHONPATH "
                    f"({os.environ.get('PYTHONPATH', 'not set')})"
                )


def _build_at(
    final: Path,
    manifest: dict[str, object],
    pins: Mapping[str, Pin],
    sites: Mapping[str, Path],
    chosen: Sequence[Contribution],
) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    _clean(final.parent)
    with _building(final.parent, final.name) as folder:
        _fill(folder, pins, sites, chosen)
        manifest["files"] = _hashes(folder, chosen)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        # Another builder of the same set may have been quicker; its overlay is as good.
        try:
            folder.rename(final)
        except OSError:
            if not final.is_dir():
                raise


def _manifest(
    pins: Mapping[str, Pin], sites: Mapping[str, Path], chosen: Sequence[Contribution]
) -> dict[str, object]:
    touched = pristine_paths(chosen)
    return {
        "layout": LAYOUT,
        "contributions": {c.name: c.sha256 for c in chosen},
        "order": [c.name for c in chosen],
        "pins": {
            upstream: {
                "package": pin.package,
                "version": pin.version,
                "commit": pin.commit,
                "site": str(sites[upstream]),
                # Only what this set touches: another patch's new file must not rename it.
                "files": {p: h for p, h in sorted(pin.files.items()) if p in touched},
            }
            for upstream, pin in pins.items()
        },
    }


def _refuse_unknown(pin: Pin, site: Path, chosen: Sequence[Contribution]) -> None:
    """Refuse a touched file whose hash is not pinned, or is not the pinned one."""
    wanted = pristine_paths([c for c in chosen if c.upstream == pin.upstream])
    unpinned = sorted(wanted - set(pin.files))
    if unpinned:
        raise UserError(
            f"expected the sha256 of {unpinned[0]} in {pin.stated}, as a patch touches it, "
            f"found none; nothing would notice a changed file: run `integration patches check`, "
            f"which prints the line to add"
        )
    pins_module.refuse_changed(pin, site, wanted)


def _fill(
    folder: Path,
    pins: Mapping[str, Pin],
    sites: Mapping[str, Path],
    chosen: Sequence[Contribution],
) -> None:
    for upstream, pin in pins.items():
        mine = [c for c in chosen if c.upstream == upstream]
        before = set().union(*(c.paths for c in mine))
        for path in sorted(before):
            source = sites[upstream] / path
            if source.is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, folder / path)
        complaint = git.apply(folder, b"".join(c.data for c in mine))
        if complaint:
            raise UserError(
                f"expected the set {', '.join(c.name for c in mine)} to apply on {pin.package} "
                f"{pin.version}, found: {complaint.splitlines()[0]}; no overlay was built: run "
                f"`integration patches check`"
            )
        if mine:
            _link(folder, sites[upstream], Path(pin.package), before)


def _link(folder: Path, site: Path, below: Path, patched: set[str]) -> None:
    """Link what is not patched of ``below``; go into the folders that hold a patched file."""
    (folder / below).mkdir(parents=True, exist_ok=True)
    with os.scandir(site / below) as entries:
        for entry in entries:
            path = below / entry.name
            if entry.name == "__pycache__" or path.as_posix() in patched:
                continue
            if entry.is_dir() and any(name.startswith(f"{path.as_posix()}/") for name in patched):
                _link(folder, site, path, patched)
            else:
                (folder / path).symlink_to(entry.path)


def _hashes(folder: Path, chosen: Sequence[Contribution]) -> dict[str, str]:
    patched = sorted(set().union(*(c.paths for c in chosen)))
    files = ((path, folder / path) for path in patched)
    return {path: sha256(file.read_bytes()) for path, file in files if file.is_file()}


def _refuse_edited(final: Path) -> None:
    """An overlay is what its name says; measurements of an edited one would be of nothing."""
    try:
        files = _manifest_of(final)["files"]
        edited = [p for p, digest in files.items() if sha256((final / p).read_bytes()) != digest]
    except (OSError, ValueError, KeyError):
        edited = [MANIFEST]
    if edited:
        raise UserError(
            f"expected the overlay as it was built, found {edited[0]} edited since; it no longer "
            f"holds its patches: move your edit to a patch and run `rm -r {final}`"
        )


def _manifest_of(final: Path) -> dict[str, dict[str, str]]:
    return json.loads((final / MANIFEST).read_text())


@contextlib.contextmanager
def _building(parent: Path, fingerprint: str) -> Generator[Path, None, None]:
    """Yield a new folder beside the final one; whatever of it is still there at the end goes.

    The folder is locked while it is filled. The kernel drops the lock when a builder dies, so
    ``_clean`` tells a dead builder's folder from a living one's on any host.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{_BUILDING}{fingerprint}-", dir=parent))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _clean(parent: Path) -> None:
    """Remove the folders of builders that were killed."""
    for folder in parent.glob(f"{_BUILDING}*"):
        with contextlib.suppress(OSError):  # another cleaner was quicker
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between mkdtemp and flock a builder holds no lock yet.
                if time.time() - folder.stat().st_mtime > _FORGOTTEN_S:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
