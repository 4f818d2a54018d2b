"""A fake step calls what TorchTitan's ``train_step`` calls, with what the set of patches takes."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torchtitan.distributed import utils as dist_utils

from integration.dryrun.trainer import DryTrainer


@pytest.mark.parametrize("takes", [True, False])
def test_gradients_are_clipped_by_the_optimizers_where_the_set_can(takes, monkeypatch):
    called = {}

    def pristine(parameters, max_norm, *, foreach, pp_mesh, ep_enabled):
        called["clipper"] = None

    def patched(parameters, max_norm, *, foreach, pp_mesh, ep_enabled, clipper=None):
        called["clipper"] = clipper

    monkeypatch.setattr(dist_utils, "clip_grad_norm_", patched if takes else pristine)
    optimizers = SimpleNamespace(zero_grad=lambda: None, step=lambda: None)
    trainer = SimpleNamespace(
        _fake=nullcontext(),
        _forward_backward=lambda: None,
        config=SimpleNamespace(training=SimpleNamespace(max_norm=1.0)),
        model_parts=[torch.nn.Linear(1, 1)],
        optimizers=optimizers,
        parallel_dims=SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False),
    )
    DryTrainer.fake_step(cast(DryTrainer, trainer), nullcontext(), lambda phase: nullcontext())
    assert called["clipper"] is (optimizers if takes else None)
