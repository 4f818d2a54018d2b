"""Memory of the rank by the planner's items, in bytes."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.trainer import Trainer

from integration.dryrun import placements
from integration.plan.host import Rounding
from integration.ranks import host_check


def state(parts: Sequence[nn.Module], optimizers: OptimizersContainer) -> dict[str, int]:
    """Return what stays between steps: parameters, gradients, optimizer state, RoPE caches."""
    parameters = [parameter for _, parameter in placements.named(parts)]
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
        "RoPE caches": _bytes(placements.rope_caches(parts)),
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
