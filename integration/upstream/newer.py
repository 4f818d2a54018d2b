"""Another version of an upstream than the pin, as its files: a wheel or a checkout."""

import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from integration.ground.errors import UserError, nearest
from integration.patchset import scratch
from integration.patchset.pins import Pin
from integration.upstream import index
from integration.upstream.checkout import is_source, sources_below


@dataclass(frozen=True)
class Newer:
    """One upstream at another version; ``folder`` is a checkout, ``url`` a wheel."""

    pin: Pin
    shown: str  # a version, or the checkout's path
    folder: Path | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.url is None):
            raise ValueError("Newer wants either folder or url")

    @property
    def label(self) -> str:
        return f"{self.pin.package} {self.shown}"

    @property
    def requirement(self) -> str:
        """Return what pip installs for it."""
        return str(self.folder) if self.url is None else f"{self.pin.package} @ {self.url}"

    @cached_property
    def _wheel(self) -> zipfile.ZipFile:
        return index.open_wheel(self.url or "")

    def read(self, wanted: Iterable[str]) -> dict[str, bytes]:
        """Return the contents of those of ``wanted`` that exist there."""
        if self.folder is not None:
            return scratch.read(self.folder, wanted)
        held = set(self._wheel.namelist())
        return {path: self._wheel.read(path) for path in sorted(wanted) if path in held}

    def sources(self) -> dict[str, bytes]:
        """Return all that a patch can change without a compiler, as ``checkout.sources``."""
        if self.folder is not None:
            return sources_below(self.folder, self.pin.package)
        infos = sorted(self._wheel.infolist(), key=lambda info: info.header_offset)
        names = [info.filename for info in infos if not info.is_dir()]
        mine = [n for n in names if is_source(PurePosixPath(n), self.pin.package)]
        return {name: self._wheel.read(name) for name in mine}


def pristine(pin: Pin, wanted: Iterable[str]) -> scratch.Files:
    """Return those of ``wanted`` as published: installed, or out of the index's wheel."""
    try:
        site = pin.site()
    except UserError:
        return _locate(pin, pin.version).read(wanted)
    return scratch.read(site, wanted)


def parse(values: Sequence[str], pins: Mapping[str, Pin], option: str) -> dict[str, Newer]:
    """Read ``torch==2.15.0``, ``torchtitan==PATH`` and the like: upstream to its other version.

    Raises:
        UserError: an unknown package, one named twice, a folder without it, or no such version.
    """
    known = {pin.package: pin for pin in pins.values()} | dict(pins)
    found: dict[str, Newer] = {}
    for value in values:
        name, _, where = value.partition("==")
        if name not in known or not where:
            meant = re.split(r"[^\w-]", value)[0]  # of torch>=2.15
            packages = [pin.package for pin in pins.values()]
            hint = "; nothing was done: name a version or a path"
            raise UserError(
                f"expected {option} PACKAGE==VERSION or PACKAGE==PATH, got {value!r}"
                f"{hint if meant in known else nearest(meant, packages)}"
            )
        pin = known[name]
        if pin.upstream in found:
            raise UserError(f"expected {option} {name} once, got it twice: leave one out")
        found[pin.upstream] = _locate(pin, where)
    return found


def commits(values: Sequence[str], others: Mapping[str, Newer]) -> dict[str, str]:
    """Read ``torch==SHA``: upstream to the commit of its other version.

    Raises:
        UserError: no whole SHA, or not of one of ``others``.
    """
    pins = {name: o.pin for o in others.values() for name in (o.pin.package, o.pin.upstream)}
    found = {}
    for value in values:
        name, _, sha = value.partition("==")
        if name not in pins or not re.fullmatch("[0-9a-f]{40}", sha):
            pin = pins.get(name) or next(iter(pins.values()))
            raise UserError(
                f"expected --commit {pin.package}==SHA with all 40 digits, got {value!r}; nothing "
                f"was done: see `git ls-remote --tags {pin.repository}`"
            )
        found[pins[name].upstream] = sha
    return found


def _locate(pin: Pin, where: str) -> Newer:
    path = Path(where).expanduser()
    if path.suffix == ".whl" and path.is_file():
        return _wheel(pin, path.absolute().as_uri())
    if path.is_dir() or "/" in where or where.startswith("."):
        if not (path / pin.package).is_dir():
            raise UserError(
                f"expected a checkout of {pin.package} at {path}, found no folder {pin.package}/ "
                f"there; nothing was compared: give the checkout's root, a wheel or a version"
            )
        return Newer(pin, str(path.absolute()), folder=path.absolute())
    return _wheel(pin, index.wheel_url(f"{pin.package}=={where}"))


def _wheel(pin: Pin, url: str) -> Newer:
    # The name of a wheel is part of its format: package-version-tags.whl. A local version
    # ("2.14.1+cpu") is the same source built otherwise.
    version = unquote(url.rpartition("/")[2]).split("-")[1].split("+")[0]
    return Newer(pin, version, url=url)
