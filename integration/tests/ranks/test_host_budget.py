"""Whether a job fits, and who has less: numbers alone, no process and no torch."""

from integration.ranks.host_budget import (
    Need,
    Report,
    free_a_rank,
    low_nodes,
    refusal,
)
from integration.ranks.host_memory import Bound, HostMemory

GIB = 2**30


def report(rank: int, node: str, free: float, need: float = 0, *bounds: Bound) -> Report:
    kernel = Bound(node, "the kernel (MemAvailable)", int(free * GIB))
    held = {"Hugetlb": 3 * GIB, "Shmem": 5 * GIB, "Percpu": 0}
    return Report(
        rank,
        HostMemory(node, (kernel, *bounds), held),
        Need((("parameters", int(need * GIB)),), pinned=int(need * GIB)),
    )


def test_ranks_of_a_node_share_what_is_free():
    fits = [report(rank, f"n{rank // 2}", free=10, need=5) for rank in range(4)]
    assert refusal(fits) is None
    assert free_a_rank(fits, 0) == (5 * GIB, "the kernel (MemAvailable)")
    tight = [*fits[:3], report(3, "n1", free=10, need=5.5)]
    assert refusal(tight) == (
        "2 rank(s) of n1 need 10.50 GiB of host memory, and the kernel (MemAvailable) leaves "
        "10.00; a rank takes 5.00 GiB (parameters 5.00; 5.00 pinned); the kernel would kill the "
        "run on 1 node(s): offload less, take more nodes, or raise the job's memory limit"
    )


def test_the_bound_that_lacks_most_is_named():
    job = Bound("n1:job", "cgroup v2 /job", 4 * GIB)
    reports = [report(0, "n0", 7, 8), report(1, "n1", 20, 8, job)]
    sentence = refusal(reports)
    assert sentence is not None
    assert "n1 need 8.00 GiB of host memory, and cgroup v2 /job leaves 4.00" in sentence
    assert "on 2 node(s)" in sentence


def test_ranks_in_cgroups_of_their_own_do_not_share_them():
    own = [
        report(rank, "n0", 100, 5, Bound(f"n0:{rank}", f"cgroup v2 /task_{rank}", 6 * GIB))
        for rank in range(2)
    ]
    assert refusal(own) is None
    assert free_a_rank(own, 1) == (6 * GIB, "cgroup v2 /task_1")


def test_the_least_that_a_rank_saw_counts():
    reports = [report(0, "n0", free=9, need=5), report(1, "n0", free=11, need=5)]
    assert "leaves 9.00" in str(refusal(reports))


def test_nodes_with_much_less_are_named_worst_first_with_what_holds_it():
    reports = [report(rank, f"n{rank}", free=100) for rank in range(20)]
    assert low_nodes(reports) == []
    reports[7] = report(7, "n7", free=79)
    reports[3] = report(3, "n3", free=20)
    reports[4] = report(4, "n4", free=81)  # within the usual spread
    assert low_nodes(reports) == [
        f"{node} has {free} GiB of host memory free, and the median node 100.00; held there "
        "besides processes' own pages: Shmem 5.00, Hugetlb 3.00"
        for node, free in (("n3", "20.00"), ("n7", "79.00"))
    ]


def test_only_the_worst_nodes_are_named():
    reports = [report(rank, f"n{rank}", free=100 if rank > 7 else rank) for rank in range(20)]
    sentences = low_nodes(reports)
    assert [s.split()[0] for s in sentences[:5]] == ["n0", "n1", "n2", "n3", "n4"]
    assert sentences[5] == "3 more nodes have less than 80% of the median"
    assert len(sentences) == 6


def test_one_node_has_no_neighbours():
    assert low_nodes([report(rank, "n0", free=1) for rank in range(4)]) == []
