"""What DistMuon plans to exchange, read from its schedule: the same on all ranks."""

import math
from dataclasses import dataclass

from torchtitan.components.optimizer import OptimizersContainer


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonPlan:
    """``buckets`` are exchanged twice, to compute and back; ``mean_bytes`` is what a rank of the
    group receives in both, on average: ranks that compute no matrix get less, others more."""

    buckets: int = 0
    redistributed: tuple[str, ...] = ()
    mean_bytes: float = 0.0


def read(optimizers: OptimizersContainer) -> MuonPlan:
    """Return the plan of the container's DistMuon, or an empty one."""
    buckets, names, mean = 0, [], 0.0
    for optimizer in optimizers.optimizers:
        for plan in getattr(optimizer, "_bucket_plans", ()):
            redistributions = getattr(plan, "redistribution_plans", ())
            if not redistributions:
                continue
            buckets += 1
            names += [item.fqn for item in plan.redistributed_items]
            for one in redistributions:
                moved = sum(
                    math.prod(route.logical_region.shape)
                    for route in one.storage_to_compute_routes
                    if not set(route.source.participants) & set(route.destination.participants)
                )
                mean += 2 * moved * plan.dtype.itemsize / len(one.participants)
    return MuonPlan(buckets=buckets, redistributed=tuple(names), mean_bytes=mean)
