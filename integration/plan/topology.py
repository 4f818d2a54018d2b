"""Where the members of a mesh axis sit: how many share a node, and what their traffic crosses."""

from dataclasses import dataclass

from integration.jobs.cluster import Cluster
from integration.jobs.spec import JobSpec

# Axes with traffic in every layer that nothing hides: they belong inside a node.
CHATTY = ("tp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A mesh axis: ``degree`` ranks, ``stride`` apart, ``local`` of them on one node."""

    name: str
    degree: int
    stride: int
    local: int

    @property
    def nodes(self) -> int:
        return self.degree // self.local

    @property
    def crosses_network(self) -> bool:
        return self.nodes > 1

    def gather(self, full: float) -> tuple[float, float]:
        """Return bytes that one rank receives by (node link, network) in an all-gather.

        ``full`` is the gathered size in bytes. A ring receives ``full * (degree - 1) / degree``
        in all. What is outside the node enters it once and is shared by the network ports of the
        ``local`` members: ``full * (nodes - 1) / nodes / local``. A reduce-scatter sends as much.
        Source: the ring of NCCL; its hierarchical channels use every port of a node.
        """
        network = full * (self.nodes - 1) / self.nodes / self.local
        return full * (self.degree - 1) / self.degree - network, network

    def all_to_all(self, sent: float) -> tuple[float, float]:
        """Return bytes that one rank sends by (node link, network) in a balanced all-to-all.

        ``sent`` counts what it keeps for itself; a ``1 / degree`` share goes to each member.
        """
        return sent * (self.local - 1) / self.degree, sent * (
            self.degree - self.local
        ) / self.degree


def axes(job: JobSpec, cluster: Cluster) -> dict[str, Axis]:
    """Return the mesh axes of ``job`` by name, ranks laid out as TorchTitan's ``ParallelDims``.

    Dense mesh (pp, dp_replicate, dp_shard, tp), sparse mesh (pp, dp_replicate, efsdp, ep), the
    last axis of neighbouring ranks; torchrun fills node after node.
    """
    layout = job.layout
    dp_shard, efsdp = layout.dp_shard(job.ranks), layout.efsdp(job.ranks)
    replica = dp_shard * layout.tp
    placed = {
        "tp": (layout.tp, 1),
        "ep": (layout.ep, 1),
        "dp_shard": (dp_shard, layout.tp),
        "efsdp": (efsdp, layout.ep),
        "dp_replicate": (layout.dp_replicate, replica),
        "pp": (layout.pp, replica * layout.dp_replicate),
    }
    return {
        name: Axis(
            name=name,
            degree=degree,
            stride=stride,
            local=_local(degree, stride, cluster.gpus_a_node),
        )
        for name, (degree, stride) in placed.items()
    }


def _local(degree: int, stride: int, gpus: int) -> int:
    """Members of an axis that share a node. Where some group straddles a border between nodes that
    others do not, the worst group counts: one a node."""
    span = degree * stride
    if span <= gpus:
        return degree if gpus % span == 0 else 1
    local = max(1, gpus // stride)
    return local if gpus % (local * stride) == 0 and degree % local == 0 else 1


def warnings(job: JobSpec, cluster: Cluster) -> list[str]:
    """Say which chatty axis is on the slow link, and what follows."""
    found = []
    ratio = cluster.node.gb_s / cluster.network.gb_s
    for name in CHATTY:
        axis = axes(job, cluster)[name]
        if axis.crosses_network:
            found.append(
                f"{name} {axis.degree} spans {axis.nodes} nodes of {cluster.gpus_a_node}: its "
                f"traffic, in every layer and hidden by nothing, crosses {cluster.network.name}, "
                f"{ratio:.0f} times slower than {cluster.node.name}"
            )
    return found
