"""Training configurations in TorchTitan's form: functions that return a ``Trainer.Config``.

``python -m torchtitan.train --module integration.job --config mini`` works under any launcher
that puts an overlay with ``cpu_device`` first (``integration env`` prints the line). The launcher
hands over what is known only at launch through the environment.
"""

import os
from dataclasses import fields
from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.tools.utils import device_type

from integration.job.checkpoint import ReshardingCheckpointManager
from integration.job.dataloader import TextDataLoader
from integration.job.layout import (
    MINI_VOCAB,
    TOKENIZER_VARIABLE,
    VOCAB_VARIABLE,
    expert_parallel_degree,
    global_batch,
)
from integration.job.moe import MoEShape, model_spec
from integration.job.trainer import JobTrainer


def mini() -> JobTrainer.Config:
    """The 1T model in small: 60 steps in under three minutes on two CPU cores.

    Same builder, same kinds of layer, expert parallelism, FSDP2 and full checkpointing; only the
    numbers differ.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    vocab = int(os.environ.get(VOCAB_VARIABLE, MINI_VOCAB))
    shape = MoEShape(
        layers=4,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        experts=8,
        top_k=2,
        expert_hidden=256,
        shared_experts=1,
        vocab=vocab,
        max_seq_len=4096,
    )
    return JobTrainer.Config(
        model_spec=model_spec("mini", shape),
        hf_assets_path=os.environ.get(TOKENIZER_VARIABLE, "./tokenizer"),
        loss=ChunkedLossWrapper.Config(
            num_chunks=2, loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab)
        ),
        dataloader=TextDataLoader.Config(),
        optimizer=default_adamw(lr=2e-3),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=10, decay_ratio=0.8, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(
            steps=60,
            seq_len=256,
            local_batch_size=global_batch(ranks) // ranks,
            # The standard token dispatch reads token counts on the host, which a CUDA graph
            # cannot hold.
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            expert_parallel_degree=expert_parallel_degree(ranks),
            **_contributed(ParallelismConfig, fsdp_unshard_async_op=True),
        ),
        activation_checkpoint=FullAC.Config(),
        checkpoint=ReshardingCheckpointManager.Config(
            enable=True,
            interval=30,
            keep_latest_k=3,
            last_save_model_only=False,
        ),
        metrics=MetricsProcessor.Config(log_freq=1, enable_tensorboard=True),
        debug=DebugConfig(seed=0, **_contributed(DebugConfig, distinct_seed_axes=["pp"])),
        override=OverrideConfig(imports=_cpu_overrides()),
    )


def _contributed(config: type, **values: Any) -> dict[str, Any]:
    """Return those of ``values`` that ``config`` has a field for.

    A contribution's field is there only in sets with that contribution, and the proofs train this
    config with sets that leave some out.
    """
    names = {field.name for field in fields(config)}
    return {name: value for name, value in values.items() if name in names}


def _cpu_overrides() -> list:
    return ["integration.job.attention.masked_sdpa"] if device_type == "cpu" else []
