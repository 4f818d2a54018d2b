# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""How DistMuon's matrices are cut into batches, and when the batches are computed."""

import contextlib
import random
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.distributed.flex_shard import (
    _optimizer_reshard_runtime as runtime,
    BucketConfig,
    build_dist_muon,
    ComputeLayout,
    dist_muon,
    Owned,
)
from torchtitan.distributed.flex_shard._matrix_batches import (
    _batch_stacks,
    _MatrixStack,
    _NewtonSchulzSettings,
)

SETTINGS = _NewtonSchulzSettings((3.4445, -4.7750, 2.0315), 5, 1e-7)


def stack(name, num_matrices, rows, columns, **different) -> _MatrixStack[str]:
    fields = dict(dtype=torch.float32, settings=SETTINGS, stored_as=("mesh",))
    return _MatrixStack(name, num_matrices, rows, columns, **{**fields, **different})


class TestBatchPlan(unittest.TestCase):
    def assert_each_matrix_once(self, stacks, batches):
        places = set()
        for batch in batches:
            taken = []
            for member in batch.members:
                self.assertIs(member.stack, stacks[member.stack_index])
                for i in range(member.num_matrices):
                    places.add((member.stack.item, member.first + i))
                    taken.append(member.offset + i)
                self.assertLessEqual(
                    member.first + member.num_matrices, member.stack.num_matrices
                )
            self.assertEqual(taken, list(range(batch.num_matrices)))
        self.assertEqual(
            places, {(s.item, i) for s in stacks for i in range(s.num_matrices)}
        )
        self.assertEqual(
            sum(b.num_matrices for b in batches), sum(s.num_matrices for s in stacks)
        )

    def test_cuts_equal_matrices_into_even_batches(self):
        # One expert of each of 74 layers: w1 and w3 are wide, w2 is tall.
        stacks = [
            stack(f"{layer}.{name}", 1, *((1792, 6144) if name != "w2" else (6144, 1792)))
            for layer in range(74)
            for name in ("w1", "w2", "w3")
        ]
        batches = _batch_stacks(stacks, matrices_per_batch=8, whole_stacks=False)
        self.assert_each_matrix_once(stacks, batches)
        self.assertEqual({batch.num_matrices for batch in batches}, {8, 9})
        self.assertEqual(len(batches), 222 // 8)
        mixed = [
            batch
            for batch in batches
            if len({(m.stack.rows, m.stack.columns) for m in batch.members}) > 1
        ]
        self.assertLessEqual(len(mixed), 1)

    def test_any_stacks(self):
        draw = random.Random(0)
        for _ in range(200):
            stacks = [
                stack(
                    i,
                    draw.choice([0, 1, 1, 2, 5, 23]),
                    *draw.choice([(2, 3), (3, 2), (4, 4), (1, 6)]),
                    dtype=draw.choice([torch.float32, torch.bfloat16]),
                )
                for i in range(draw.randrange(12))
            ]
            target = draw.choice([1, 2, 8])
            whole = draw.random() < 0.5
            batches = _batch_stacks(
                stacks, matrices_per_batch=target, whole_stacks=whole
            )
            self.assert_each_matrix_once(stacks, batches)
            for batch in batches:
                keys = {
                    (s.dtype, *(s.rows, s.columns)[:: -1 if s.rows > s.columns else 1])
                    for s in (member.stack for member in batch.members)
                }
                self.assertEqual(len(keys), 1)
                available = sum(
                    s.num_matrices
                    for s in stacks
                    if (s.dtype, *sorted((s.rows, s.columns))) in keys
                )
                if whole:
                    self.assertTrue(
                        all(m.num_matrices == m.stack.num_matrices for m in batch.members)
                    )
                else:
                    self.assertGreaterEqual(batch.num_matrices, min(target, available))
                    self.assertLess(batch.num_matrices, 2 * target)

    def test_joins_only_equal_settings_and_storage(self):
        others = [
            {},
            {"settings": _NewtonSchulzSettings(SETTINGS.coefficients, 6, 1e-7)},
            {"settings": _NewtonSchulzSettings(SETTINGS.coefficients, 5, 1e-6)},
            {"settings": _NewtonSchulzSettings((1.5, -0.5, 0.0), 5, 1e-7)},
            {"dtype": torch.bfloat16},
            {"stored_as": ("another mesh",)},
        ]
        stacks = [stack(i, 2, 3, 4, **other) for i, other in enumerate(others)]
        batches = _batch_stacks(stacks, matrices_per_batch=64, whole_stacks=False)
        self.assertEqual(len(batches), len(others))

    def test_slot_has_the_orientation_of_its_stack(self):
        stacks = [stack("w1", 2, 2, 3), stack("w2", 1, 3, 2)]
        (batch,) = _batch_stacks(stacks, matrices_per_batch=8, whole_stacks=False)
        self.assertEqual((batch.rows, batch.columns), (2, 3))  # two are wide
        buffer = torch.zeros(3, 2, 3)
        tall = torch.arange(6.0).view(1, 3, 2)
        batch.slot(buffer, batch.members[1]).copy_(tall)
        self.assertTrue(torch.equal(buffer[2], tall[0].T))


class SimulatedDevice:
    """Streams with a clock: work takes the time that it is said to take."""

    def __init__(self):
        device = self
        self.exposed = 0

        class Stream:
            def __init__(self, priority=0):
                self.time = 0

            def wait_event(self, event):
                if self is device.compute:
                    device.exposed += max(0, event.time - self.time)
                self.time = max(self.time, event.time)

            def wait_stream(self, stream):
                self.time = max(self.time, stream.time)

        class Event:
            time = 0

            def record(self, stream):
                self.time = stream.time

        self.Stream, self.Event = Stream, Event
        self.compute = self.current = Stream()

    def current_stream(self, device=None):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        previous, self.current = self.current, stream
        yield
        self.current = previous


class TestTransfersAreHidden(unittest.TestCase):
    def setUp(self):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)

    def _step(self, num_experts: int):
        """Simulate a step: four buckets of one matrix, experts on this rank. A matrix
        computes for 1 unit of time, a transfer takes 2."""
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        locals_ = {
            f"bucket{i}.w": (torch.ones(2, 4), Owned()) for i in range(4)
        } | {
            f"experts{i}": (torch.ones(1, 4, 4), Shard(0)) for i in range(num_experts)
        }
        params = []
        for local, _ in locals_.values():
            param = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
            param.grad = DTensor.from_local(local, mesh, [Shard(0)])
            params.append(param)
        device = SimulatedDevice()
        order, transfers, computed = [], [], []  # the last two: (begin, end)

        def transfer(schedule, *, output, input):
            transfers.append((device.current.time, device.current.time + 2))
            device.current.time += 2
            order.append("transfer")

        def compute(prepared, *, out, **settings):
            num_matrices = prepared.shape[0] if prepared.ndim == 3 else 1
            self.assertIs(device.current, device.compute)
            order.append("local" if prepared.ndim == 3 else "bucket")
            if prepared.ndim == 2:
                computed.append((device.compute.time, device.compute.time + 1))
            device.compute.time += num_matrices
            return out

        with mock.patch.object(
            torch, "get_device_module", return_value=device
        ), mock.patch.object(
            runtime, "_execute_packed_all_to_all", transfer
        ), mock.patch.object(
            dist_muon, "_compute_muon_direction", compute
        ):
            optimizer = build_dist_muon(
                [{"params": params, "param_names": list(locals_)}],
                compute_sharding_by_fqn={
                    name: ComputeLayout({"dp_shard": sharding})
                    for name, (_, sharding) in locals_.items()
                },
                bucket_configs=[BucketConfig(("experts*",))]
                + [BucketConfig((f"bucket{i}.*",)) for i in range(4)],
                matrices_per_batch=2,
            )
            optimizer.step()
        self._assert_dependencies(optimizer, transfers, computed)
        self.assertGreaterEqual(device.compute.time, transfers[-1][1])
        return device, order

    def _assert_dependencies(self, optimizer, transfers, computed):
        """No bucket before its gather, no return before its bucket, on this rank's own."""
        # Gathers 0 and 1, then in turn return i and gather i + 2 while there are any.
        kinds = ["gather", "gather", "return", "gather", "return", "gather"]
        kinds += ["return", "return"]
        gathers = [t for t, kind in zip(transfers, kinds, strict=True) if kind == "gather"]
        returns = [t for t, kind in zip(transfers, kinds, strict=True) if kind == "return"]
        own = [i for i, b in enumerate(optimizer._batch_plan.redistributed) if b]
        for index, (begin, end) in zip(own, computed, strict=True):
            self.assertGreaterEqual(begin, gathers[index][1])
            self.assertGreaterEqual(returns[index][0], end)

    def test_no_transfer_is_exposed_where_local_work_suffices(self):
        # 8 transfers take 16; the experts take 24, in 12 batches.
        device, order = self._step(num_experts=24)
        self.assertEqual(device.exposed, 0)
        self.assertEqual(device.compute.time, 24 + order.count("bucket"))
        self.assertEqual(order[:3], ["transfer", "transfer", "local"])
        self.assertEqual(order[-1], "local")  # hides the last return
        # Twice as much passes before buckets 2 and 3 as before 0 and 1: gathers and returns.
        shares = "".join("L" if o == "local" else " " for o in order).split()
        self.assertLessEqual(len(shares[0]), len(shares[-1]))

    def test_only_what_local_work_cannot_hide_is_exposed(self):
        device, _ = self._step(num_experts=8)
        # 16 units of transfers, at most 4 buckets on this rank and 8 of experts.
        self.assertLessEqual(device.exposed, 16 - 8)
        nothing, _ = self._step(num_experts=0)
        self.assertLess(device.exposed, nothing.exposed)


if __name__ == "__main__":
    unittest.main()
