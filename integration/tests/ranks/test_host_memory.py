"""What is free, from made-up /proc and /sys trees in the forms of cgroup v1, v2 and containers."""

from pathlib import Path

import pytest

from integration.ranks import host_memory
from integration.ranks.host_memory import UNATTRIBUTED

GIB = 2**30
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


class Host:
    """A fake root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/sys/kernel/random/boot_id", "b00t")
        self.meminfo(MemTotal=100 * GIB, MemFree=60 * GIB, MemAvailable=80 * GIB)

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text).rstrip("\n") + "\n")

    def meminfo(self, **values: int) -> None:
        lines = [f"{name}:{size // 1024:>14} kB" for name, size in values.items()]
        self.write("proc/meminfo", "\n".join([*lines, "HugePages_Total:       0"]))

    def cgroup(self, line: str, mounts: str) -> None:
        self.write("proc/self/cgroup", line)
        self.write("proc/self/mountinfo", mounts)

    def v2(self, path: str, *, current: int, limit="max", high="max", **stat: int) -> None:
        folder = f"sys/fs/cgroup/{path}"
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.high", high)
        self.write(f"{folder}/memory.current", current)
        self.write(f"{folder}/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))

    def v1(self, path: str, *, limit: int, usage: int, **stat: int) -> None:
        folder = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", usage)
        self.write(f"{folder}/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))

    def free(self) -> dict[str, int]:
        return {bound.name: bound.free for bound in host_memory.read(self.root).bounds}


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


KERNEL = "the kernel (MemAvailable)"


def test_without_a_cgroup_the_kernel_counts_and_not_the_total(host):
    assert host.free() == {KERNEL: 80 * GIB}


def test_v2_every_limited_ancestor_counts(host):
    host.cgroup("0::/slurm/job_7/step_0", V2)
    host.v2("slurm/job_7/step_0", current=5 * GIB)  # no limit of its own
    host.v2("slurm/job_7", current=6 * GIB, limit=32 * GIB)
    host.v2("slurm", current=50 * GIB, limit=64 * GIB)
    assert host.free() == {
        KERNEL: 80 * GIB,
        "cgroup v2 /slurm/job_7": 26 * GIB,
        "cgroup v2 /slurm": 14 * GIB,
    }


def test_v2_page_cache_is_free_and_the_throttle_a_limit(host):
    host.cgroup("0::/job", V2)
    host.v2(
        "job",
        current=30 * GIB,
        limit=64 * GIB,
        high=40 * GIB,
        inactive_file=8 * GIB,
        active_file=GIB,
        slab_reclaimable=GIB,
        anon=20 * GIB,
    )
    assert host.free()["cgroup v2 /job"] == 20 * GIB


def test_v1_every_limited_ancestor_counts(host):
    host.cgroup("4:memory:/slurm/job_7/step_0\n1:name=systemd:/x\n0::/", V1 + V2)
    unlimited = 0x7FFFFFFFFFFFF000
    host.v1("slurm/job_7/step_0", limit=unlimited, usage=GIB)
    host.v1("slurm/job_7", limit=16 * GIB, usage=10 * GIB, total_inactive_file=3 * GIB, cache=GIB)
    host.v1("slurm", limit=20 * GIB, usage=19 * GIB)
    host.v1("", limit=unlimited, usage=70 * GIB)
    assert host.free() == {
        KERNEL: 80 * GIB,
        "cgroup v1 /slurm/job_7": 9 * GIB,
        "cgroup v1 /slurm": GIB,
    }


def test_a_container_sees_its_own_part_of_the_hierarchy(host):
    """Without a cgroup namespace the path is the host's, and only its end is mounted."""
    mounts = V1.replace("0:32 / ", "0:32 /docker/c0ffee ")
    host.cgroup("4:memory:/docker/c0ffee/inner", mounts)
    host.v1("inner", limit=4 * GIB, usage=GIB)
    host.v1("", limit=8 * GIB, usage=2 * GIB)
    assert host.free() == {
        KERNEL: 80 * GIB,
        "cgroup v1 /inner": 3 * GIB,
        "cgroup v1 /": 6 * GIB,
    }


@pytest.mark.parametrize("path", ["/elsewhere", "/../../job"])
def test_a_path_outside_of_the_mount_leaves_the_mount_point(host, path):
    host.cgroup(f"0::{path}", V2.replace("0:26 / ", "0:26 /kube "))
    host.v2("", current=GIB, limit=2 * GIB)
    assert host.free() == {KERNEL: 80 * GIB, "cgroup v2 /": GIB}


def test_a_mount_point_with_a_space_is_found(host):
    host.cgroup("0::/", V2.replace("/sys/fs/cgroup", "/sys/fs/c\\040group"))
    host.write("sys/fs/c group/memory.max", 3 * GIB)
    host.write("sys/fs/c group/memory.current", GIB)
    assert host.free() == {KERNEL: 80 * GIB, "cgroup v2 /": 2 * GIB}


def test_more_used_than_the_limit_is_nothing_free(host):
    host.cgroup("0::/job", V2)
    host.v2("job", current=9 * GIB, limit=8 * GIB)
    assert host.free()["cgroup v2 /job"] == 0


def test_processes_of_one_cgroup_share_its_bound_and_others_do_not(host):
    host.cgroup("0::/a", V2)
    for name in "ab":
        host.v2(name, current=0, limit=GIB)
    first, again = (host_memory.read(host.root) for _ in range(2))
    host.cgroup("0::/b", V2)
    other = host_memory.read(host.root)
    assert [b.scope for b in first.bounds] == [b.scope for b in again.bounds]
    assert first.bounds[0].scope == other.bounds[0].scope  # the kernel's
    assert first.bounds[1].scope != other.bounds[1].scope


def test_what_no_source_names_is_listed(host):
    host.meminfo(
        MemTotal=100 * GIB,
        MemFree=10 * GIB,
        MemAvailable=20 * GIB,
        Buffers=GIB,
        Cached=14 * GIB,
        Shmem=4 * GIB,
        AnonPages=30 * GIB,
        Slab=3 * GIB,
        SUnreclaim=2 * GIB,
        PageTables=2 * GIB,
        Hugetlb=25 * GIB,
    )
    found = host_memory.read(host.root).sources
    assert found["Hugetlb"] == 25 * GIB
    assert found["Shmem"] == 4 * GIB
    assert found[UNATTRIBUTED] == 15 * GIB


def test_this_machine_can_be_read():
    found = host_memory.read(Path("/"))
    assert all(bound.free > 0 for bound in found.bounds)
    assert len({bound.scope for bound in found.bounds}) == len(found.bounds)
