# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""DistMuon on one device a process, whatever that device is.

Plain ``torch.optim.Muon`` on whole matrices, one by one, is the reference.
"""

import unittest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Shard
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.components.checkpoint_utils import (
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)
from torchtitan.distributed.flex_shard import (
    BlockShard,
    BucketConfig,
    build_dist_muon,
    ComputeLayout,
    Owned,
)
from torchtitan.distributed.flex_shard._optimizer_reshard_runtime import (
    _CommunicationContext,
)

HYPERPARAMETERS = {"lr": 0.03, "weight_decay": 0.2, "momentum": 0.8}
BLOCK_ROWS = 4

# Rows do not divide by the ranks (5), one rank holds nothing (1), the border of the shards
# splits the middle block (3 blocks of 4 rows), and no expert is split (4 experts).
VALUES = {
    "uneven": (5, 7),
    "one_row": (1, 6),
    "blocks": (3 * BLOCK_ROWS, 5),
    "experts": (4, 3, 6),
}
COMPUTE = {
    "uneven": Owned(),
    "one_row": Owned(),
    "blocks": BlockShard(dim=0, block_size=BLOCK_ROWS),
    "experts": Shard(0),
}


def whole_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in VALUES.items()
    }


def matrices(name: str, value: torch.Tensor) -> list[torch.Tensor]:
    """The independent matrices in a whole parameter."""
    if name == "blocks":
        return list(value.split(BLOCK_ROWS))
    return list(value) if value.ndim == 3 else [value]


def build(mesh, values: dict[str, torch.Tensor]):
    params = {
        name: torch.nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(0)]))
        for name, value in values.items()
    }
    optimizer = build_dist_muon(
        [{"params": list(params.values()), "param_names": list(params)}],
        compute_sharding_by_fqn={
            name: ComputeLayout({"dp_shard": sharding})
            for name, sharding in COMPUTE.items()
        },
        bucket_configs=[BucketConfig(patterns=("*",), name="all")],
        **HYPERPARAMETERS,
    )
    return params, optimizer


class TestDistMuonOnCPU(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # A fork would inherit an OpenMP pool without its threads, and hang, where
        # tests before this one have used the pool.
        torch.multiprocessing.set_start_method("spawn", force=True)

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def test_matches_plain_muon_across_a_checkpoint(self):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        values = whole_tensors(seed=0)
        params, optimizer = build(mesh, values)
        reference = {
            name: [torch.nn.Parameter(m.clone()) for m in matrices(name, value)]
            for name, value in values.items()
        }
        plain = torch.optim.Muon(
            [m for group in reference.values() for m in group], **HYPERPARAMETERS
        )
        for step in range(5):
            if step == 3:  # momentum must come back as the DTensor that it was
                state = get_flat_optim_state_dict(optimizer)
                values = {n: p.detach().full_tensor() for n, p in params.items()}
                params, optimizer = build(mesh, values)
                init_optim_state(optimizer)
                load_flat_optim_state_dict(optimizer, state)
            for name, grad in whole_tensors(seed=step + 1).items():
                params[name].grad = distribute_tensor(grad, mesh, [Shard(0)])
                for matrix, part in zip(reference[name], matrices(name, grad)):
                    matrix.grad = part.clone()
            optimizer.step()
            plain.step()
        for name, param in params.items():
            whole = param.detach().full_tensor()
            for got, expected in zip(matrices(name, whole), reference[name]):
                # The batched product of the blocks and experts sums in another order.
                tolerance = 0 if COMPUTE[name] == Owned() else 1e-2
                torch.testing.assert_close(
                    got, expected.detach(), rtol=tolerance, atol=tolerance
                )

    def test_missing_gradient_is_found_before_any_collective(self):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        _, optimizer = build(mesh, whole_tensors(seed=0))
        with self.assertRaisesRegex(RuntimeError, "missing gradients.*uneven"):
            optimizer.step()


class TestDistMuonDevice(unittest.TestCase):
    def setUp(self):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)

    def _build(self, *locals_and_mesh_devices: tuple[str, str]):
        params = [
            torch.nn.Parameter(
                DTensor.from_local(
                    torch.ones(2, 4, 4, device=local),
                    init_device_mesh(mesh, (2,), mesh_dim_names=("dp_shard",)),
                    [Shard(0)],
                    run_check=False,
                )
            )
            for local, mesh in locals_and_mesh_devices
        ]
        names = [f"experts.{i}" for i in range(len(params))]
        return build_dist_muon(
            [{"params": params, "param_names": names}],
            compute_sharding_by_fqn=dict.fromkeys(
                names, ComputeLayout({"dp_shard": Shard(0)})
            ),
            bucket_configs=[BucketConfig(patterns=("*",))],
        )

    def test_one_device(self):
        self._build(("cpu", "cpu"), ("cpu", "cpu"))

    def test_two_devices(self):
        with self.assertRaisesRegex(ValueError, r"one device; got \['cpu', 'meta'\]"):
            self._build(("cpu", "cpu"), ("meta", "cpu"))

    def test_offloaded_parameters(self):
        # The mesh of an offloaded parameter names the device that computes.
        with self.assertRaisesRegex(ValueError, "on meta whose mesh is on cpu"):
            self._build(("meta", "cpu"))


@unittest.skipUnless(torch.cuda.device_count() >= 2, "requires two CUDA devices")
class TestStreamDevice(unittest.TestCase):
    def test_stream_is_on_the_given_device_and_current_streams_stay(self):
        torch.cuda.set_device(0)
        side = [torch.cuda.Stream(device=i) for i in range(2)]
        for stream in side:
            with torch.cuda.device(stream.device):
                torch.cuda.set_stream(stream)
        torch.cuda.set_device(0)
        context = _CommunicationContext.create(torch.device("cuda", 1))
        self.assertEqual(context.transfer_stream.device.index, 1)
        self.assertEqual(torch.cuda.current_device(), 0)
        self.assertEqual([torch.cuda.current_stream(i) for i in range(2)], side)


if __name__ == "__main__":
    unittest.main()
