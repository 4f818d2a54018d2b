"""The parameters by kind, and the share of each that a rank holds."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from integration.jobs.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Parameters of one name in all layers.

    ``matrices`` is the number of experts in an expert stack, else 1. ``tp`` says along which
    dimension of a matrix tensor parallelism cuts it; an expert stack is cut by ep instead.
    """

    name: str
    matrices: int
    rows: int
    columns: int
    role: Literal["embedding", "head", "layer", "expert"]
    tp: Literal["rows", "columns"] | None = None
    muon: bool = False

    @property
    def numel(self) -> int:
        return self.matrices * self.rows * self.columns


def kinds(job: JobSpec) -> tuple[Kind, ...]:
    """Return every kind, named and shaped as in the built model (``moe.py``)."""
    shape = job.shape
    hidden, wide = shape.hidden, shape.heads * shape.head_dim
    shared = shape.expert_hidden * shape.shared_experts
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

    def layer(name: str, rows: int, columns: int, tp=None, *, muon: bool = True) -> Kind:
        return Kind(
            name=name, matrices=1, rows=rows, columns=columns, role="layer", tp=tp, muon=muon
        )

    def expert(name: str, rows: int, columns: int) -> Kind:
        return Kind(
            name=f"moe.routed_experts.inner_experts.{name}",
            matrices=shape.experts,
            rows=rows,
            columns=columns,
            role="expert",
            muon=True,
        )

    shared_kinds = (
        layer("moe.shared_experts.w1.weight", shared, hidden, "rows"),
        layer("moe.shared_experts.w2.weight", hidden, shared, "columns"),
        layer("moe.shared_experts.w3.weight", shared, hidden, "rows"),
    )
    return (
        Kind(
            name="tok_embeddings.weight",
            matrices=1,
            rows=shape.vocab,
            columns=hidden,
            role="embedding",
            tp="rows",
        ),
        layer("attention.qkv_linear.wqkv.weight", qkv, hidden, "rows"),
        layer("attention.wo.weight", hidden, wide, "columns"),
        expert("w1_EFD", shape.expert_hidden, hidden),
        expert("w2_EDF", hidden, shape.expert_hidden),
        expert("w3_EFD", shape.expert_hidden, hidden),
        layer("moe.router.gate.weight", shape.experts, hidden, muon=False),
        *(shared_kinds if shape.shared_experts else ()),
        layer("attention_norm.weight", hidden, 1, muon=False),
        layer("ffn_norm.weight", hidden, 1, muon=False),
        Kind(name="norm.weight", matrices=1, rows=hidden, columns=1, role="head"),
        Kind(
            name="lm_head.weight",
            matrices=1,
            rows=shape.vocab,
            columns=hidden,
            role="head",
            tp="rows",
        ),
    )


def local_shape(job: JobSpec, kind: Kind, fsdp_index: int = 0) -> tuple[int, ...]:
    """Shape of one parameter of ``kind`` on a rank, padding not counted; norms are of one column.

    FSDP2 cuts dimension 0 as ``torch.chunk`` does: ``ceil(n / degree)`` rows each, the last ranks
    fewer or none. Experts that the ranks outnumber are cut along the first of their own dimensions
    that divides (``fsdp_expert_shard_check``). Member 0 of the axis has the most.
    """
    layout, dim = job.layout, 0
    if kind.role == "expert":
        degree = layout.efsdp(job.ranks)
        shape = [kind.matrices // layout.ep, kind.rows, kind.columns]
        if job.cuts_experts:
            dim = 1 if kind.rows % degree == 0 else 2
    else:
        degree = layout.dp_shard(job.ranks)
        shape = [
            kind.rows // (layout.tp if kind.tp == "rows" else 1),
            kind.columns // (layout.tp if kind.tp == "columns" else 1),
        ]
    most = -(-shape[dim] // degree)
    shape[dim] = max(0, min(most, shape[dim] - fsdp_index * most))
    return tuple(shape)


def local_numel(job: JobSpec, kind: Kind, fsdp_index: int = 0) -> int:
    """Elements of one parameter of ``kind`` on a rank, as ``local_shape`` has them."""
    return prod(local_shape(job, kind, fsdp_index))


def gathered_numel(job: JobSpec, kind: Kind) -> int:
    """Elements of one parameter of ``kind`` once FSDP has gathered it.

    Shards are padded to member 0's (``_fsdp_param.py``, ``padded_sharded_size``): six experts over
    four ranks are gathered as eight.
    """
    expert = kind.role == "expert"
    degree = job.layout.efsdp(job.ranks) if expert else job.layout.dp_shard(job.ranks)
    return degree * local_numel(job, kind)


def layers_of_stage(job: JobSpec, stage: int) -> int:
    """Layers of pipeline stage ``stage``.

    TorchTitan counts the embedding and the head as one layer each and gives what does not divide
    to the first stages (``_generate_llm_fqn_per_model_part``).
    """
    pp, layers = job.layout.pp, job.shape.layers
    if pp == 1:
        return layers
    units = layers + 2
    here = units // pp + (stage < units % pp)
    return here - (stage == 0) - (stage == pp - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank as memory sees it: its pipeline stage and its index on the two FSDP axes."""

    rank: int
    stage: int
    dp_shard: int
    efsdp: int

    @classmethod
    def of(cls, job: JobSpec, rank: int) -> "Place":
        layout = job.layout
        inner = layout.dp_shard(job.ranks) * layout.tp
        return cls(
            rank=rank,
            stage=rank // (inner * layout.dp_replicate),
            dp_shard=rank % inner // layout.tp,
            efsdp=rank % inner // layout.ep,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """``count`` parameters of ``kind`` on a rank, ``numel`` elements each."""

    kind: Kind
    count: int
    numel: int


def counts(job: JobSpec, stage: int) -> dict[str, int]:
    """Return how many parameters of one kind a stage has, by role."""
    layers = layers_of_stage(job, stage)
    return {
        "layer": layers,
        "expert": layers,
        "embedding": int(stage == 0),
        "head": int(stage == job.layout.pp - 1),
    }


def held(job: JobSpec, place: Place) -> list[Held]:
    """Return what a rank holds, without the kinds that its stage does not have."""
    count = counts(job, place.stage)
    return [
        Held(
            kind=kind,
            count=count[kind.role],
            numel=local_numel(job, kind, place.efsdp if kind.role == "expert" else place.dp_shard),
        )
        for kind in kinds(job)
        if count[kind.role]
    ]
