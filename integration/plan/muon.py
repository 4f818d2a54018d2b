"""Muon's part of a step: floating-point work, and how an offloaded update is split."""

from dataclasses import dataclass

from integration.jobs.cluster import Cluster
from integration.jobs.spec import JobSpec
from integration.plan.levers import Levers, uses_muon
from integration.plan.params import Place, held, kinds

GIGA = 1e9
# Newton-Schulz' own memory: measured, 713 MB for nine matrices of 1792 x 6144.
SCRATCH_BYTES = 7.2
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True)
class Split:
    """Bytes a parameter of an update whose weight, gradient and momentum are on the host, in fp32.

    ``host`` counts all reads and writes of host memory, the link's included; ``buffers`` what an
    element of a batch in flight takes on the GPU.
    """

    name: str
    to_device: float
    to_host: float
    host: float
    buffers: float

    def seconds(self, cluster: Cluster, ranks: int = 1) -> float:
        """Return the seconds a parameter of the slowest of link and host memory."""
        link = cluster.host_link
        return (
            max(
                self.to_device / link.to_device_gb_s,
                self.to_host / link.to_host_gb_s,
                self.host / cluster.host.gb_s(ranks),
            )
            / GIGA
        )


# Of ``muon_gpu_newton_schulz``, whose ``_UpdateSplit`` derives the bytes.
SPLITS = (
    Split("momentum_and_weight_on_host", 2.0, 2.0, 28.0, 2.0),
    Split("weight_on_host", 8.0, 6.0, 24.0, 10.0),
    Split("on_device", 12.0, 8.0, 20.0, 14.0),
)


def streams(job: JobSpec, levers: Levers) -> bool:
    """Whether offloaded parameters pass through the GPU to be updated."""
    return job.cpu_offload and uses_muon(job, levers) and levers.muon_gpu_newton_schulz


def split(job: JobSpec, cluster: Cluster, levers: Levers) -> Split | None:
    """Return the quickest split, as the patch finds it by timing; None where nothing streams."""
    if not streams(job, levers):
        return None
    return min(SPLITS, key=lambda each: each.seconds(cluster, job.ranks))


def exchange_bytes(job: JobSpec) -> float:
    """GPU memory that FSDP's shards of matrices pass through on their way to Newton-Schulz.

    Two slots, each the rank's shards of a layer and what it computes of it, in fp32, and three
    shards for weight, gradient and momentum. A rank computes all of a layer's dense matrices where
    there are as many layers as ranks, else one; and its share of experts that ranks outnumber. Two
    ranks of ``slice`` were seen to hold 2.2 GiB, of which this is 1.9.
    """
    layout, found = job.layout, 0.0
    under_muon = [kind for kind in kinds(job) if kind.muon]
    ranks = layout.dp_shard(job.ranks) * layout.tp
    dense = [
        kind.numel // (layout.tp if kind.tp else 1) for kind in under_muon if kind.role == "layer"
    ]
    if ranks > 1:
        computed = sum(dense) if ranks <= job.shape.layers else max(dense)
        found += _exchanged(dense, computed, ranks)
    if job.cuts_experts:
        efsdp = layout.efsdp(job.ranks)
        experts = [kind for kind in under_muon if kind.role == "expert"]
        share = -(-len(experts) * job.shape.experts // layout.ep // efsdp)
        matrix = experts[0].rows * experts[0].columns
        found += _exchanged([kind.numel // layout.ep for kind in experts], share * matrix, efsdp)
    return found


def _exchanged(sizes: list[int], computed: int, ranks: int) -> float:
    return 2 * 4.0 * (sum(sizes) / ranks + computed) + 3 * 4.0 * max(sizes) / ranks


def newton_schulz_flops(rows: int, columns: int) -> float:
    """FLOP of five quintic steps on one matrix, n = min, m = max: ``5 (4 n^2 m + 2 n^3)``.

    A step is ``X X^T`` (2 n^2 m), its square (2 n^3) and the product with ``X`` (2 n^2 m). Source:
    torch.optim.Muon; counts checked with torch's FlopCounter.
    """
    n, m = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4.0 * n * n * m + 2.0 * n**3)


def gram_flops(rows: int, columns: int) -> float:
    """FLOP of the same five steps in Gram form, half of symmetric products: ``6 n^2 m + 14 n^3``.

    ``flex_shard_newton_schulz`` runs two segments, of two and three steps. Each forms ``X X^T``,
    symmetric (n^2 m), and applies its polynomial to ``X`` (2 n^2 m); between these are 14 products
    of n x n matrices, all symmetric (n^3).
    """
    n, m = min(rows, columns), max(rows, columns)
    return 6.0 * n * n * m + 14.0 * n**3


def flops(job: JobSpec, levers: Levers, rank: int) -> float:
    """FLOP of Newton-Schulz on one rank.

    Each matrix has one owner; where FSDP cuts it the owners are spread over the axis. A CPU runs
    the plain iteration.
    """
    on_gpu = not job.cpu_offload or levers.muon_gpu_newton_schulz
    a_matrix = gram_flops if on_gpu and levers.flex_shard_newton_schulz else newton_schulz_flops
    layout, total = job.layout, 0.0
    for mine in held(job, Place.of(job, rank)):
        kind = mine.kind
        if not kind.muon:
            continue
        if kind.role == "expert":
            matrices = mine.count * mine.numel / (kind.rows * kind.columns)
        else:
            matrices = mine.count / (layout.dp_shard(job.ranks) * layout.tp)
        total += matrices * a_matrix(kind.rows, kind.columns)
    return total
