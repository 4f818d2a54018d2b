# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

# Tables are as wide as they are logged.
# flake8: noqa: E501

"""Fused weights whose logical matrices Muon updates on their own.

The reference is ``torch.optim.Muon`` on the logical matrices as parameters.
"""

import dataclasses
import importlib
import json
import unittest

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_utils import TestCase

from torchtitan.components.optimizer import muon_adamw
from torchtitan.components.optimizer.param_groups import format_param_groups
from torchtitan.distributed.flex_shard.derive import build_muon
from torchtitan.distributed.flex_shard.row_split import RowSplit
from torchtitan.models.qwen3 import model_registry

# Two kv groups of (2 query heads, key, value) with heads of 3 rows. Three shards of 8
# rows split the groups and the heads.
QKV = RowSplit(2, (6, 3, 3))
GATE_UP = RowSplit(5, (1, 1))
SHAPES = {"layers.0.wqkv": (24, 7), "layers.0.experts": (4, 10, 6)}
SPLITS = {"layers.*.wqkv": QKV, "layers.*.experts": GATE_UP}


def whole_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()
    }


def logical_matrices(name: str, value: torch.Tensor) -> list[torch.Tensor]:
    """By index, as the models' forward passes read them."""
    if "wqkv" in name:
        groups = value.view(2, 4, 3, -1)  # groups, heads, rows, C
        return [
            groups[:, :2].reshape(12, -1),
            groups[:, 2].reshape(6, -1),
            groups[:, 3].reshape(6, -1),
        ]
    return [expert[start::2] for expert in value for start in (0, 1)]


class TestSplitUpdates(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 3

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def check_against_reference(self, adjust_lr_fn: str) -> None:
        kwargs = {"lr": 0.03, "weight_decay": 0.2, "adjust_lr_fn": adjust_lr_fn}
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp_shard",))
        values = whole_tensors(0)
        params = {
            name: torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))
            for name, value in values.items()
        }
        optimizer = build_muon(
            [{"params": list(params.values()), "param_names": list(params)}],
            row_splits_by_pattern=SPLITS,
            **kwargs,
        )
        reference = {
            name: [torch.nn.Parameter(m.clone()) for m in logical_matrices(name, value)]
            for name, value in values.items()
        }
        plain = torch.optim.Muon([m for ms in reference.values() for m in ms], **kwargs)
        for step in range(3):
            for name, gradient in whole_tensors(step + 1).items():
                params[name].grad = distribute_tensor(gradient, mesh, [Shard(0)])
                parts = logical_matrices(name, gradient)
                for matrix, part in zip(reference[name], parts, strict=True):
                    matrix.grad = part.clone()
            optimizer.step()
            plain.step()
        for name, param in params.items():
            change = param.detach().full_tensor() - values[name]
            changes = logical_matrices(name, change)
            starts = logical_matrices(name, values[name])
            for got, start, end in zip(changes, starts, reference[name], strict=True):
                error = (got - (end - start)).norm() / (end - start).norm()
                # bf16 batches sum in another order.
                self.assertLess(error.item(), 2e-2, name)

    def test_original_learning_rate(self):
        # sqrt(max(1, rows / columns)): 1.31 for 12 x 7 queries, 1 for 6 x 7 keys.
        self.check_against_reference("original")

    def test_rms_of_adamw(self):
        self.check_against_reference("match_rms_adamw")

    def test_split_that_does_not_fit(self):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp_shard",))
        param = torch.nn.Parameter(
            distribute_tensor(torch.ones(24, 7), mesh, [Shard(0)])
        )
        for kwargs in ({}, {"block_rows_by_pattern": {"wqkv": 3}}):
            split = QKV if kwargs else GATE_UP
            with self.assertRaisesRegex(ValueError, "matrices of (24|3) rows, which"):
                build_muon(
                    [{"params": [param], "param_names": ["wqkv"]}],
                    row_splits_by_pattern={"wqkv": split},
                    **kwargs,
                )


class TestSplitFusedOption(TestCase):
    def table(self, family: str, flavor: str, **kwargs) -> str:
        module = importlib.import_module(f"torchtitan.models.{family}")
        model_spec = module.model_registry(flavor, **kwargs)
        config = muon_adamw(model_spec, lr=1e-3, split_fused=True)
        json.dumps(config.to_dict())
        json.dumps(dataclasses.asdict(config))
        with torch.device("meta"):
            model = model_spec.model.build()
        config.judge(model)
        lines = format_param_groups(config, model).splitlines()
        return "\n".join(line for line in lines if "rows" in line)

    def test_tables(self):
        self.assertExpectedInline(
            self.table("llama3", "debugmodel"),
            """0      Muon       layers.*.attention.qkv_linear.wqkv.weight  768 x 256   (256 + 256 + 256) rows        6  1,179,648  19.14%""",
        )
        self.assertExpectedInline(
            self.table("qwen3", "debugmodel_moe"),
            """0      Muon       layers.*.attention.qkv_linear.wqkv.weight         4096 x 256      (2048 + 1024 + 1024) rows        8    8,388,608   2.66%""",
        )
        self.assertExpectedInline(
            self.table("gpt_oss", "debugmodel", moe_comm_backend="standard"),
            """\
0      Muon       layers.*.attention.qkv_linear.wqkv.weight                  5120 x 256      (4096 + 512 + 512) rows        4   5,242,880   6.43%
0      Muon       layers.*.moe.routed_experts.inner_experts.mlp1_weight_EGD  8 x 5760 x 256  8 x (2880 + 2880) rows         4  47,185,920  57.90%""",
        )

    def test_parts_are_those_that_the_forward_pass_reads(self):
        model_spec = model_registry("debugmodel")
        config = muon_adamw(model_spec, lr=1e-3, split_fused=True)
        kwargs = config.optimizer_factory_kwargs_by_name["Muon"]
        split = next(iter(kwargs["row_splits_by_pattern"].values()))
        qkv = model_spec.model.layers[0].attention.qkv_linear.build()
        qkv.to_empty(device="cpu")
        weight = torch.arange(split.rows * 256.0).view(split.rows, 256) / 1e4
        qkv.wqkv.weight.data = weight
        x = torch.eye(256)[None]
        outputs = qkv(x)
        for view, output in zip(split.views(weight), outputs, strict=True):
            # [B, L, heads, head_dim] of the unit vectors is the transposed weight.
            self.assertEqual(view.flatten(0, 1).T, output.flatten(2)[0])


if __name__ == "__main__":
    unittest.main()
