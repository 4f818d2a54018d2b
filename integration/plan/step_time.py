"""Time of one step by roofline: in each phase the slowest resource rules, the others are hidden.

Phases: forward; backward, with recomputation; the gradients' norm; optimizer. Resources: the GPU
(products, attention, what only moves memory, and exchanges of activations, which nothing hides),
the links, the host's memory, its cores. Layers pass through copy in, gather, GPU, reduction and
copy out like a pipeline: what does not rule is hidden but for one layer of it.
"""

from dataclasses import dataclass

from integration.jobs.cluster import Cluster
from integration.jobs.spec import JobSpec
from integration.plan import activations, muon, traffic
from integration.plan.activations import BF16, FP32
from integration.plan.levers import Levers, uses_muon
from integration.plan.memory import layer_gathered
from integration.plan.params import Place, held, layers_of_stage
from integration.plan.topology import axes
from integration.plan.traffic import Flow

TERA, GIGA = 1e12, 1e9
# Bytes of memory traffic a parameter: read weight, gradient and state, write weight and state.
ADAMW_MEMORY = 28
# Read weight, gradient and momentum, write weight and momentum.
MUON_MEMORY = 20
# What kernels that only move memory take, as traffic at the HBM's full rate. Measured: all kernels
# of ``slice`` on H200s but products, attention and NCCL's, at 8,192 and 65,536 tokens, 8 and 16
# experts. In experts' inputs, bf16, one for each expert of a token: forward; backward; and what the
# exchange between expert parallel ranks adds to forward, recomputation and backward each.
MOVES_FORWARD, MOVES_BACKWARD, MOVES_EXCHANGE = 38, 72, 11
# Of a gathered parameter, in bytes: casts, copies into and out of flat buffers, padding.
MOVES_GATHER, MOVES_REDUCE = 6, 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Seconds that each resource is busy; the phase takes as long as the busiest, and ``fill``: one
    layer's time on the others, before the busiest begins and after it ends."""

    name: str
    busy: dict[str, float]
    fill: float = 0.0

    @property
    def binds(self) -> str:
        return max(self.busy, key=lambda resource: self.busy[resource])

    @property
    def seconds(self) -> float:
        return self.busy[self.binds] + self.fill


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
    products, attention = layers_seconds(job, cluster, place.stage)
    layers = products + attention
    head = _head_seconds(job, cluster, place.stage)
    again = layers if job.checkpointing == "full" else _selective_seconds(job, cluster, place)
    moves, moves_back = (
        moves_seconds(job, cluster, place.stage, backward=backward) for backward in (False, True)
    )
    forward = layers + head + moves
    attention_back = attention_backward_seconds(attention, cluster)
    backward = 2 * (products + head) + attention_back + again + moves_back
    phases = (
        _phase(job, cluster, flows, place, "forward", forward),
        _phase(job, cluster, flows, place, "backward", backward),
        Phase(name="gradient norm", busy=norm_seconds(job, cluster, levers, rank)),
        Phase(name="optimizer", busy=optimizer_seconds(job, cluster, levers, rank)),
    )
    micro = activations.microbatches(job)
    # 1F1B: pp - 1 of its microbatches' times (arXiv 2104.04473, section 2.2).
    bubble = sum(phase.seconds for phase in phases[:2]) * (job.layout.pp - 1) / micro
    return StepTime(
        phases=phases,
        bubble=bubble,
        tokens_per_gpu=job.tokens / job.ranks,
        model_flops=token_flops(job) * job.tokens / job.ranks,
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


def norm_seconds(job: JobSpec, cluster: Cluster, levers: Levers, rank: int = 0) -> dict[str, float]:
    """Return what one read of the rank's fp32 gradients keeps busy, in seconds.

    Offloaded gradients are read by the host: by one core without ``cpu_grad_norm``.
    """
    size = FP32 * sum(h.count * h.numel for h in held(job, Place.of(job, rank)))
    if not job.cpu_offload:
        return {"GPU": size / (cluster.gpu.hbm_gb_s * GIGA)}
    if levers.cpu_grad_norm:
        return {"host memory": size / (cluster.host.gb_s(job.ranks) * GIGA)}
    return {"host cores": size / (cluster.host.core_gb_s * GIGA)}


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
    host = cluster.host.gb_s(job.ranks) * GIGA
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


def layers_seconds(job: JobSpec, cluster: Cluster, stage: int) -> tuple[float, float]:
    """Return forward seconds of a stage's layers: (products, attention)."""
    experts, other, attention = layer_flops(job)
    tokens = layers_of_stage(job, stage) * _tokens(job)
    return (
        tokens * (experts + other) / _rate(job, cluster),
        tokens * attention / (cluster.gpu.attention_forward_tflops * TERA),
    )


def attention_backward_seconds(forward: float, cluster: Cluster) -> float:
    """Seconds of attention's backward, which forms ``q k`` again: five products to forward's two
    (arXiv 2307.08691, section 3.1)."""
    gpu = cluster.gpu
    return 2.5 * forward * gpu.attention_forward_tflops / gpu.attention_backward_tflops


def moves_seconds(job: JobSpec, cluster: Cluster, stage: int, *, backward: bool) -> float:
    """Seconds of kernels that only move memory; backward's are those of recomputation as well."""
    exchanged = MOVES_EXCHANGE * (job.layout.ep > 1)
    moves = MOVES_FORWARD + exchanged  # recomputation's too: either policy recomputes the experts
    if backward:
        moves += MOVES_BACKWARD + exchanged
    a_token = moves * BF16 * job.shape.top_k * job.shape.hidden
    a_parameter = MOVES_GATHER + MOVES_REDUCE * backward
    moved = _tokens(job) * a_token + a_parameter * layer_gathered(job)
    return layers_of_stage(job, stage) * moved / (cluster.gpu.hbm_gb_s * GIGA)


def _selective_seconds(job: JobSpec, cluster: Cluster, place: Place) -> float:
    """Recomputed by the pin's selective policy: the experts, and every second other product."""
    experts, other, _ = layer_flops(job)
    flops = layers_of_stage(job, place.stage) * _tokens(job) * (experts + other / 2)
    return flops / _rate(job, cluster)


def _head_seconds(job: JobSpec, cluster: Cluster, stage: int) -> float:
    if stage != job.layout.pp - 1:
        return 0.0
    return _tokens(job) * 2.0 * job.shape.embedding_params / (cluster.gpu.matmul_tflops * TERA)


def token_flops(job: JobSpec) -> float:
    """FLOP of a token: forward, and backward with twice as many. Recomputation is not counted,
    attention is, causal over the whole sequence."""
    return 3 * (job.shape.layers * sum(layer_flops(job)) + 2 * job.shape.embedding_params)


# Share of a cause's traffic that belongs to the forward pass; the rest is backward's.
FORWARD_SHARE = {
    traffic.GATHER_FORWARD: 1.0,
    traffic.EXPERTS: 1 / 3,
    traffic.TENSOR: 1 / 3,
    traffic.PIPELINE: 1 / 2,
    traffic.UNSHARD: 1 / 2,
}


def _phase(
    job: JobSpec, cluster: Cluster, flows: list[Flow], place: Place, name: str, compute: float
) -> Phase:
    """Return a pass over the layers.

    Where the expert and the FSDP axis both span all ranks, as on two GPUs, they share the world's
    communicator, which runs one thing after the other. In backward the exchange of tokens then
    waits for the gather of the next layer, and that for the copies of its offloaded weights, dense
    ones last (seen in traces of two H200s; in forward these are copied first).
    """
    mine = [(flow, _share(flow, forward=name == "forward")) for flow in flows]
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
    layers = layers_of_stage(job, place.stage)
    collectives = (1 if name == "forward" else 2) * layers
    gpu = compute + max(exposed.values())
    if job.cpu_offload and name == "backward" and 1 < job.layout.ep == job.ranks:
        gpu += busy[traffic.TO_DEVICE]
    resources = {
        "GPU": gpu,
        cluster.network.name: busy[traffic.NETWORK] + collectives * _latency(job, cluster),
        cluster.node.name: busy[traffic.NODE],
        link.name: max(busy[traffic.TO_DEVICE], busy[traffic.TO_HOST]),
    }
    # In and out are two stages of the pipeline.
    others = sum(resources.values()) + min(busy[traffic.TO_DEVICE], busy[traffic.TO_HOST])
    hidden = others - max(resources.values())
    return Phase(name=name, busy=resources, fill=hidden / max(1, layers))


def _latency(job: JobSpec, cluster: Cluster) -> float:
    """Seconds before a layer's ring collectives deliver: a hop a node, on both FSDP axes."""
    mesh = axes(job, cluster)
    hops = sum(mesh[name].nodes - 1 for name in ("dp_shard", "efsdp"))
    return hops * cluster.network.latency_us * 1e-6


def _share(flow: Flow, *, forward: bool) -> float:
    if flow.cause in (traffic.MUON, traffic.OPTIMIZER):
        return 0.0  # the optimizer's own phase
    share = FORWARD_SHARE.get(flow.cause, 0.0)
    if flow.cause == traffic.OFFLOAD:
        share = float(flow.link == traffic.TO_HOST)
    return share if forward else 1.0 - share
