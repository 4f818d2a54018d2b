"""From a job as plain data to TorchTitan's ``Trainer.Config``."""

import torch
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)
from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8LinearConverter,
)
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.utils import device_type

from integration.ground.errors import UserError
from integration.jobs.spec import JobSpec
from integration.ranks import attention, contributed
from integration.ranks.checkpoint import ReshardingCheckpointManager
from integration.ranks.dataloader import TextDataLoader, TextTokenizer
from integration.ranks.moe import model_spec
from integration.ranks.trainer import JobTrainer

# torch's scaled matrix products need an Ada or Hopper GPU (float8.py of TorchTitan: SM89).
FP8_CAPABILITY = (8, 9)


def trainer_config(job: JobSpec, *, tokenizer: str = "./tokenizer") -> JobTrainer.Config:
    """Return the config that trains ``job``, with every contribution on that the set has."""
    attention.compile_without_autotuning()
    spec = model_spec(job.name, job.shape, _fp8_converters(job) if job.fp8 else ())
    return JobTrainer.Config(
        model_spec=spec,
        hf_assets_path=tokenizer,
        tokenizer=TextTokenizer.Config(),
        loss=ChunkedLossWrapper.Config(
            num_chunks=job.loss_chunks,
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=job.shape.vocab),
        ),
        dataloader=TextDataLoader.Config(),
        optimizer=_optimizer(job, spec),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=max(1, job.steps // 6),
            decay_ratio=0.8,
            decay_type="cosine",
            min_lr_factor=0.1,
        ),
        training=TrainingConfig(
            steps=job.steps,
            seq_len=job.seq_len,
            local_batch_size=job.sequences,
            enable_cpu_offload=job.cpu_offload,
            # The standard token dispatch reads token counts on the host, which a CUDA graph
            # cannot hold.
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=job.layout.pp,
            data_parallel_replicate_degree=job.layout.dp_replicate,
            tensor_parallel_degree=job.layout.tp,
            expert_parallel_degree=job.layout.ep,
            **contributed.options(ParallelismConfig, fsdp_unshard_async_op=True),
        ),
        activation_checkpoint=_checkpointing(job),
        checkpoint=ReshardingCheckpointManager.Config(
            enable=True,
            interval=max(1, job.steps // 2),
            keep_latest_k=3,
            last_save_model_only=False,
        ),
        metrics=MetricsProcessor.Config(log_freq=1, enable_tensorboard=True),
        debug=DebugConfig(seed=0, **contributed.options(DebugConfig, distinct_seed_axes=["pp"])),
        # FlexAttention has no backward on a CPU.
        override=OverrideConfig(
            imports=["integration.ranks.attention.masked_sdpa"] if device_type == "cpu" else []
        ),
    )


def _optimizer(job: JobSpec, spec: ModelSpec) -> OptimizersContainer.Config:
    muon = job.optimizer == "muon"
    return contributed.muon(spec, lr=job.lr) if muon else default_adamw(lr=job.lr)


def _checkpointing(job: JobSpec) -> SelectiveAC.Config | FullAC.Config:
    if job.checkpointing == "selective":
        return SelectiveAC.Config()
    return contributed.offloaded_full_ac() if job.activation_offload else FullAC.Config()


def _fp8_converters(job: JobSpec) -> list[ModelConfigConverter.Config]:
    """Return TorchTitan's FP8 converters, for all products but the router's and the head's.

    Raises:
        UserError: the GPU has no FP8.
    """
    has = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if has is None or has < FP8_CAPABILITY:
        gpu = f"{torch.cuda.get_device_name()} has {has[0]}.{has[1]}" if has else "there is none"
        raise UserError(
            f"{job.name} needs a GPU with FP8 (compute capability 8.9 or newer), and {gpu}; "
            f"train {job.name.removesuffix('_fp8')} instead"
        )
    return [
        Float8LinearConverter.Config(filter_fqns=["router.gate", "lm_head"]),
        Float8GroupedExpertsConverter.Config(),
    ]
