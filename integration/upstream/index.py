"""The one module that reaches the network: package indexes through pip, wheels, and tags.

pip decides what a requirement means here, so that its configuration (mirrors, proxies, and, where
it installs, constraints) holds. A wheel is read where it lies: of the 500 MB of a torch wheel,
the few files that patches touch take a dozen range requests.
"""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from integration.ground.errors import UserError
from integration.patchset import git

_READ_AHEAD = 1 << 20  # bytes a request; sources lie side by side in a wheel
_SECONDS = 60.0


def wheel_url(requirement: str) -> str:
    """Return the URL of the wheel that pip would install for ``requirement``, without it.

    Nothing is installed, so constraints, which are about that, do not count.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        line = ["install", "--dry-run", "--ignore-installed", "--no-deps"]
        line += ["--only-binary", ":all:", "--report", report.name, requirement]
        _pip(line, f"expected a wheel of {requirement}", PIP_CONSTRAINT=os.devnull)
        found = json.load(report)
    return found["install"][0]["download_info"]["url"]


def open_wheel(url: str) -> zipfile.ZipFile:
    """Open the wheel at ``url`` (``https:`` or ``file:``) to read single files."""
    try:
        return zipfile.ZipFile(_open(url))
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(
            f"expected a wheel at {url}, found: {error}; nothing was compared: look at the network "
            f"and the index that pip uses (`pip config list`), and repeat"
        ) from None


def install(python: Path, requirements: Sequence[str]) -> None:
    """Install ``requirements`` into the environment of ``python``, which needs no pip itself."""
    line = ["--python", str(python), "install", *requirements]
    wheels = re.sub(r" @ \S+/", " @ ", " ".join(requirements))  # their names, not their URLs
    _pip(line, f"expected to install {wheels}")


def commit_of(repository: str, tag: str) -> str | None:
    """Return the commit that ``tag`` of a remote repository names; None where it cannot be told."""
    # The peeled line of an annotated tag comes after the tag's own.
    line = ["ls-remote", "--tags", repository, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}"]
    answer = git.attempt(line, Path.cwd())
    lines = [] if answer.code else answer.text.splitlines()
    return lines[-1].split()[0] if lines else None


def _pip(arguments: Sequence[str], expected: str, **environment: str) -> None:
    line = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    env = {**os.environ, **environment}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise UserError(
            f"{expected}, pip said: {_why(done)}; nothing was changed: name another version, or "
            f"see `pip config list` for the index and the constraints"
        )


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """Return pip's reason: a conflict's causes, which are on standard output, or its errors."""
    _, _, causes = done.stdout.partition("The conflict is caused by:\n")
    told = [s.strip() for s in causes.partition("\n\n")[0].splitlines()]
    if not told:
        lines = (s.strip() for s in done.stderr.splitlines())
        lines = (s for s in lines if s and not s.startswith(("WARNING:", "[notice]")))
        told = [s.removeprefix("ERROR: ") for s in lines]
    return re.sub(r" \(from \w+://[^)]*\)", "", "; ".join(told))[:400]


def _open(url: str) -> IO[bytes]:
    with _request(url, 0, 0) as answer:
        status, length = answer.status, answer.headers.get("Content-Range", "")
    if status != 206:  # no ranges here (a file, or a plain server): take it whole
        whole = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the wheel
        with _request(url) as body:
            while block := body.read(_READ_AHEAD):
                whole.write(block)
        whole.seek(0)
        return whole
    return io.BufferedReader(_Remote(url, int(length.rpartition("/")[2])), _READ_AHEAD)


def _request(url: str, first: int | None = None, last: int | None = None) -> Any:
    request = urllib.request.Request(url)
    if first is not None and not url.startswith("file:"):
        request.add_header("Range", f"bytes={first}-{last}")
    return urllib.request.urlopen(request, timeout=_SECONDS)


class _Remote(io.RawIOBase):
    """A file on a server, read by ranges."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._at = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        last = min(self._at + len(buffer), self._size) - 1
        if last < self._at:
            return 0
        with _request(self._url, self._at, last) as answer:
            data = answer.read()
        if len(data) != last + 1 - self._at:
            raise OSError(f"{last + 1 - self._at} bytes asked, {len(data)} came")
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
