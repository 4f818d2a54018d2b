# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""Matrices of one bucket that are held by one rank each and by several, on one owner.

``torch.optim.Muon`` on whole matrices is the reference, and updates must equal it bit for bit.
"""

import math
import random
import unittest

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.testing._internal.common_distributed import MultiThreadedTestCase

from torchtitan.distributed.flex_shard import (
    BucketConfig,
    build_dist_muon,
    ComputeLayout,
    Owned,
)

HYPERPARAMETERS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}


def normal(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


class TestReturnBuffer(MultiThreadedTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def _build(self, mesh, matrices, buckets):
        """``matrices``: a shape and a placement on the last mesh axis by name."""
        self.mesh = mesh
        self.shapes = {name: shape for name, (shape, _) in matrices.items()}
        self.placements = {
            name: [Replicate()] * (mesh.ndim - 1) + [placement]
            for name, (_, placement) in matrices.items()
        }
        self.values = normal(self.shapes, seed=0)
        self.params = {
            name: torch.nn.Parameter(self._distribute(name, value.clone()))
            for name, value in self.values.items()
        }
        layout = ComputeLayout({mesh.mesh_dim_names[-1]: Owned()})
        return build_dist_muon(
            [{"params": list(self.params.values()), "param_names": list(matrices)}],
            compute_sharding_by_fqn=dict.fromkeys(matrices, layout),
            bucket_configs=[BucketConfig(patterns=patterns) for patterns in buckets],
            **HYPERPARAMETERS,
        )

    def _distribute(self, name, value):
        param = distribute_tensor(value, self.mesh, self.placements[name])
        return DTensor.from_local(
            param.to_local().contiguous(),
            self.mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )

    def _assert_equals_plain_muon(self, optimizer, *, num_steps=2, case=None):
        plain_params = {
            name: torch.nn.Parameter(value.clone())
            for name, value in self.values.items()
        }
        plain = torch.optim.Muon(list(plain_params.values()), **HYPERPARAMETERS)
        for step in range(num_steps):
            for name, grad in normal(self.shapes, seed=step + 1).items():
                self.params[name].grad = self._distribute(name, grad.clone())
                plain_params[name].grad = grad
            optimizer.step()
            plain.step()
        for name, param in self.params.items():
            expected = self._distribute(name, plain_params[name].detach())
            got = param.detach()
            self.assertTrue(
                torch.equal(got.to_local(), expected.to_local()), (name, case)
            )

    def test_what_all_ranks_hold_returns_beside_what_was_received(self):
        # "large" has one owner, the others have the other one. There "a" returns to
        # both ranks, and was received from one of them, beside a shard of "b".
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp"))
        optimizer = self._build(
            mesh,
            {
                "a": ((4, 4), Replicate()),
                "b": ((4, 6), Shard(0)),
                "large": ((24, 25), Shard(0)),
            },
            (("*",),),
        )
        (plan,) = optimizer._bucket_plans
        owners = [
            [
                partition.participant
                for partition in item_plan.compute_partitions
                if math.prod(partition.tensor_shape)
            ]
            for item_plan in plan.redistribution_plans
        ]
        self.assertEqual(owners[0], owners[1])
        self.assertNotEqual(owners[0], owners[2])
        self._assert_equals_plain_muon(optimizer)

    def test_sharded_matrices_return_in_place(self):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        optimizer = self._build(
            mesh,
            {"a": ((5, 4), Shard(0)), "b": ((6, 7), Shard(1)), "c": ((3, 9), Shard(0))},
            (("*",),),
        )
        (plan,) = optimizer._bucket_plans
        self.assertEqual(plan.return_buffer_offset, 0)
        self.assertEqual(
            plan.compute_exchange_numel,
            plan.storage_to_compute_schedule.output_buffer_numel,
        )
        self._assert_equals_plain_muon(optimizer)

    def test_any_mixture(self):
        """Drawn matrices, sizes that do not divide, and one to three buckets."""
        meshes = [
            init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)),
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp")),
        ]
        for seed in range(30):
            draw = random.Random(seed)
            # Equal matrices may be computed as a batch, which rounds differently.
            shapes = draw.sample(
                [(r, c) for r in range(1, 10) for c in range(1, 10)], draw.randint(2, 9)
            )
            num_buckets = draw.randint(1, 3)
            matrices = {
                f"{draw.randrange(num_buckets)}.{index}": (
                    shape,
                    draw.choice([Replicate(), Shard(0), Shard(1)]),
                )
                for index, shape in enumerate(shapes)
            }
            used = sorted({name[0] for name in matrices})
            optimizer = self._build(
                draw.choice(meshes), matrices, [(f"{bucket}.*",) for bucket in used]
            )
            self._assert_equals_plain_muon(optimizer, case=(seed, matrices))


if __name__ == "__main__":
    unittest.main()
