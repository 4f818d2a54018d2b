"""What a config keeps on the host, read from a model on the meta device."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from integration.plan.host import OnHost, Shard
from integration.ranks import host_check


def _config(**changes) -> Trainer.Config:
    values = {
        "policy": SimpleNamespace(),
        "cpu_offload": False,
        "pipeline": 1,
        "context": 1,
        "tensor": 1,
        "async_mode": "disabled",
    } | changes
    return cast(
        Trainer.Config,
        SimpleNamespace(
            activation_checkpoint=values["policy"],
            checkpoint=SimpleNamespace(enable=True, async_mode=values["async_mode"]),
            model_spec=SimpleNamespace(model=SimpleNamespace(dim=64)),
            optimizer=SimpleNamespace(
                param_groups=[
                    SimpleNamespace(pattern=r"layers\.0\.weight", optimizer_name="DistMuon"),
                    SimpleNamespace(pattern=r".*", optimizer_name="AdamW"),
                ]
            ),
            parallelism=SimpleNamespace(
                pipeline_parallel_degree=values["pipeline"],
                pipeline_parallel_microbatch_size=1,
                context_parallel_degree=values["context"],
                tensor_parallel_degree=values["tensor"],
                enable_sequence_parallel=True,
            ),
            training=SimpleNamespace(
                enable_cpu_offload=values["cpu_offload"],
                local_batch_size=2,
                seq_len=32,
                mixed_precision_param="bfloat16",
            ),
        ),
    )


def _model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleDict({str(i): nn.Linear(64, 8) for i in range(4)})
    return model


def test_shards_know_their_optimizer():
    assert host_check.shards([_model()], _config())[:4] == [
        Shard(64 * 8 * 4, states=1, muon=True, whole=True, rows=8, columns=64),
        Shard(8 * 4, states=2, whole=True, rows=1, columns=8),
        Shard(64 * 8 * 4, states=2, whole=True, rows=8, columns=64),
        Shard(8 * 4, states=2, whole=True, rows=1, columns=8),
    ]


def _on_host(*, gpu: bool, stage: int = 0, parts: int = 1, **changes) -> OnHost:
    return host_check.on_host([_model()] * parts, _config(**changes), gpu=gpu, stage=stage)


def test_on_a_cpu_the_model_is_on_the_host_and_not_pinned():
    policy = SimpleNamespace(fraction=1.0, max_host_gib=None)
    kept = _on_host(gpu=False, cpu_offload=True, policy=policy)
    assert kept == OnHost(model=True, boundary=BLOCK)


def test_on_a_gpu_only_what_is_offloaded_is_on_the_host():
    assert _on_host(gpu=True) == OnHost(boundary=BLOCK)
    kept = _on_host(gpu=True, cpu_offload=True, async_mode="async_with_pinned_mem")
    assert kept.model and kept.pinned and kept.staging and kept.pinned_staging


BLOCK = 2 * 32 * 64 * 2  # sequences, tokens, hidden, bf16


def test_an_activation_pool_holds_the_input_of_each_layer_but_the_last():
    def pool(policy: SimpleNamespace, **changes) -> tuple[int, int]:
        kept = _on_host(gpu=True, policy=policy, **changes)
        return kept.boundaries, kept.boundary

    every = SimpleNamespace(fraction=1.0, max_host_gib=None)
    assert pool(every) == (3, BLOCK)
    assert pool(SimpleNamespace(fraction=0.33, max_host_gib=None)) == (1, BLOCK)
    assert pool(SimpleNamespace(fraction=0.34, max_host_gib=None)) == (2, BLOCK)  # rounded up
    assert pool(SimpleNamespace(fraction=1.0, max_host_gib=2 * BLOCK / 2**30)) == (2, BLOCK)
    assert pool(every, tensor=2, context=2) == (3, BLOCK // 4)
    # One sequence a microbatch, two of them, and as many in flight as stages are to come.
    assert pool(every, pipeline=2) == (2 * 3, BLOCK // 2)
    assert pool(every, pipeline=2, stage=1, parts=2) == (2 * 3, BLOCK // 2)
    assert pool(SimpleNamespace()) == (0, BLOCK)  # TorchTitan's own policies


@pytest.mark.parametrize(("rank", "expected"), [(0, 0), (7, 0), (8, 1), (15, 1)])
def test_stages_are_the_outermost_axis(rank, expected):
    assert host_check.stage(_config(pipeline=2), rank, 16) == expected


def test_the_check_sees_the_parallelised_model_before_it_has_memory():
    seen = []

    def spec(parallelize: Any = None, pipelining: Any = None) -> ModelSpec:
        return ModelSpec(
            name="m",
            flavor="f",
            model=cast(Any, None),
            parallelize_fn=parallelize,
            pipelining_fn=pipelining,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        )

    model = _model()
    plain = spec(parallelize=lambda model, **kwargs: model)
    checked = host_check.checked(plain, pipeline=False, check=seen.append)
    assert checked.parallelize_fn(model, parallel_dims=None) is model
    assert seen == [[model]]

    stages = spec(pipelining=lambda model, **kwargs: ("schedule", [model, model], True, False))
    checked = host_check.checked(stages, pipeline=True, check=seen.append)
    assert checked.pipelining_fn is not None
    assert checked.pipelining_fn(model) == ("schedule", [model, model], True, False)
    assert seen[1:] == [[model, model]]
