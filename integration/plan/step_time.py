"""Time of one step by roofline: in each phase the slowest resource rules, the others are hidden.

Phases: forward; backward, with recomputation; optimizer. Resources: the GPU (products, attention,
and exchanges of activations, which nothing hides), the links, the host's memory, its cores.
"""

from dataclasses import dataclass

from integration.job.spec import JobSpec
from integration.plan import activations, muon, traffic
from integration.plan.cluster import Cluster
from integration.plan.levers import Levers
from integration.plan.memory import uses_muon
from integration.plan.params import Place, held, layers_of_stage
from integration.plan.topology import axes
from integration.plan.traffic import Flow

TERA, GIGA = 1e12, 1e9
# Bytes of memory traffic a parameter: read weight, gradient and state, write weight and state.
ADAMW_MEMORY = 28
# Read weight, gradient and momentum, write weight and momentum.
MUON_MEMORY = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Seconds that each resource is busy; the phase takes as long as the busiest."""

    name: str
    busy: dict[str, float]

    @property
    def binds(self) -> str:
        return max(self.busy, key=lambda resource: self.busy[resource])

    @property
    def seconds(self) -> float:
        return self.busy[self.binds]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step. ``bubble`` is idle time of the pipeline; rates are of one GPU."""

    phases: tuple[Phase, ...]
    bubble: float
    tokens_per_gpu: float
    model_flops: float
    peak_tflops: float

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases) + self.bubble

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_gpu / self.seconds

    @property
    def mfu(self) -> float:
        """Useful FLOP, recomputation not counted, over what the peak would allow."""
        return self.model_flops / (self.seconds * self.peak_tflops * TERA)

    @property
    def binds(self) -> str:
        """The resource that rules the longest part of the step."""
        ruled: dict[str, float] = {}
        for phase in self.phases:
            ruled[phase.binds] = ruled.get(phase.binds, 0.0) + phase.seconds
        return max(ruled, key=lambda resource: ruled[resource])


def step(job: JobSpec, cluster: Cluster, levers: Levers, flows: list[Flow], rank: int) -> StepTime:
    """Return the time of a step, as ``rank`` sees it."""
    place = Place.of(job, rank)
    forward = _layers_seconds(job, cluster, place.stage)
    head = _head_seconds(job, cluster, place.stage)
    again = forward if job.checkpointing == "full" else _selective_seconds(job, cluster, place)
    phases = (
        _phase(job, cluster, levers, flows, place, "forward", forward + head),
        _phase(job, cluster, levers, flows, place, "backward", 2 * (forward + head) + again),
        Phase(name="optimizer", busy=optimizer_seconds(job, cluster, levers, rank)),
    )
    micro = activations.microbatches(job)
    # 1F1B: pp - 1 of its microbatches' times (arXiv 2104.04473, section 2.2).
    bubble = sum(phase.seconds for phase in phases[:2]) * (job.layout.pp - 1) / micro
    return StepTime(
        phases=phases,
        bubble=bubble,
        tokens_per_gpu=job.tokens / job.ranks,
        model_flops=model_flops(job) / job.ranks,
        peak_tflops=cluster.gpu.peak_tflops,
    )


def layer_flops(job: JobSpec) -> tuple[float, float, float]:
    """Forward FLOP of one layer and token: (experts, other products, attention).

    A product is 2 FLOP a parameter that the token meets. Attention, causal over the whole
    sequence: each of ``q k`` and ``p v`` is ``2 s d`` halved by the mask, ``2 s d`` together, ``d``
    being heads times head size. Packed documents, which attend to themselves alone, cost less.
    """
    shape = job.shape
    experts = 2.0 * shape.top_k * shape.expert_params
    other = 2.0 * (
        shape.attention_params + shape.router_params + shape.shared_experts * shape.expert_params
    )
    return experts, other, 2.0 * job.seq_len * shape.heads * shape.head_dim


def optimizer_seconds(
    job: JobSpec, cluster: Cluster, levers: Levers, rank: int = 0
) -> dict[str, float]:
    """Return what the optimizer keeps busy, in seconds.

    AdamW is bound by memory, 28 B a parameter. Muon is its Newton-Schulz: on the host's cores where
    parameters are offloaded and the set has no ``muon_gpu_newton_schulz`` (TorchTitan refuses that;
    the published run began so); else on the GPU, which offloaded parameters pass by the quickest of
    ``muon.SPLITS``.
    """
    place = Place.of(job, rank)
    mine = held(job, place)
    under_muon = sum(h.count * h.numel for h in mine if uses_muon(job, levers) and h.kind.muon)
    under_adamw = sum(h.count * h.numel for h in mine) - under_muon
    host = cluster.host.memory_gb_s * GIGA
    hbm = cluster.gpu.hbm_gb_s * GIGA
    flops = muon.flops(job, levers, rank) if uses_muon(job, levers) else 0.0
    traffic_bytes = ADAMW_MEMORY * under_adamw + MUON_MEMORY * under_muon
    if not job.cpu_offload:
        return {
            "GPU": flops / (cluster.gpu.matmul_tflops * TERA) + traffic_bytes / hbm,
            cluster.network.name: 0.0,
        }
    split = muon.split(job, cluster, levers)
    if split is None:
        return {
            "host memory": traffic_bytes / host,
            "host cores": flops / (cluster.host.newton_schulz_tflops * TERA),
        }
    link = cluster.host_link
    return {
        "GPU": flops / (cluster.gpu.matmul_tflops * TERA),
        link.name: under_muon
        * max(split.to_device / link.to_device_gb_s, split.to_host / link.to_host_gb_s)
        / GIGA,
        "host memory": (ADAMW_MEMORY * under_adamw + split.host * under_muon) / host,
    }


def _rate(job: JobSpec, cluster: Cluster) -> float:
    fp8 = cluster.gpu.fp8_tflops if job.fp8 else None
    return (fp8 or cluster.gpu.matmul_tflops) * TERA


def _tokens(job: JobSpec) -> int:
    """Tokens that pass one rank's layers in a step; tensor parallelism shares their work."""
    return activations.tokens(job) * activations.microbatches(job)


def _layers_seconds(job: JobSpec, cluster: Cluster, stage: int) -> float:
    experts, other, attention = layer_flops(job)
    a_token = (experts + other) / _rate(job, cluster) + attention / (
        cluster.gpu.attention_tflops * TERA
    )
    return layers_of_stage(job, stage) * _tokens(job) * a_token


def _selective_seconds(job: JobSpec, cluster: Cluster, place: Place) -> float:
    """Recomputed by the pin's selective policy: the experts, and every second other product."""
    experts, other, _ = layer_flops(job)
    flops = layers_of_stage(job, place.stage) * _tokens(job) * (experts + other / 2)
    return flops / _rate(job, cluster)


def _head_seconds(job: JobSpec, cluster: Cluster, stage: int) -> float:
    if stage != job.layout.pp - 1:
        return 0.0
    return _tokens(job) * 2.0 * job.shape.embedding_params / (cluster.gpu.matmul_tflops * TERA)


def model_flops(job: JobSpec) -> float:
    """FLOP of a step over all ranks: forward, and backward with twice as many. Recomputation is not
    counted, attention is, causal over the whole sequence."""
    a_token = job.shape.layers * sum(layer_flops(job)) + 2 * job.shape.embedding_params
    return 3 * job.tokens * a_token


# Share of a cause's traffic that belongs to the forward pass; the rest is backward's.
FORWARD_SHARE = {
    traffic.GATHER_FORWARD: 1.0,
    traffic.EXPERTS: 1 / 3,
    traffic.TENSOR: 1 / 3,
    traffic.PIPELINE: 1 / 2,
}


def _phase(
    job: JobSpec,
    cluster: Cluster,
    levers: Levers,
    flows: list[Flow],
    place: Place,
    name: str,
    compute: float,
) -> Phase:
    mine = [(flow, _share(flow, job, levers, place, forward=name == "forward")) for flow in flows]
    link = cluster.host_link
    rates = {
        traffic.NETWORK: cluster.network.gb_s,
        traffic.NODE: cluster.node.gb_s,
        traffic.TO_DEVICE: link.to_device_gb_s,
        traffic.TO_HOST: link.to_host_gb_s,
    }
    busy = {
        kind: sum(flow.bytes * share for flow, share in mine if flow.link == kind) / (rate * GIGA)
        for kind, rate in rates.items()
    }
    # Nothing hides these: the next product needs their result.
    exposed = {
        kind: sum(
            flow.bytes * share
            for flow, share in mine
            if flow.link == kind and flow.cause in (traffic.EXPERTS, traffic.TENSOR)
        )
        / (rates[kind] * GIGA)
        for kind in (traffic.NETWORK, traffic.NODE)
    }
    collectives = (1 if name == "forward" else 2) * layers_of_stage(job, place.stage)
    return Phase(
        name=name,
        busy={
            "GPU": compute + max(exposed.values()),
            cluster.network.name: busy[traffic.NETWORK] + collectives * _latency(job, cluster),
            cluster.node.name: busy[traffic.NODE],
            link.name: max(busy[traffic.TO_DEVICE], busy[traffic.TO_HOST]),
        },
    )


def _latency(job: JobSpec, cluster: Cluster) -> float:
    """Seconds before a layer's ring collectives deliver: a hop a node, on both FSDP axes."""
    mesh = axes(job, cluster)
    hops = sum(mesh[name].nodes - 1 for name in ("dp_shard", "efsdp"))
    return hops * cluster.network.latency_us * 1e-6


def _share(flow: Flow, job: JobSpec, levers: Levers, place: Place, *, forward: bool) -> float:
    if flow.cause in (traffic.MUON, traffic.OPTIMIZER):
        return 0.0  # the optimizer's own phase
    share = FORWARD_SHARE.get(flow.cause, 0.0)
    if flow.cause == traffic.UNSHARD:
        share = 0.5
    if flow.cause == traffic.OFFLOAD:
        share = 1.0 if flow.link == traffic.TO_HOST else 0.0
    return share if forward else 1.0 - share
