"""Asks, before a parallelised model gets its weights, whether host memory suffices."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from integration.ground.units import GIB, gib
from integration.ranks import host_memory
from integration.ranks.host_budget import (
    HostMemoryError,
    Need,
    Offload,
    Report,
    Rounding,
    Shard,
    free_a_rank,
    low_nodes,
    refusal,
)

# Wrappers' parts of a parameter's name, which an optimizer's patterns do not see.
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")


def checked(
    spec: ModelSpec, *, pipeline: bool, check: Callable[[list[nn.Module]], None]
) -> ModelSpec:
    """Return ``spec`` with ``check`` called on the parallelised model, still on the meta device.

    The trainer gives the model its memory right after. That is the last moment at which nothing
    large is allocated, and the first at which a rank's shards are known exactly.
    """
    if pipeline:
        pipelining = spec.pipelining_fn
        if pipelining is None:  # the trainer says so
            return spec

        def split(*args, **kwargs):
            schedule, parts, first, last = pipelining(*args, **kwargs)
            check(parts)
            return schedule, parts, first, last

        return replace(spec, pipelining_fn=split)

    def parallelize(*args, **kwargs):
        model = spec.parallelize_fn(*args, **kwargs)
        check([model])
        return model

    return replace(spec, parallelize_fn=parallelize)


def check_host_memory(
    parts: Sequence[nn.Module], config: Trainer.Config, group: dist.ProcessGroup | None
) -> None:
    """Say what is free and what the job takes; warn of nodes that have less than the others.

    Args:
        parts: this rank's model, or its stages.
        group: all ranks, on the CPU. None: this process alone.

    Raises:
        HostMemoryError: it cannot fit. On all ranks, with the same words.
    """
    items = offload(parts, config).items(shards(parts, config))
    need = Need.of(items, Rounding.of(os.environ))
    rank = dist.get_rank() if group is not None else 0
    mine = Report(rank, host_memory.read(), need)
    reports = [mine]
    if group is not None:
        reports = [mine] * dist.get_world_size(group)
        dist.all_gather_object(reports, mine, group=group)
    if rank == 0:
        free, name = free_a_rank(reports, 0)
        logger.info(f"Host memory: {gib(free)} GiB free a rank by {name}; the job takes {need}")
        for sentence in low_nodes(reports):
            logger.warning(sentence)
    if (sentence := refusal(reports)) is not None:
        raise HostMemoryError(sentence)


def offload(parts: Sequence[nn.Module], config: Trainer.Config) -> Offload:
    """Return what ``config`` keeps on the host."""
    mode = getattr(config.checkpoint, "async_mode", "disabled")
    cpu_offload = config.training.enable_cpu_offload
    return Offload(
        model=cpu_offload or device_type == "cpu",
        pinned=cpu_offload and device_type != "cpu",
        staging=config.checkpoint.enable and mode != "disabled",
        pinned_staging=mode == "async_with_pinned_mem",
        pool=activation_pool(parts, config) if device_type != "cpu" else (),
    )


def activation_pool(parts: Sequence[nn.Module], config: Trainer.Config) -> tuple[int, ...]:
    """Return bytes of each buffer for offloaded inputs of layers, by ``activation_offload``.

    One buffer a layer of tokens x hidden numbers, as wide as FSDP2 computes in; in a pipeline, one
    for each microbatch in flight, of which there are at most as many as stages.
    """
    policy = config.activation_checkpoint
    if not hasattr(policy, "max_host_gib"):  # another policy: nothing goes to the host
        return ()
    parallelism, training = config.parallelism, config.training
    pipeline = parallelism.pipeline_parallel_degree
    sequences = (
        parallelism.pipeline_parallel_microbatch_size if pipeline > 1 else training.local_batch_size
    )
    tokens = sequences * training.seq_len // parallelism.context_parallel_degree
    if parallelism.enable_sequence_parallel:
        tokens //= parallelism.tensor_parallel_degree
    model = config.model_spec.model if config.model_spec else None
    width = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
    block = tokens * getattr(model, "dim", 0) * width
    layers = sum(len(cast(nn.ModuleDict, getattr(part, "layers", {}))) for part in parts)
    blocks = round(layers * pipeline * getattr(policy, "fraction", 1.0))
    most = policy.max_host_gib
    if most is not None and block:
        blocks = min(blocks, int(most * GIB) // block)
    return (block,) * blocks


def shards(parts: Sequence[nn.Module], config: Trainer.Config) -> list[Shard]:
    """Return each parameter's shard on this rank, with what its optimizer adds."""
    groups = [
        (re.compile(group.pattern), 1 if "Muon" in group.optimizer_name else 2)
        for group in config.optimizer.param_groups
    ]
    found = []
    for part in parts:
        for name, parameter in part.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            plain = _WRAPPERS.sub("", name)
            states = next((count for pattern, count in groups if pattern.search(plain)), 2)
            found.append(Shard(local.numel() * local.element_size(), states))
    return found
