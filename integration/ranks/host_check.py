"""Asks, before a parallelised model gets its weights, whether host memory suffices."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from integration.ground.units import gib
from integration.plan import host
from integration.plan.host import OnHost, Rounding, Shard
from integration.ranks import contributed, host_memory
from integration.ranks.host_budget import (
    HostMemoryError,
    Need,
    Report,
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
    name = "pipelining_fn" if pipeline else "parallelize_fn"
    build = getattr(spec, name)
    if build is None:  # the trainer says so
        return spec

    def build_and_check(*args, **kwargs):
        built = build(*args, **kwargs)  # the model, or a schedule, its stages and two flags
        check(built[1] if pipeline else [built])
        return built

    changed: dict[str, Any] = {name: build_and_check}
    return replace(spec, **changed)


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
    rank = dist.get_rank() if group is not None else 0
    ranks = dist.get_world_size(group) if group is not None else 1
    gpu = device_type != "cpu"
    kept = on_host(parts, config, gpu=gpu, stage=stage(config, rank, ranks))
    need = Need.of(kept.items(shards(parts, config)), Rounding.of(os.environ))
    mine = Report(rank, host_memory.read(), need)
    reports = [mine]
    if group is not None:
        reports = [mine] * ranks
        dist.all_gather_object(reports, mine, group=group)
    if rank == 0:
        free, name = free_a_rank(reports, 0)
        logger.info(f"Host memory: {gib(free)} GiB free a rank by {name}; the job takes {need}")
        for sentence in low_nodes(reports):
            logger.warning(sentence)
    if (sentence := refusal(reports)) is not None:
        raise HostMemoryError(sentence)


def stage(config: Trainer.Config, rank: int, ranks: int) -> int:
    """Return the pipeline stage of ``rank``: the outermost axis of the mesh."""
    return rank * config.parallelism.pipeline_parallel_degree // ranks


def on_host(parts: Sequence[nn.Module], config: Trainer.Config, *, gpu: bool, stage: int) -> OnHost:
    """Return what ``config`` keeps on the host of a rank that has a GPU or, else, trains there."""
    mode = getattr(config.checkpoint, "async_mode", "disabled")
    offloaded = config.training.enable_cpu_offload and gpu
    streams = contributed.find("torchtitan.distributed.flex_shard._muon_host_offload", "_like")
    size = boundary_bytes(config)
    return OnHost(
        model=offloaded or not gpu,
        pinned=offloaded,
        streamed=offloaded and streams is not None,
        staging=config.checkpoint.enable and mode != "disabled",
        pinned_staging=mode == "async_with_pinned_mem",
        boundary=size,
        boundaries=_boundaries(parts, config, size, stage) if gpu else 0,
    )


def boundary_bytes(config: Trainer.Config) -> int:
    """Return the bytes of one layer's input: tokens x hidden numbers, as wide as FSDP computes in.

    A microbatch is the whole batch, but in a pipeline.
    """
    parallelism, training = config.parallelism, config.training
    pipeline = parallelism.pipeline_parallel_degree > 1
    sequences = (
        parallelism.pipeline_parallel_microbatch_size if pipeline else training.local_batch_size
    )
    tokens = sequences * training.seq_len // parallelism.context_parallel_degree
    if parallelism.enable_sequence_parallel:
        tokens //= parallelism.tensor_parallel_degree
    model = config.model_spec.model if config.model_spec else None
    return (
        tokens * getattr(model, "dim", 0) * TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
    )


def _boundaries(parts: Sequence[nn.Module], config: Trainer.Config, size: int, stage: int) -> int:
    """Return how many layers' inputs ``activation_offload`` keeps on the host at once."""
    policy, parallelism = config.activation_checkpoint, config.parallelism
    if not hasattr(policy, "max_host_gib"):  # another policy: nothing goes to the host
        return 0
    microbatches = 1
    if parallelism.pipeline_parallel_degree > 1:
        microbatches = (
            config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
        )
    return host.offloaded(
        [len(cast(nn.ModuleDict, getattr(part, "layers", {}))) for part in parts],
        host.in_flight(microbatches, parallelism.pipeline_parallel_degree, stage),
        size,
        most_gib=policy.max_host_gib,
        fraction=getattr(policy, "fraction", 1.0),
    )


def shards(parts: Sequence[nn.Module], config: Trainer.Config) -> list[Shard]:
    """Return each parameter's shard on this rank, with what its optimizer adds."""
    groups = [
        (re.compile(group.pattern), "Muon" in group.optimizer_name)
        for group in config.optimizer.param_groups
    ]
    found = []
    for part in parts:
        for name, parameter in part.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            plain = _WRAPPERS.sub("", name)
            muon = next((muon for pattern, muon in groups if pattern.search(plain)), False)
            rows, columns = (1, 1, *parameter.shape)[-2:]
            found.append(
                Shard(
                    size=local.numel() * local.element_size(),
                    states=1 if muon else 2,
                    muon=muon,
                    whole=local.shape[-2:] == parameter.shape[-2:],
                    rows=rows,
                    columns=columns,
                )
            )
    return found
