"""What must hold of a dry run, each under a name; a check that fails says one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.optimizer import OptimizersContainer

from integration.dryrun import built
from integration.dryrun.recorder import Recorder
from integration.jobs.spec import JobSpec
from integration.plan import traffic

EXPERT = "routed_experts"


@dataclass(frozen=True, slots=True)
class Check:
    """``broken`` is what is wrong; ``why_not`` why it is not asked of this job. Else it holds."""

    name: str
    broken: str = ""
    why_not: str = ""


def of_placements(job: JobSpec, parts: Sequence[nn.Module]) -> list[Check]:
    """Check what can be seen before a step."""
    return [
        Check("each expert whole on one rank", _cut_expert(job, parts), _outnumbered(job)),
        Check("unshard_async_op set on every FSDP group", _synchronous(parts)),
    ]


def of_step(
    job: JobSpec,
    parts: Sequence[nn.Module],
    optimizers: OptimizersContainer,
    recorder: Recorder,
) -> list[Check]:
    """Check what a step did."""
    # AdamW needs no whole matrix.
    sent = _outnumbered(job) if job.optimizer == "muon" else ""
    gathered = sorted(fqn for fqn in recorder.gathered_in_backward if "tok_embeddings" in fqn)
    backward = f"backward gathers {gathered[0]}, whose gradient needs no weight" if gathered else ""
    return [
        Check(
            "no communication for experts in the optimizer",
            "" if sent else _sent_experts(optimizers, recorder),
            sent,
        ),
        Check("no all-gather of the embedding in backward", backward),
        Check("RoPE stored once", _several_ropes(parts)),
    ]


def _outnumbered(job: JobSpec) -> str:
    if not job.cuts_experts:
        return ""
    ranks = job.layout.efsdp(job.ranks) * job.layout.ep
    return f"{ranks} ranks share {job.shape.experts} experts, so each is cut"


def _cut_expert(job: JobSpec, parts: Sequence[nn.Module]) -> str:
    for row in () if job.cuts_experts else built.rows(parts):
        if EXPERT in row["name"] and row["local_shape"][1:] != row["shape"][1:]:
            return (
                f"{row['name']} has {row['local_shape']} on this rank, of experts of "
                f"{row['shape'][1:]}: Muon would have to send them"
            )
    return ""


def _synchronous(parts: Sequence[nn.Module]) -> str:
    modules = (module for part in parts for module in part.modules())
    groups = dict.fromkeys(  # several modules together may be one group
        group
        for module in modules
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    )
    unset = [g._module_fqn for g in groups if not getattr(g, "unshard_async_op", False)]
    if not unset:
        return ""
    first = f"{len(unset)} of {len(groups)} FSDP groups, {unset[0] or 'the root'} first"
    return f"{first}, do not have unshard_async_op set"


def _sent_experts(optimizers: OptimizersContainer, recorder: Recorder) -> str:
    plan = built.muon_plan(optimizers)
    experts = [fqn for fqn in plan.redistributed if EXPERT in fqn]
    if experts:
        return f"the optimizer sends {len(experts)} expert weights, {experts[0]} first"
    calls = sum(n for row, n in recorder.calls.items() if row.cause == traffic.MUON)
    if calls != 2 * plan.buckets:
        return (
            f"the optimizer made {calls} exchanges, and its plan of {plan.buckets} buckets of "
            f"dense weights has {2 * plan.buckets}"
        )
    return ""


def _several_ropes(parts: Sequence[nn.Module]) -> str:
    caches = built.rope_caches(parts)
    if len(caches) == 1:
        return ""
    size = sum(cache.untyped_storage().nbytes() for cache in caches)
    return f"this rank has {len(caches)} RoPE caches of {size / 2**20:,.0f} MiB together"
