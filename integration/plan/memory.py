"""Memory of one rank, by item, in bytes: on the GPU at the worst moment of a step, on the host."""

from dataclasses import dataclass

from integration.ground.units import GIB
from integration.jobs.cluster import Cluster
from integration.jobs.spec import JobSpec
from integration.plan import activations, host, muon
from integration.plan.activations import BF16, FP32
from integration.plan.host import OnHost, Rounding, Shard
from integration.plan.levers import Levers, uses_muon
from integration.plan.params import (
    Held,
    Kind,
    Place,
    counts,
    gathered_numel,
    held,
    kinds,
    layers_of_stage,
)

# Optimizer state of a parameter: one fp32 momentum, or AdamW's two moments.
MUON_STATE, ADAMW_STATE = FP32, 2 * FP32
# A layer's weights are gathered while those of the layer before it are in use.
LAYERS_GATHERED = 2
# Parts of a logit: the bf16 product and its gradient, fp32 copy and log-probabilities.
LOGIT_BYTES = 2 * BF16 + 2 * FP32
MUON_BUFFERS = "Muon's buffers"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Items in bytes. ``moments`` has the GPU's at each moment that may be the worst."""

    rank: int
    moments: dict[str, dict[str, float]]
    host: dict[str, float]

    @property
    def moment(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def hbm(self) -> dict[str, float]:
        """Items at the worst moment."""
        return self.moments[self.moment]

    @property
    def hbm_total(self) -> float:
        return sum(self.hbm.values())

    @property
    def host_total(self) -> float:
        return sum(self.host.values())


def of_rank(job: JobSpec, cluster: Cluster, levers: Levers, rank: int) -> RankMemory:
    """Return the memory of ``rank``."""
    place = Place.of(job, rank)
    mine = held(job, place)
    state = sharded_state(job, levers, mine)
    always = {
        **({} if job.cpu_offload else state),
        "boundary activations": _boundaries_on_gpu(job, levers, place.stage),
        **_muon_buffers(job, cluster, levers, rank),
        "RoPE caches": rope_bytes(job, levers, place.stage),
        "NCCL": groups(job) * cluster.nccl_gib_a_group * GIB,
        "CUDA context": cluster.gpu.context_gib * GIB,
    }
    moments = {
        name: {k: float(v) for k, v in {**always, **items}.items()}
        for name, items in _moments(job, levers, rank).items()
    }
    return RankMemory(
        rank=rank,
        moments=moments,
        host=_host(job, cluster, levers, place.stage, mine),
    )


def worst(job: JobSpec, cluster: Cluster, levers: Levers) -> RankMemory:
    """Return the memory of the rank nearest to a limit, or furthest beyond: of GPU or host.

    It is the first of some pipeline stage: member 0 of the FSDP axes has the largest shards
    (``torch.chunk``).
    """
    a_stage = job.ranks // job.layout.pp
    ranks = [of_rank(job, cluster, levers, stage * a_stage) for stage in range(job.layout.pp)]
    return max(
        ranks,
        key=lambda memory: max(
            memory.hbm_total / cluster.gpu.hbm_gib, memory.host_total / cluster.host.memory_gib
        ),
    )


def offloads(job: JobSpec, levers: Levers) -> bool:
    """Whether layer inputs go to the host."""
    return job.activation_offload and levers.activation_offload and job.checkpointing == "full"


def layer_gathered(job: JobSpec) -> int:
    """Elements of one layer once gathered: dense parameters, and ``experts / ep`` whole experts."""
    return sum(gathered_numel(job, k) for k in kinds(job) if k.role in ("layer", "expert"))


def head_gathered(job: JobSpec) -> int:
    return sum(gathered_numel(job, kind) for kind in kinds(job) if kind.role == "head")


def rope_bytes(job: JobSpec, levers: Levers, stage: int) -> int:
    """``seq_len`` x (cos and sin of ``head_dim``) in fp32, for each layer or for all of a stage
    together (models/common/rope.py, ``CosSinRoPE``, whose ``max_seq_len`` the trainer sets to the
    sequence's)."""
    one = job.seq_len * 2 * job.shape.head_dim * FP32
    return one * (1 if levers.shared_rope_cache else layers_of_stage(job, stage))


def boundaries(job: JobSpec, stage: int) -> int:
    """Layer inputs that a stage keeps: one a layer and a microbatch in flight."""
    return layers_of_stage(job, stage) * _in_flight(job, stage)


def _in_flight(job: JobSpec, stage: int) -> int:
    return host.in_flight(activations.microbatches(job), job.layout.pp, stage)


def _offloaded(job: JobSpec, levers: Levers, stage: int) -> int:
    """Layer inputs of a stage that are on the host."""
    if not offloads(job, levers):
        return 0
    layers, size = layers_of_stage(job, stage), activations.boundary_bytes(job)
    return host.offloaded([layers], _in_flight(job, stage), size, most_gib=host.POOL_GIB)


def groups(job: JobSpec) -> int:
    """NCCL communicators of a rank: the world, the loss and one a mesh axis of more than one."""
    layout = job.layout
    degrees = (
        layout.pp,
        layout.dp_replicate,
        layout.tp,
        layout.ep,
        layout.dp_shard(job.ranks),
        layout.efsdp(job.ranks),
    )
    return 2 * (job.ranks > 1) + sum(degree > 1 for degree in degrees)


def shards(job: JobSpec, levers: Levers, mine: list[Held]) -> list[Shard]:
    """Return what a rank holds as its host counts it."""
    whole = job.layout.dp_shard(job.ranks) * job.layout.tp == 1
    under_muon = uses_muon(job, levers)
    return [
        Shard(
            size=FP32 * h.numel,
            states=1 if under_muon and h.kind.muon else 2,
            count=h.count,
            muon=under_muon and h.kind.muon,
            whole=whole or (h.kind.role == "expert" and not job.cuts_experts),
            rows=h.kind.rows,
            columns=h.kind.columns,
        )
        for h in mine
    ]


def on_host(job: JobSpec, levers: Levers, stage: int) -> OnHost:
    """Return what of the job is on the host of a rank of ``stage``."""
    return OnHost(
        model=job.cpu_offload,
        pinned=job.cpu_offload,
        streamed=muon.streams(job, levers),
        boundary=activations.boundary_bytes(job),
        boundaries=_offloaded(job, levers, stage),
    )


def sharded_state(job: JobSpec, levers: Levers, mine: list[Held]) -> dict[str, float]:
    """fp32 parameters, gradients and optimizer state of this rank's shards."""
    muon = uses_muon(job, levers)
    numel = sum(h.count * h.numel for h in mine)
    optimizer = sum(
        h.count * h.numel * (MUON_STATE if muon and h.kind.muon else ADAMW_STATE) for h in mine
    )
    return {
        "parameters": FP32 * numel,
        "gradients": FP32 * numel,
        "optimizer state": float(optimizer),
    }


def _boundaries_on_gpu(job: JobSpec, levers: Levers, stage: int) -> float:
    """All; with offload what stays (the last layer's, and what the pool has no room for), the one
    on its way out or in, and the one in use."""
    count, one = boundaries(job, stage), activations.boundary_bytes(job)
    if offloads(job, levers):
        return float(min(count, count - _offloaded(job, levers, stage) + 2) * one)
    kept = activations.selective_bytes(job) if job.checkpointing == "selective" else 0
    return float(count * (one + kept))


def _moments(job: JobSpec, levers: Levers, rank: int) -> dict[str, dict[str, float]]:
    """What comes and goes within a step, at the moments that may be the worst.

    recomputation: a layer is computed again and its experts' outputs are scored; weights of two
    layers are there, the second one's offloaded shards in fp32 as well, and the layer behind is
    still being reduced. Of two layers, the one that is computed has another either ahead or behind.
    reduction: the layer's bf16 gradients are complete and copied to fp32 to be reduced.
    loss: the head and one chunk of logits, and the gradient of the head.
    optimizer: the largest batch of matrices in Newton-Schulz.
    """
    place = Place.of(job, rank)
    stage, layer = place.stage, layer_gathered(job)
    weights, accumulated = _unsharded(job, levers, stage)
    behind = FP32 * layer if job.shape.layers > LAYERS_GATHERED else 0
    moments: dict[str, dict[str, float]] = {
        "recomputation": {
            "gathered weights and prefetch": weights + _copied_shards(job, place),
            "gradients being reduced": accumulated + behind,
            "recomputation": activations.attention_bytes(job) + activations.mlp_bytes(job),
            "MoE buffers": _moe_bytes(job, levers),
        },
        "reduction": {
            "gathered weights and prefetch": weights,
            "gradients being reduced": accumulated + (FP32 + BF16) * layer,
        },
        "optimizer": _optimizer_moment(job, levers, rank),
    }
    if stage == job.layout.pp - 1:
        head = head_gathered(job)
        chunk = activations.tokens(job) * job.layout.tp // job.loss_chunks
        hidden = activations.tokens(job) * job.shape.hidden
        held_weights = weights if job.layout.pp > 1 else BF16 * head
        moments["loss"] = {
            "gathered weights and prefetch": held_weights,
            "gradients being reduced": accumulated + (BF16 + FP32) * head,
            "logits and loss chunks": LOGIT_BYTES * chunk * (job.shape.vocab // job.layout.tp)
            + (BF16 + FP32) * hidden,
        }
    return moments


def _unsharded(job: JobSpec, levers: Levers, stage: int) -> tuple[float, float]:
    """Return bytes of bf16 weights that stay gathered, and of gradients that wait for more.

    Without pipelining: two layers. FSDP2's flat all-gather output stands behind each of them; in
    the default mode it lives in the copy stream's own pool, which nothing else can use. Under
    pipelining TorchTitan does not reshard after forward, and gradients are reduced after the last
    microbatch: the whole stage is unsharded, its gradients summed in fp32
    (distributed/fsdp.py; torch/distributed/pipelining/stage.py, ``backward_maybe_with_nosync``).
    """
    layer, sharded = layer_gathered(job), job.layout.dp_shard(job.ranks) > 1
    if job.layout.pp > 1:
        count = counts(job, stage)
        stage_gathered = sum(count[kind.role] * gathered_numel(job, kind) for kind in kinds(job))
        waits = activations.microbatches(job) > 1
        return float(BF16 * stage_gathered), float(FP32 * stage_gathered * waits)
    held_twice = sharded and not levers.fsdp_unshard_async_op
    layers = min(LAYERS_GATHERED, job.shape.layers)
    return float(BF16 * layer * layers * (2 if held_twice else 1)), 0.0


def _moe_bytes(job: JobSpec, levers: Levers) -> int:
    return activations.routed_bytes(job, levers) + activations.combine_bytes(job, levers)


def _copied_shards(job: JobSpec, place: Place) -> float:
    """One layer's offloaded shards on their way from the host: FSDP2 casts them on the GPU."""
    if not job.cpu_offload or job.shape.layers < LAYERS_GATHERED:
        return 0.0
    return float(
        FP32 * sum(h.numel for h in held(job, place) if h.kind.role in ("layer", "expert"))
    )


def _optimizer_moment(job: JobSpec, levers: Levers, rank: int) -> dict[str, float]:
    """The scratch of Newton-Schulz; without offloaded parameters its batch is made here, too."""
    if not uses_muon(job, levers) or (job.cpu_offload and not levers.muon_gpu_newton_schulz):
        return {}
    batch = 0 if job.cpu_offload else BF16
    return {"Newton-Schulz": (batch + muon.SCRATCH_BYTES) * _largest_batch(job, levers, rank)}


def _muon_buffers(job: JobSpec, cluster: Cluster, levers: Levers, rank: int) -> dict[str, float]:
    """The buffers through which offloaded parameters pass: made once, at the first step."""
    split = muon.split(job, cluster, levers)
    if split is None:
        return {}
    batches = host.SLOTS * split.buffers * _largest_batch(job, levers, rank)
    return {MUON_BUFFERS: batches + muon.exchange_bytes(job)}


def _largest_batch(job: JobSpec, levers: Levers, rank: int) -> int:
    mine = shards(job, levers, held(job, Place.of(job, rank)))
    return host.largest_batch(mine, streamed=muon.streams(job, levers))


def _host(
    job: JobSpec, cluster: Cluster, levers: Levers, stage: int, mine: list[Held]
) -> dict[str, float]:
    items = on_host(job, levers, stage).items(shards(job, levers, mine))
    rounding = Rounding()
    return {
        "process": cluster.host.base_gib * GIB,
        **{item.label: float(item.held(rounding)) for item in items},
    }


def gathered_bytes(job: JobSpec, kind: Kind) -> int:
    """One parameter of ``kind`` as FSDP gathers it, in bf16."""
    return BF16 * gathered_numel(job, kind)
