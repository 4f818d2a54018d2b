"""The contributions that change what the planner counts, each on or off."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from integration.ground.errors import UserError, nearest
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

    def without(self, *left_out: str) -> "Levers":
        """Return these levers with some off.

        Raises:
            UserError: one is unknown here.
        """
        for name in left_out:
            if name not in self.names():
                raise UserError(
                    f"--without {name} changes nothing here{nearest(name, self.names())}"
                )
        return replace(self, **dict.fromkeys(left_out, False))

    @classmethod
    def none(cls) -> "Levers":
        return cls().without(*cls.names())

    def off(self) -> Iterable[str]:
        return (name for name in self.names() if not getattr(self, name))


def uses_muon(job: JobSpec, levers: Levers) -> bool:
    return job.optimizer == "muon" and levers.flex_shard_muon
