"""The pinned upstreams: which versions, and the sha256 of every pristine file a patch touches."""

import hashlib
import importlib.metadata
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from integration.ground import paths
from integration.ground.errors import UserError, nearest

_KEYS = ("package", "version", "repository", "tag", "commit")


def sha256(data: bytes) -> str:
    """Return the hexadecimal sha256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class Pin:
    """One upstream at one version.

    ``package`` is both the distribution's name on PyPI and the folder it installs. ``files`` maps
    a path below site-packages (``torch/nn/init.py``) to the pristine file's sha256; ``stated`` is
    the file that says so, below the repository's root.
    """

    upstream: str
    package: str
    version: str
    repository: str
    tag: str
    commit: str
    files: Mapping[str, str] = field(default_factory=dict)
    stated: str = "patches/pins.toml"

    def __post_init__(self) -> None:
        for key in _KEYS:
            value = getattr(self, key)
            if not isinstance(value, str) or not value:
                raise ValueError(f"Pin.{key} must be a non-empty string, got {value!r}")
        for path, digest in self.files.items():
            if not path.startswith(f"{self.package}/"):
                raise ValueError(f"Pin.files must lie below {self.package}/, got {path!r}")
            if not isinstance(digest, str) or len(digest) != 64:
                raise ValueError(f"Pin.files[{path!r}] must be a sha256, got {digest!r}")

    def site(self) -> Path:
        """Return the site-packages folder that holds the pinned version, or refuse.

        The distribution's metadata is asked, not the import system: an overlay on ``PYTHONPATH``
        has the package but not its metadata, so this finds the pristine files all the same.
        """
        command = f"{sys.executable} -m pip install {self.package}=={self.version}"
        expected = f"expected {self.package} {self.version} ({self.stated})"
        try:
            distribution = importlib.metadata.distribution(self.package)
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"{expected}, found no {self.package} installed; its patches cannot be applied: "
                f"run `{command}`"
            ) from None
        # A local version ("2.14.1+cpu") is the same source built otherwise; the hashes of the
        # touched files decide whether the patches fit.
        site = Path(str(distribution.locate_file(""))).resolve()
        if distribution.version.split("+")[0] != self.version:
            where, mend = "installed", f"run `{command}`"
            if _on_pythonpath(site):  # nothing that is installed would come before it
                where, mend = f"in {site}, first by PYTHONPATH", "take that off PYTHONPATH"
            raise UserError(
                f"{expected}, found {distribution.version} {where}; its patches do not fit "
                f"that version: {mend}"
            )
        if not (site / self.package).is_dir():
            raise UserError(
                f"{expected}, found its metadata in {site} but no folder {self.package} there (an "
                f"editable install?); an overlay needs the published files: run `{command}`"
            )
        return site

    def url(self, change: str) -> str:
        """Return the address of a change of this upstream: a commit's SHA, or its own URL."""
        return change if change.startswith("https://") else f"{self.repository}/commit/{change}"

    def changed(self, files: Mapping[str, bytes]) -> list[tuple[str, str, str]]:
        """Return ``(path, expected, found)`` for each pinned file that is not pristine."""
        found = {p: sha256(files[p]) if p in files else "no such file" for p in self.files}
        return [(p, h, found[p]) for p, h in sorted(self.files.items()) if found[p] != h]


def _on_pythonpath(site: Path) -> bool:
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return any(entry and Path(entry).resolve() == site for entry in entries)


def refuse_changed(pin: Pin, site: Path, touched: Iterable[str]) -> None:
    """Refuse when one of the ``touched`` files is not the pristine one."""
    wanted = set(touched)
    files = {p: (site / p).read_bytes() for p in wanted if (site / p).is_file()}
    changed = [item for item in pin.changed(files) if item[0] in wanted]
    if changed:
        path, expected, found = changed[0]
        more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
        raise UserError(
            f"expected the pristine {path} of {pin.package} {pin.version} (sha256 "
            f"{expected[:12]}), found {found[:12]}{more}; patches would be applied to unknown "
            f"code: run `{reinstall(pin)}`"
        )


def reinstall(pin: Pin) -> str:
    """Return the command that makes the installed files pristine again."""
    return (
        f"{sys.executable} -m pip install --force-reinstall --no-deps {pin.package}=={pin.version}"
    )


def load() -> dict[str, Pin]:
    """Return upstream name to pin, pytorch first: today's, or newer ones where those are in use."""
    folders = dict.fromkeys((paths.PATCHES, paths.patches_dir()))
    return {name: pin for folder in folders for name, pin in _read(folder / "pins.toml").items()}


def _read(path: Path) -> dict[str, Pin]:
    stated = path.relative_to(paths.REPO).as_posix()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"expected the pinned versions in {path}, could not read them ({error}); nothing can "
            f"be applied: restore it with `git checkout {stated}`"
        ) from None
    pins = {}
    for upstream, table in document.items():
        unknown = sorted(set(table) - {*_KEYS, "files"})
        if unknown:
            raise UserError(
                f"expected the keys {', '.join((*_KEYS, 'files'))} under [{upstream}] of {path}, "
                f"found {unknown[0]}{nearest(unknown[0], [*_KEYS, 'files'])}"
            )
        values = {key: table.get(key) for key in _KEYS}
        try:
            files = dict(table.get("files", {}))
            pins[upstream] = Pin(upstream=upstream, **values, files=files, stated=stated)
        except ValueError as error:
            raise UserError(f"{path}: [{upstream}]: {error}") from None
    return pins


def with_files(
    files: Mapping[str, Mapping[str, str]], file: Path, moved: Iterable[Pin] = ()
) -> str:
    """Return the text of the pins ``file`` with ``files[upstream]`` as hashes; comments stay.

    Args:
        file: what it lacks is taken from today's, of the upstreams in ``files`` alone.
        moved: pins at another version than the file's; their ``files`` are not looked at.
    """
    import tomlkit

    today = tomlkit.parse((paths.PATCHES / "pins.toml").read_text(encoding="utf-8"))
    document = tomlkit.parse(file.read_text(encoding="utf-8")) if file.is_file() else today
    for upstream in [u for u in today if document is today and u not in files]:
        del document[upstream]
    for upstream in [u for u in files if u not in document]:
        document[upstream] = today[upstream]
    for pin in moved:
        for key in ("version", "tag", "commit"):
            document[pin.upstream][key] = getattr(pin, key)  # pyrefly: ignore[unsupported-operation]
    for upstream, hashes in files.items():
        table = document[upstream]["files"]  # pyrefly: ignore[bad-index]
        if dict(table) == dict(hashes):  # pyrefly: ignore[no-matching-overload]
            continue
        for path in list(table):  # pyrefly: ignore[bad-argument-type]
            del table[path]  # pyrefly: ignore[unsupported-operation]
        for path in sorted(hashes):
            table[path] = hashes[path]  # pyrefly: ignore[unsupported-operation]
    return tomlkit.dumps(document)
