"""TorchTitan's trainer on fake tensors: built as ever, then one step that computes nothing."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from integration.dryrun import overrides
from integration.dryrun.pipeline import describe_stages
from integration.jobs.spec import JobSpec
from integration.ranks.host_check import checked
from integration.ranks.trainer_config import trainer_config

AXES = ("pp", "dp_replicate", "dp_shard", "efsdp", "ep", "tp", "loss")


class DryTrainer(Trainer):
    """Rank ``rank`` of ``job``, on a fake process group of all its ranks.

    [Note: When tensors are fake]
    The model is built and parallelised on the meta device by the real code. Only then do its
    parameters become fake CPU tensors, which have a device that FSDP and the optimizer accept,
    and no memory. The optimizer is built outside the fake mode, as its plan, compared across
    ranks, needs values (``item``); the step runs inside.

    Args:
        parallelised: called with the model's parts when they are sharded, before anything else,
            and with the config.
    """

    def __init__(
        self,
        job: JobSpec,
        rank: int,
        parallelised: Callable[[Sequence[nn.Module], Trainer.Config], None],
    ) -> None:
        self.job = job
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

        def make_fake(parts: Sequence[nn.Module]) -> None:
            parallelised(parts, config)
            with self._fake:
                for part in parts:
                    part.to_empty(device="cpu")

        os.environ |= {"NGPU": str(job.ranks), "RANK": str(rank), "LOCAL_RANK": "0"}
        config = _config(job, make_fake)
        super().__init__(config)
        if self.parallel_dims.pp_enabled:
            describe_stages(self.pp_schedule, job)

    def axes(self) -> dict[str, tuple[int, ...]]:
        """Return this rank's group on each mesh axis of more than one rank."""
        meshes = {name: self.parallel_dims.get_optional_mesh(name) for name in AXES}
        return {name: tuple(mesh.mesh.flatten().tolist()) for name, mesh in meshes.items() if mesh}

    def fake_step(
        self,
        watching: AbstractContextManager[None],
        during: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Run what ``train_step`` runs, without its look at the data and the loss."""
        parallel = self.parallel_dims
        with self._fake, overrides.first_chunks(), watching:
            self.optimizers.zero_grad()
            self._forward_backward()
            with during("gradient norm"):
                clip = dist_utils.clip_grad_norm_
                # Only ``muon_gpu_newton_schulz`` takes it, and leaves the product to the optimizer.
                takes = "clipper" in signature(clip).parameters
                clipper: dict[str, Any] = {"clipper": self.optimizers} if takes else {}
                clip(
                    [p for part in self.model_parts for p in part.parameters()],
                    self.config.training.max_norm,
                    foreach=True,
                    pp_mesh=parallel.get_optional_mesh("pp"),
                    ep_enabled=parallel.ep_enabled,
                    **clipper,
                )
            with during("optimizer"):
                self.optimizers.step()

    def _forward_backward(self) -> None:
        batches = [self._batch() for _ in range(self.num_pipeline_parallel_microbatches)]
        inputs = [batch[0] for batch in batches]
        labels = [batch[1] for batch in batches]
        whole = not self.parallel_dims.pp_enabled
        self.forward_backward_step(
            input_dict=inputs[0] if whole else inputs,
            labels=labels[0] if whole else labels,
            global_valid_tokens=torch.ones((), dtype=torch.int64),
        )

    def _batch(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        sequences = 1 if self.parallel_dims.pp_enabled else self.job.sequences
        tokens = torch.zeros(sequences, self.job.seq_len, dtype=torch.int64)
        positions = torch.arange(self.job.seq_len).repeat(sequences, 1)
        return {"input": tokens, "positions": positions}, torch.zeros_like(tokens)


def _config(job: JobSpec, parallelised: Callable[[list[nn.Module]], None]) -> Trainer.Config:
    """Return the job's own config, without what a dry run has no use for."""
    config = trainer_config(job)
    spec = cast(ModelSpec, config.model_spec)
    for _, module, _, _ in spec.model.traverse(Module.Config, recurse=True):
        initialisers = cast(Module.Config, module).param_init
        if initialisers is not None:
            cast(Module.Config, module).param_init = dict.fromkeys(initialisers, _leave)
    config.model_spec = checked(spec, pipeline=job.layout.pp > 1, check=parallelised)
    config.comm.mode = "fake_backend"
    config.checkpoint.enable = False
    config.metrics = MetricsProcessor.Config(enable_tensorboard=False)
    config.tokenizer = _NoTokenizer.Config()
    config.dataloader = _NoData.Config()
    config.override = OverrideConfig(imports=list(overrides.IMPORTS))
    return config


def _leave(parameter: torch.Tensor) -> None:
    """Initialise nothing: a fake tensor has no values, and truncating them would ask for some."""


class _NoTokenizer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **kwargs: object) -> None:
        pass


class _NoData(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, **kwargs: object) -> None:
        pass
