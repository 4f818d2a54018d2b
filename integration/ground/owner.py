"""One owner at a time for a folder, also on a shared file system.

[Note: How a folder is owned]
``owner.json`` names the owner's host and process. Whoever works in the folder, and every process
started for that, holds a shared ``flock`` on it. To become the owner takes the exclusive one, so
that nobody does while one of them lives; the kernel drops the lock of a dead one. Some shared file
systems have no locks, or only locks of one host. There the owner renews the file's time, and a name
of another host counts while that time is fresh; on the owner's own host its process is looked for.

A job script takes a folder with ``python -m integration.ground.owner FOLDER NAME``; its ranks join.
"""

import fcntl
import json
import os
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from integration.ground.errors import UserError

FILE = "owner.json"
RENEW_SECONDS = 10
STALE_SECONDS = 60


@dataclass(slots=True)
class Owner:
    """A hold on a folder. ``descriptor`` carries the lock, into child processes too."""

    descriptor: int
    renewed: float = 0.0

    def renew(self) -> None:
        """Say that the owner lives, at most every ``RENEW_SECONDS``."""
        if time.monotonic() - self.renewed >= RENEW_SECONDS:
            self.renewed = time.monotonic()
            with suppress(OSError):
                os.utime(self.descriptor)

    def close(self) -> None:
        """Give the folder back."""
        with suppress(OSError):
            os.ftruncate(self.descriptor, 0)
        os.close(self.descriptor)


def take(folder: Path, name: str = "") -> Owner:
    """Become the owner of ``folder``; ``name`` stands for a job, else the owner is this process.

    Raises:
        UserError: another one has it, or its processes have not all ended yet.
    """
    descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        locked = _lock(descriptor, fcntl.LOCK_EX)
        before = _read(descriptor)
        if locked is False or _lives(before, folder, name, locks=locked is True):
            raise UserError(_refusal(before, folder))
        process = {} if name else {"pid": os.getpid(), "started": _started(os.getpid())}
        told = {"name": name, "host": socket.gethostname(), **process}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(told).encode(), 0)
        if _lock(descriptor, fcntl.LOCK_SH) is False:  # another one came between
            raise UserError(_refusal(_read(descriptor), folder))
    except BaseException:
        os.close(descriptor)
        raise
    return Owner(descriptor)


def join(folder: Path) -> Owner | None:
    """Hold ``folder`` together with its owner; None where nobody owns it."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDWR)
    except OSError:
        return None
    _lock(descriptor, fcntl.LOCK_SH)
    return Owner(descriptor)


def _lock(descriptor: int, kind: int) -> bool | None:
    """Return whether the lock was got; None where the file system has none."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _read(descriptor: int) -> dict:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:  # empty: released, or never taken
        return {}
    return found if isinstance(found, dict) else {}


def _lives(owner: dict, folder: Path, name: str, *, locks: bool) -> bool:
    """Tell whether the ``owner`` that is named lives, as far as no lock says so."""
    if not owner or (name and owner.get("name") == name):  # a job that was requeued
        return False
    if owner.get("host") == socket.gethostname() and "pid" in owner:
        return not locks and _started(owner["pid"]) == owner.get("started")
    # By the clock of the file system, which need not be this host's.
    with tempfile.TemporaryFile(dir=folder) as now:
        age = os.fstat(now.fileno()).st_mtime - (folder / FILE).stat().st_mtime
    return age < STALE_SECONDS


def _started(pid: int) -> float | None:
    with suppress(psutil.Error):
        return psutil.Process(pid).create_time()
    return None


def _refusal(owner: dict, folder: Path) -> str:
    pid, host = owner.get("pid"), owner.get("host")
    lives = host == socket.gethostname() and pid and _started(pid) == owner.get("started")
    if pid and host == socket.gethostname() and not lives:
        who = f"ranks on {host} that outlive process {pid}, which started them"
    elif owner:
        who = f"{owner.get('name') or f'process {pid}'} on {host}"
    else:
        who = "a process that has not left its name"
    return (
        f"{folder} is in use by {who}; two at once would overwrite each other's checkpoints, so "
        f"nothing was started: wait until it has ended{f', or end it: kill {pid}' if lives else ''}"
    )


if __name__ == "__main__":
    try:
        take(Path(sys.argv[1]), sys.argv[2])
    except UserError as error:
        sys.exit(f"error: {error}")
