"""Host memory that a process may still take: by its cgroups and by the kernel, in bytes.

The machine's total says nothing on a node that a scheduler has divided, or where page tables, huge
pages or a driver hold a part. No torch here.

Sources: ``cgroups(7)``; ``cgroup-v2.rst``, ``cgroup-v1/memory.rst`` and ``filesystems/proc.rst`` of
the kernel's documentation.
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Another folder to read /proc and /sys from: what tests fake.
ROOT_VARIABLE = "INTEGRATION_HOST_ROOT"
# cgroup v1 writes "no limit" as the largest multiple of the page size.
UNLIMITED = 1 << 60

# Where /proc/meminfo's used memory may be, other than in processes' own pages (AnonPages).
SOURCES = (
    "Shmem",
    "Mlocked",
    "PageTables",
    "SecPageTables",
    "SUnreclaim",
    "KernelStack",
    "Percpu",
    "Hugetlb",
)
# Disjoint parts of MemTotal. What is in none of them is a driver's or the firmware's.
_PARTS = (
    "MemFree",
    "Buffers",
    "Cached",  # Shmem among it
    "SwapCached",
    "AnonPages",
    "Slab",
    "KernelStack",
    "PageTables",
    "SecPageTables",
    "Percpu",
    "Hugetlb",
)
UNATTRIBUTED = "in no source"


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound on memory, and what is free within it. Processes with equal ``scope`` share it."""

    scope: str
    name: str  # for people
    free: int  # bytes


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What one process sees."""

    node: str
    bounds: tuple[Bound, ...]  # the kernel's first
    sources: Mapping[str, int]  # bytes by source, of the whole node


def read(root: Path | None = None) -> HostMemory:
    """Read this process's bounds.

    Args:
        root: the folder that ``/proc`` and ``/sys`` are in.
    """
    root = root or Path(os.environ.get(ROOT_VARIABLE) or "/")
    node = socket.gethostname()
    # Containers of one node have host names of their own, and one boot id.
    boot = _text(root / "proc/sys/kernel/random/boot_id").strip() or node
    info = meminfo(_text(root / "proc/meminfo"))
    kernel = Bound(boot, "the kernel (MemAvailable)", info["MemAvailable"])
    bounds = (kernel, *_cgroup_bounds(root, boot))
    return HostMemory(node, bounds, sources(info))


def meminfo(text: str) -> dict[str, int]:
    """Return ``/proc/meminfo`` in bytes; its kB are KiB."""
    found = re.findall(r"^(\S+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(value) * 1024 for name, value in found}


def sources(info: Mapping[str, int]) -> dict[str, int]:
    """Return what holds memory besides processes' own pages, and the rest that nothing names."""
    rest = info["MemTotal"] - sum(info.get(part, 0) for part in _PARTS)
    return {name: info[name] for name in SOURCES if name in info} | {UNATTRIBUTED: max(0, rest)}


def _cgroup_bounds(root: Path, boot: str) -> Iterator[Bound]:
    """Yield a bound for the process's memory cgroup and each of its ancestors that has a limit."""
    for version, mount, below in _memory_cgroups(root):
        for depth in range(len(below.parts), -1, -1):
            part = Path(*below.parts[:depth])
            folder = mount / part
            free = _free_v2(folder) if version == 2 else _free_v1(folder)
            if free is None:
                continue
            status = folder.stat()
            scope = f"{boot}:{status.st_dev}:{status.st_ino}"
            yield Bound(scope, f"cgroup v{version} /{part if depth else ''}", free)


def _memory_cgroups(root: Path) -> Iterator[tuple[int, Path, Path]]:
    """Yield version, mount point and the process's place below it."""
    paths = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mounted, point = (_unescape(field) for field in before.split()[3:5])
        kind, _, options = after.split()[:3]
        if kind == "cgroup2" and 2 in paths:
            version = 2
        elif kind == "cgroup" and "memory" in options.split(",") and 1 in paths:
            version = 1
        else:
            continue
        yield version, root / point.lstrip("/"), _below(paths[version], mounted)


def _below(path: str, mounted: str) -> Path:
    """Return ``path`` relative to the part of the hierarchy that is mounted.

    In a container without a cgroup namespace ``path`` is the host's and ``mounted`` its beginning;
    a path outside of what is mounted leaves the mount point itself.
    """
    try:
        below = Path(path).relative_to(mounted)
    except ValueError:
        return Path()
    return Path() if ".." in below.parts else below


def _free_v2(folder: Path) -> int | None:
    # memory.high does not kill, but above it a process that cannot be reclaimed stands still.
    limits = [_text(folder / name).strip() for name in ("memory.max", "memory.high")]
    numbers = [int(limit) for limit in limits if limit not in ("", "max")]
    if not numbers:
        return None
    used = int(_text(folder / "memory.current"))
    return _free(min(numbers), used, folder, ("inactive_file", "active_file", "slab_reclaimable"))


def _free_v1(folder: Path) -> int | None:
    text = _text(folder / "memory.limit_in_bytes").strip()
    if not text or int(text) >= UNLIMITED:
        return None
    used = int(_text(folder / "memory.usage_in_bytes"))
    return _free(int(text), used, folder, ("total_inactive_file", "total_active_file"))


def _free(limit: int, used: int, folder: Path, reclaimable: tuple[str, ...]) -> int:
    """Page cache counts as used, but goes when its room is needed, as in MemAvailable."""
    stat = re.findall(r"^(\w+) (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    cache = min(used, sum(int(value) for name, value in stat if name in reclaimable))
    return max(0, limit - used + cache)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # a controller that is not on, a file of a newer kernel
        return ""


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
