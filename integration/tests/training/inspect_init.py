"""Run under torchrun: initialise a config as TorchTitan does, and record what every rank holds.

``python -m torch.distributed.run … -m integration.tests.training.inspect_init OUT [options]``
writes OUT, a JSON list with one row a parameter.
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger


def main(out: Path, arguments: list[str]) -> None:
    init_logger()
    config = ConfigManager().parse_args(arguments)
    trainer = config.build()  # pyrefly: ignore[missing-attribute]
    rows = [_row(name, p) for name, p in trainer.model_parts[0].named_parameters()]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    trainer.close()
    dist.destroy_process_group()


def _row(name: str, param: torch.Tensor) -> dict:
    """Gather the local tensors of all ranks, by gloo: they may be on the CPU of a GPU job."""
    if not isinstance(param, DTensor):
        raise TypeError(f"{name} is no DTensor: expected every parameter to be distributed")
    local = param.to_local().detach().cpu().float()
    coordinates = param.device_mesh.get_coordinate()
    placed = zip(coordinates or (), param.placements, strict=True)
    # Ranks with equal keys are replicas; ranks with other keys hold other shards.
    key = tuple(c for c, placement in placed if placement != Replicate())
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (key, local))
    shards: dict = {}
    replicas_equal = True
    for other_key, tensor in everyone:
        if other_key in shards:
            replicas_equal &= torch.equal(shards[other_key], tensor)
        shards.setdefault(other_key, tensor)
    filled = [tensor for tensor in shards.values() if tensor.numel()]
    values = torch.cat([tensor.flatten() for tensor in filled]).double()
    return {
        "name": name,
        "placements": str(param.placements),
        "shards": len(filled),
        "shards_differ": all(
            not torch.equal(a, b) for i, a in enumerate(filled) for b in filled[:i]
        ),
        "replicas": len(everyone) // max(1, len(shards)),
        "replicas_equal": replicas_equal,
        "numel": values.numel(),
        "mean": values.mean().item(),
        "std": values.std(correction=0).item() if values.numel() > 1 else math.nan,
        "device": str(param.device),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
