"""What must hold of a dry run, each under a name; a check that fails says one sentence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.optimizer import OptimizersContainer

from integration.dryrun import causes, muon_plan, placements
from integration.dryrun.recorder import Recorder
from integration.jobs.spec import JobSpec

EXPERT = "routed_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """``broken`` is what is wrong; ``why_not`` why it is not asked of this job. Else it holds."""

    name: str
    broken: str = ""
    why_not: str = ""


def of_placements(job: JobSpec, parts: Sequence[nn.Module]) -> list[Check]:
    """Check what can be seen before a step."""
    return [_whole_experts(job, parts), _async_unshard(parts)]


def of_step(
    job: JobSpec,
    parts: Sequence[nn.Module],
    optimizers: OptimizersContainer,
    recorder: Recorder,
) -> list[Check]:
    """Check what a step did."""
    return [_silent_experts(job, optimizers, recorder), _embedding(recorder), _one_rope(parts)]


def _whole_experts(job: JobSpec, parts: Sequence[nn.Module]) -> Check:
    name = "each expert whole on one rank"
    if job.cuts_experts:
        return Check(name=name, why_not=_outnumbered(job))
    for row in placements.rows(parts):
        if EXPERT in row["name"] and row["local_shape"][1:] != row["shape"][1:]:
            broken = (
                f"{row['name']} has {row['local_shape']} on this rank, of experts of "
                f"{row['shape'][1:]}: Muon would have to send them"
            )
            return Check(name=name, broken=broken)
    return Check(name=name)


def _outnumbered(job: JobSpec) -> str:
    ranks = job.layout.efsdp(job.ranks) * job.layout.ep
    return f"{ranks} ranks share {job.shape.experts} experts, so each is cut"


def _async_unshard(parts: Sequence[nn.Module]) -> Check:
    name = "unshard_async_op set on every FSDP group"
    groups = list(_fsdp_groups(parts))
    unset = [g._module_fqn for g in groups if not getattr(g, "unshard_async_op", False)]
    if not unset:
        return Check(name=name)
    first = f"{len(unset)} of {len(groups)} FSDP groups, {unset[0] or 'the root'} first"
    return Check(name=name, broken=f"{first}, do not have unshard_async_op set")


def _fsdp_groups(parts: Sequence[nn.Module]) -> Iterator:
    seen = set()
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    if id(group) not in seen:  # one of several modules together
                        seen.add(id(group))
                        yield group


def _silent_experts(job: JobSpec, optimizers: OptimizersContainer, recorder: Recorder) -> Check:
    name = "no communication for experts in the optimizer"
    if job.cuts_experts and job.optimizer == "muon":
        return Check(name=name, why_not=f"{_outnumbered(job)}, and Muon wants whole matrices")
    plan = muon_plan.read(optimizers)
    experts = [fqn for fqn in plan.redistributed if EXPERT in fqn]
    if experts:
        broken = f"the optimizer sends {len(experts)} expert weights, {experts[0]} first"
        return Check(name=name, broken=broken)
    calls = sum(n for row, n in recorder.calls.items() if row.cause == causes.MUON)
    if calls != 2 * plan.buckets:
        broken = (
            f"the optimizer made {calls} exchanges, and its plan of {plan.buckets} buckets of "
            f"dense weights has {2 * plan.buckets}"
        )
        return Check(name=name, broken=broken)
    return Check(name=name)


def _embedding(recorder: Recorder) -> Check:
    name = "no all-gather of the embedding in backward"
    gathered = sorted(fqn for fqn in recorder.gathered_in_backward if "tok_embeddings" in fqn)
    if not gathered:
        return Check(name=name)
    return Check(
        name=name, broken=f"backward gathers {gathered[0]}, whose gradient needs no weight"
    )


def _one_rope(parts: Sequence[nn.Module]) -> Check:
    name = "RoPE stored once"
    caches = placements.rope_caches(parts)
    if len(caches) == 1:
        return Check(name=name)
    size = sum(cache.untyped_storage().nbytes() for cache in caches)
    broken = f"this rank has {len(caches)} RoPE caches of {size / 2**20:,.0f} MiB together"
    return Check(name=name, broken=broken)
