"""What a rank has built: parameters by kind, memory by the planner's items, Muon's exchanges."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.models.common.rope import RoPE
from torchtitan.trainer import Trainer

from integration.plan.host import Rounding
from integration.ranks import host_check

_WRAPPER = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")
_LAYER = re.compile(r"^layers\.\d+\.")


def named(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters under the names that the unwrapped model gives them."""
    for part in parts:
        for name, parameter in part.named_parameters():
            yield _WRAPPER.sub("", name), parameter


def rows(parts: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return name, count, mesh, placements, global and local shape of each kind of parameter."""
    found: Counter[tuple] = Counter()
    for name, parameter in named(parts):
        found[(_LAYER.sub("layers.*.", name), *_placed(parameter))] += 1
    keys = ("name", "mesh", "placements", "shape", "local_shape")
    return [dict(zip(keys, kind, strict=True)) | {"count": n} for kind, n in found.items()]


def _placed(parameter: torch.Tensor) -> tuple:
    if not isinstance(parameter, DTensor):
        return "", "", tuple(parameter.shape), tuple(parameter.shape)
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    axes = " x ".join(f"{n} {size}" for n, size in zip(names, mesh.shape, strict=True))
    placements = ", ".join(map(str, parameter.placements))
    return axes, placements, tuple(parameter.shape), tuple(parameter.to_local().shape)


def rope_caches(parts: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return the distinct RoPE caches of this rank."""
    caches = {}
    for part in parts:
        for module in part.modules():
            if isinstance(module, RoPE):
                for buffer in module.buffers(recurse=False):
                    caches[buffer.untyped_storage()._cdata] = buffer
    return list(caches.values())


def state(parts: Sequence[nn.Module], optimizers: OptimizersContainer) -> dict[str, int]:
    """Return what stays between steps: parameters, gradients, optimizer state, RoPE caches."""
    parameters = [parameter for _, parameter in named(parts)]
    moments = [
        value
        for optimizer in optimizers.optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer state": _bytes(moments),
        "RoPE caches": _bytes(rope_caches(parts)),
    }


def host(
    parts: Sequence[nn.Module], config: Trainer.Config, rank: int, ranks: int
) -> dict[str, int]:
    """Return what a rank with a GPU takes on its host, as the check at launch counts it."""
    stage = host_check.stage(config, rank, ranks)
    kept = host_check.on_host(parts, config, gpu=True, stage=stage)
    rounding = Rounding()
    items = kept.items(host_check.shards(parts, config))
    return {item.label: item.held(rounding) for item in items}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonPlan:
    """``buckets`` are exchanged twice, to compute and back; ``mean_bytes`` is what a rank of the
    group receives in both, on average: ranks that compute no matrix get less, others more."""

    buckets: int = 0
    redistributed: tuple[str, ...] = ()
    mean_bytes: float = 0.0


def muon_plan(optimizers: OptimizersContainer) -> MuonPlan:
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
