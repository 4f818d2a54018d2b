"""A training job as plain data: what the config, the planner and the launcher all read.

No torch here. ``trainer_config`` turns a ``JobSpec`` into TorchTitan's ``Trainer.Config``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from integration.ground.errors import UserError
from integration.jobs.shapes import MoEShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism, named as TorchTitan's mesh axes.

    Axes in the order of the ranks, the innermost (neighbouring ranks) last: dense parameters on
    ``pp x dp_replicate x dp_shard x tp``, experts on ``pp x dp_replicate x efsdp x ep``. Both
    cover the same ranks, so ``dp_shard * tp == efsdp * ep``.

    Raises:
        ValueError: a degree is below 1.
    """

    pp: int = 1
    dp_replicate: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"Layout.{name} must be at least 1, got {getattr(self, name)}")

    def dp_shard(self, ranks: int) -> int:
        """FSDP degree of all parameters but the experts."""
        return ranks // (self.pp * self.dp_replicate * self.tp)

    def efsdp(self, ranks: int) -> int:
        """FSDP degree of the experts."""
        return self.dp_shard(ranks) * self.tp // self.ep


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One training job.

    ``ranks`` is what the job is written for, one a GPU; ``sequences`` are those of one
    data-parallel rank in a step, of ``seq_len`` tokens, each a microbatch of its own under
    pipeline parallelism. ``loss_chunks`` parts of a sequence go through the output head one by
    one. ``cpu_offload`` keeps parameters, gradients and optimizer state on the host;
    ``activation_offload`` the inputs of the layers, as far as that contribution is in the set.
    ``cluster`` is the one that it is planned for.

    A job for ``any_ranks`` takes as many as there are: EP 2 where that divides them, and
    ``sequences`` over all ranks, or one on each. ``tokenizer_vocab`` means that the model has the
    vocabulary of whatever tokenizer the user brings.
    """

    name: str
    about: str
    shape: MoEShape
    layout: Layout = field(default_factory=Layout)
    ranks: int
    sequences: int
    seq_len: int
    loss_chunks: int
    optimizer: Literal["muon", "adamw"]
    lr: float
    checkpointing: Literal["full", "selective"] = "full"
    activation_offload: bool = False
    cpu_offload: bool = False
    fp8: bool = False
    cluster: Literal["jupiter", "leonardo", "h200"] = "jupiter"
    steps: int = 1000
    any_ranks: bool = False
    tokenizer_vocab: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "sequences", "seq_len", "loss_chunks", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"JobSpec.{name} must be at least 1, got {getattr(self, name)}")

    def on(self, ranks: int) -> "JobSpec":
        """Return this job on ``ranks`` ranks; the layout is not checked."""
        if not self.any_ranks:
            return replace(self, ranks=ranks)
        return replace(
            self,
            ranks=ranks,
            layout=Layout(ep=2 if ranks % 2 == 0 else 1),
            sequences=-(-self.sequences // ranks),
        )

    def cut(
        self, *, layers: int | None = None, experts: int | None = None, vocab: int | None = None
    ) -> "JobSpec":
        """Return this job with fewer layers, experts or tokens; None keeps a size."""
        return replace(self, shape=self.shape.cut(layers=layers, experts=experts, vocab=vocab))

    @property
    def data_ranks(self) -> int:
        """Ranks that read different data."""
        return self.layout.dp_replicate * self.layout.dp_shard(self.ranks)

    @property
    def tokens(self) -> int:
        """Tokens a step, over all ranks."""
        return self.data_ranks * self.sequences * self.seq_len

    @property
    def loss_rank(self) -> int:
        """The rank that knows the loss and logs it: the first of the last pipeline stage."""
        return self.ranks // self.layout.pp * (self.layout.pp - 1)

    @property
    def cuts_experts(self) -> bool:
        """Whether ranks outnumber the experts, so that none is whole on a rank."""
        return self.layout.efsdp(self.ranks) * self.layout.ep > self.shape.experts

    def check(self) -> None:
        """Refuse a layout that TorchTitan or FSDP2 could not set up.

        Raises:
            UserError: one sentence, with the axis, the numbers and the rule.
        """
        for broken in _broken_rules(self):
            raise UserError(f"{self.name} cannot run: {broken}")


def _broken_rules(job: JobSpec) -> Iterator[str]:
    """Yield what is wrong, the most basic first; later rules assume that earlier ones hold."""
    shape, layout, ranks = job.shape, job.layout, job.ranks
    outer = layout.pp * layout.dp_replicate * layout.tp
    if ranks % outer:
        yield (
            f"pp {layout.pp} x dp_replicate {layout.dp_replicate} x tp {layout.tp} = {outer} "
            f"must divide the {ranks} ranks"
        )
    region = layout.dp_shard(ranks) * layout.tp
    if region % layout.ep:
        yield (
            f"ep {layout.ep} must divide dp_shard {layout.dp_shard(ranks)} x tp {layout.tp} "
            f"= {region} ranks, as expert parallelism takes its ranks from these two axes"
        )
    if shape.experts % layout.ep:
        yield f"ep {layout.ep} must divide the {shape.experts} experts"
    for what, count in (("attention", shape.heads), ("key-value", shape.kv_heads)):
        if count % layout.tp:
            yield f"tp {layout.tp} must divide the {count} {what} heads"
    if job.seq_len % (layout.tp * job.loss_chunks):
        yield (
            f"tp {layout.tp} x {job.loss_chunks} loss chunks must divide the sequence of "
            f"{job.seq_len} tokens"
        )
    if job.seq_len > shape.max_seq_len:
        yield (
            f"the sequence of {job.seq_len} tokens is longer than the RoPE cache of "
            f"{shape.max_seq_len}"
        )
    if shape.layers < layout.pp:
        yield f"pp {layout.pp} needs a layer a stage, and the model has {shape.layers}"
    yield from _unshardable_experts(job)


def _unshardable_experts(job: JobSpec) -> Iterator[str]:
    """Experts that ranks outnumber are cut themselves, each tensor where that divides.

    Replicas are no shards. Source: ``fsdp_expert_shard_check``; without it, TorchTitan cuts the
    second dimension alone, and FSDP2 refuses what does not divide.
    """
    shape, efsdp = job.shape, job.layout.efsdp(job.ranks)
    if job.cuts_experts and shape.expert_hidden % efsdp and shape.hidden % efsdp:
        yield (
            f"efsdp {efsdp} x ep {job.layout.ep} ranks outnumber the {shape.experts} experts, so "
            f"each is split in {efsdp}, which divides neither the expert hidden size "
            f"{shape.expert_hidden} nor the hidden size {shape.hidden}"
        )
