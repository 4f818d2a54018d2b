"""What a config keeps on the host, read from a model on the meta device."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from integration.ranks import host_check
from integration.ranks.host_budget import Offload, Shard


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
        Shard(64 * 8 * 4, states=1),  # Muon: momentum
        Shard(8 * 4, states=2),
        Shard(64 * 8 * 4, states=2),
        Shard(8 * 4, states=2),
    ]


def test_on_a_cpu_the_model_is_on_the_host_and_not_pinned(monkeypatch):
    monkeypatch.setattr(host_check, "device_type", "cpu")
    assert host_check.offload([_model()], _config(cpu_offload=True)) == Offload(model=True)


def test_on_a_gpu_only_what_is_offloaded_is_on_the_host(monkeypatch):
    monkeypatch.setattr(host_check, "device_type", "cuda")
    parts = [_model()]
    assert host_check.offload(parts, _config()) == Offload(model=False)
    offloaded = _config(cpu_offload=True, async_mode="async_with_pinned_mem")
    assert host_check.offload(parts, offloaded) == Offload(
        model=True, pinned=True, staging=True, pinned_staging=True
    )


def test_an_activation_pool_holds_the_input_of_each_layer():
    block = 2 * 32 * 64 * 2  # sequences, tokens, hidden, bf16
    parts = [_model()]

    def pool(policy: SimpleNamespace, **changes) -> tuple[int, ...]:
        return host_check.activation_pool(parts, _config(policy=policy, **changes))

    every = SimpleNamespace(fraction=1.0, max_host_gib=None)
    assert pool(every) == (block,) * 4
    assert pool(SimpleNamespace(fraction=0.5, max_host_gib=None)) == (block,) * 2
    assert pool(SimpleNamespace(fraction=1.0, max_host_gib=3 * block / 2**30)) == (block,) * 3
    assert pool(every, tensor=2, context=2) == (block // 4,) * 4
    # One sequence a microbatch, and as many microbatches in flight as stages.
    assert pool(every, pipeline=2) == (block // 2,) * 8
    assert pool(SimpleNamespace()) == ()  # TorchTitan's own policies


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
