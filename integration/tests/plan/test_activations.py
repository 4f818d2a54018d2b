"""What a layer saves, against TorchTitan's own forward pass, on the pin or in a set."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from integration.jobs.catalog import MINI
from integration.plan import activations
from integration.plan.levers import Levers
from integration.ranks.moe import model_spec

SHAPE = replace(
    MINI.shape, layers=1, hidden=512, expert_hidden=256, experts=16, top_k=4, heads=8, vocab=64
)
JOB = replace(MINI, shape=SHAPE, sequences=1, seq_len=1024, loss_chunks=1)


def test_the_moe_saves_what_is_counted():
    """Experts in bf16. The router's fp32 copy of its input is left out on both sides: on a CPU the
    pin cannot raise it to fp32, and ``cpu_device`` can."""
    model = model_spec("test", SHAPE).model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    moe = model.layers["0"].moe.to(torch.bfloat16)
    weights = {p.untyped_storage().data_ptr() for p in moe.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        routers = tensor.dtype == torch.float32 and tensor.shape == (JOB.seq_len, SHAPE.hidden)
        if storage.data_ptr() not in weights and not routers:
            saved[storage.data_ptr()] = storage
        return tensor

    x = torch.randn(1, JOB.seq_len, SHAPE.hidden, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = moe(x * 1)
    measured = sum(storage.nbytes() for storage in saved.values())
    residual, router_input = activations.BF16, activations.FP32
    not_here = JOB.seq_len * SHAPE.hidden * (residual + router_input)
    # The project's tests run on the pins and on the full set.
    scored_in_bf16 = find_spec("torchtitan.models.common.moe_scores") is not None
    levers = Levers(moe_combine_memory=scored_in_bf16)
    counted = activations.routed_bytes(JOB, levers) + activations.mlp_bytes(JOB) - not_here
    assert output.shape == x.shape
    assert counted == pytest.approx(measured, rel=0.01)
