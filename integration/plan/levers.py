"""The contributions that change what the planner counts, each on or off."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace

from integration.jobs.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """One flag a contribution, named as the contribution."""

    shared_rope_cache: bool = True
    fsdp_unshard_async_op: bool = True
    embedding_skip_backward_gather: bool = True
    activation_offload: bool = True
    moe_combine_memory: bool = True
    cpu_grad_norm: bool = True
    flex_shard_muon: bool = True
    muon_gpu_newton_schulz: bool = True
    flex_shard_newton_schulz: bool = True

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]

    @classmethod
    def of(cls, names: Collection[str] | None) -> "Levers":
        """Return the levers of the set of contributions called ``names``; None stands for all."""
        return cls() if names is None else cls(**{name: name in names for name in cls.names()})

    def without(self, *left_out: str) -> "Levers":
        """Return these levers with some off. Contributions that the planner does not count change
        nothing."""
        return replace(self, **{name: False for name in left_out if name in self.names()})

    def off(self) -> Iterable[str]:
        return (name for name in self.names() if not getattr(self, name))


def uses_muon(job: JobSpec, levers: Levers) -> bool:
    return job.optimizer == "muon" and levers.flex_shard_muon
