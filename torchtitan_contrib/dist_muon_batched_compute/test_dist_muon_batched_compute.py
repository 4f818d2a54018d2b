# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""DistMuon in batches across parameters, against torch.optim.Muon matrix by matrix."""

import copy
import math
import random
import tempfile
import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_distributed import MultiThreadedTestCase
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
    dist_muon,
    Owned,
)

BLOCK_ROWS = 4
ALL = (BucketConfig(patterns=("*",)),)


def random_tensors(shapes, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def build(mesh, values, shardings, *, placements=(Shard(0),), groups=None, **kwargs):
    """``groups``: lists of parameter names with hyper-parameters; one group if None."""
    params = {
        name: torch.nn.Parameter(distribute_tensor(value.clone(), mesh, placements))
        for name, value in values.items()
    }
    optimizer = build_dist_muon(
        [
            {"params": [params[n] for n in names], "param_names": names, **settings}
            for names, settings in groups or [(list(params), {})]
        ],
        compute_sharding_by_fqn={
            name: ComputeLayout({mesh.mesh_dim_names[-1]: shardings[name]})
            for name in params
        },
        **{"bucket_configs": ALL, **kwargs},
    )
    return params, optimizer


def set_grads(params, grads):
    for name, param in params.items():
        param.grad = distribute_tensor(grads[name], param.device_mesh, param.placements)


def matrices(value: torch.Tensor, sharding) -> list[torch.Tensor]:
    """The independent matrices in a whole parameter."""
    if isinstance(sharding, BlockShard):
        return list(value.split(BLOCK_ROWS))
    return list(value) if value.ndim == 3 else [value]


class PlainMuon:
    """torch.optim.Muon on every matrix, one by one."""

    def __init__(self, values, shardings, groups):
        self.shardings = shardings
        self.params = {
            name: [torch.nn.Parameter(m.clone()) for m in matrices(v, shardings[name])]
            for name, v in values.items()
        }
        self.optimizer = torch.optim.Muon(
            [
                {"params": [m for n in names for m in self.params[n]], **settings}
                for names, settings in groups
            ]
        )

    def step(self, grads):
        for name, grad in grads.items():
            for param, part in zip(
                self.params[name], matrices(grad, self.shardings[name])
            ):
                param.grad = part.clone()
        self.optimizer.step()


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


class TestLocalBatches(unittest.TestCase):
    """Rank 0 of two, with whole experts only: nothing needs the other rank."""

    shapes = {f"w{i}": (4, *((3, 5) if i != 1 else (5, 3))) for i in range(3)}
    shardings = dict.fromkeys(shapes, Shard(0))

    def setUp(self):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))

    def _build(self, **kwargs):
        return self._build_from(self.shapes, **kwargs)

    def _build_from(self, shapes, **kwargs):
        """Local tensors are the first half of the whole ones."""
        params = {
            name: torch.nn.Parameter(
                DTensor.from_local(
                    value[: value.shape[0] // 2].clone(), self.mesh, [Shard(0)]
                )
            )
            for name, value in random_tensors(shapes, seed=0).items()
        }
        groups = kwargs.pop("groups", [(list(params), {})])
        optimizer = build_dist_muon(
            [
                {"params": [params[n] for n in names], "param_names": names, **settings}
                for names, settings in groups
            ],
            compute_sharding_by_fqn=dict.fromkeys(
                params, ComputeLayout({"dp_shard": Shard(0)})
            ),
            **{"bucket_configs": ALL, **kwargs},
        )
        return params, optimizer

    def _set_grads(self, params, grads):
        for name, param in params.items():
            local = grads[name][: param.to_local().shape[0]].clone()
            param.grad = DTensor.from_local(local, self.mesh, [Shard(0)])

    def _locals(self, params):
        return {n: p.detach().to_local().clone() for n, p in params.items()}

    def _plain(self, params, groups):
        return PlainMuon(self._locals(params), self.shardings, groups)

    def test_a_step_of_experts_sends_nothing(self):
        params, optimizer = self._build()
        self._set_grads(params, random_tensors(self.shapes, seed=1))
        guards = [
            mock.patch.object(DTensor, name, side_effect=AssertionError(name))
            for name in ("full_tensor", "redistribute")
        ] + [
            mock.patch.object(dist, name, side_effect=AssertionError(name))
            for name in dir(dist)
            if name.startswith(("all_", "reduce", "broadcast", "scatter", "gather", "barrier"))
            and callable(getattr(dist, name))
        ]
        for guard in guards:
            guard.start()
            self.addCleanup(guard.stop)
        with CommDebugMode() as comm_mode:
            optimizer.step()
        self.assertEqual(comm_mode.get_total_counts(), 0)
        for batch in optimizer._batch_plan.local:
            self.assertEqual(batch.num_matrices, 6)  # both of w0, w1 (transposed), w2

    def test_special_gradients_stay_in_their_matrix(self):
        shapes = {f"w{i}": (8, 3, 5) for i in range(4)}
        grads = random_tensors(shapes, seed=1)
        clean, optimizer = self._build_from(shapes, matrices_per_batch=16)
        self._set_grads(clean, grads)
        optimizer.step()
        clean = self._locals(clean)

        special = {0: 0.0, 1: math.nan, 2: math.inf, 3: -math.inf}
        for expert, value in special.items():
            grads["w1"][expert] = value
        params, optimizer = self._build_from(shapes, matrices_per_batch=16)
        self.assertEqual([b.num_matrices for b in optimizer._batch_plan.local], [16])
        before = self._locals(params)
        self._set_grads(params, grads)
        optimizer.step()
        got = self._locals(params)
        for expert in special:
            plain = torch.nn.Parameter(before["w1"][expert].clone())
            plain.grad = grads["w1"][expert].clone()
            torch.optim.Muon([plain]).step()
            torch.testing.assert_close(
                got["w1"][expert], plain.detach(), rtol=0, atol=0, equal_nan=True
            )
        for name in ("w0", "w2", "w3"):
            self.assertTrue(torch.equal(got[name], clean[name]))

    def test_an_alone_matrix_is_bitwise_plain_muon(self):
        params, optimizer = self._build(matrices_per_batch=1)
        groups = [(list(self.shapes), {})]
        plain = self._plain(params, groups)
        for step in range(3):
            grads = random_tensors(self.shapes, seed=step)
            self._set_grads(params, grads)
            with mock.patch.object(
                dist_muon,
                "_compute_muon_direction",
                wraps=dist_muon._compute_muon_direction,
            ) as compute:
                optimizer.step()
            # As a batch of one, it would take another kernel on a GPU.
            self.assertEqual([c.args[0].ndim for c in compute.mock_calls], [2] * 6)
            plain.step({n: g[:2] for n, g in grads.items()})
        for name, local in self._locals(params).items():
            expected = torch.stack([m.detach() for m in plain.params[name]])
            self.assertTrue(torch.equal(local, expected))

    def test_groups_and_changes_of_their_values(self):
        groups = [
            (["w0"], {"lr": 0.02, "ns_steps": 3, "nesterov": False}),
            (["w1"], {"lr": 0.01, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}),
            (["w2"], {"momentum": 0.5, "eps": 1e-3, "ns_coefficients": (2.0, -1.5, 0.5)}),
        ]
        params, optimizer = self._build(groups=groups)
        self.assertEqual(len(optimizer._batch_plan.local), 3)
        plain = self._plain(params, copy.deepcopy(groups))
        changes = {
            1: (0, "lr", 0.005),
            2: (1, "momentum", 0.7),
            3: (0, "ns_steps", 5),  # now w0 and w1 share a batch
            4: (2, "ns_coefficients", (1.5, -0.5, 0.0)),
        }
        for step in range(6):
            if step in changes:
                index, key, value = changes[step]
                optimizer.param_groups[index][key] = value
                plain.optimizer.param_groups[index][key] = value
            grads = random_tensors(self.shapes, seed=step)
            self._set_grads(params, grads)
            before = self._locals(params)
            expected_before = copy.deepcopy(plain.params)
            optimizer.step()
            plain.step({n: g[:2] for n, g in grads.items()})
            for name, local in self._locals(params).items():
                expected = torch.stack(
                    [
                        new.detach() - old.detach()
                        for new, old in zip(plain.params[name], expected_before[name])
                    ]
                )
                self.assertLess(relative(local - before[name], expected), 1e-2)
        self.assertEqual(len(optimizer._batch_plan.local), 2)

    def test_an_invalid_change_is_found_before_anything_changes(self):
        for key, value in {"ns_steps": -1, "adjust_lr_fn": "x", "eps": -1.0}.items():
            params, optimizer = self._build()
            before = self._locals(params)
            self._set_grads(params, random_tensors(self.shapes, seed=1))
            optimizer.param_groups[0][key] = value
            for _ in range(2):  # it stays refused
                with self.assertRaisesRegex(ValueError, "unsupported DistMuon group 0"):
                    optimizer.step()
            self.assertFalse(optimizer.state)
            for name, local in self._locals(params).items():
                self.assertTrue(torch.equal(local, before[name]))

    def test_a_missing_gradient_is_found_before_anything_changes(self):
        params, optimizer = self._build()
        self._set_grads(params, random_tensors(self.shapes, seed=1))
        optimizer.step()
        before = self._locals(params)
        momentum = copy.deepcopy(optimizer.state_dict()["state"])
        params["w2"].grad = None
        with self.assertRaisesRegex(RuntimeError, "missing gradients.*w2"):
            optimizer.step()
        for name, local in self._locals(params).items():
            self.assertTrue(torch.equal(local, before[name]))
        for index, state in optimizer.state_dict()["state"].items():
            self.assertTrue(
                torch.equal(
                    state["momentum_buffer"].to_local(),
                    momentum[index]["momentum_buffer"].to_local(),
                )
            )

    def test_one_newton_schulz_a_step_whatever_the_accumulation(self):
        weights = {}
        for micro_batches in (1, 4):
            params, optimizer = self._build()
            with mock.patch.object(
                dist_muon,
                "_compute_muon_direction",
                wraps=dist_muon._compute_muon_direction,
            ) as compute:
                for step in range(3):
                    parts = [
                        random_tensors(self.shapes, seed=4 * step + i) for i in range(4)
                    ]
                    for param in params.values():
                        param.grad = None
                    for i in range(micro_batches):
                        for name, param in params.items():
                            grad = sum(p[name] for p in parts[i::micro_batches])[:2] / 4
                            grad = DTensor.from_local(grad, self.mesh, [Shard(0)])
                            param.grad = grad if param.grad is None else param.grad + grad
                    optimizer.step()
                self.assertEqual(compute.call_count, 3)
            weights[micro_batches] = self._locals(params)
        for name in self.shapes:
            self.assertLess(relative(weights[4][name], weights[1][name]), 1e-3)

    def test_scratch_is_one_tensor_of_the_documented_size(self):
        params, optimizer = self._build(matrices_per_batch=2)
        scratch = optimizer._redistribution_runtime.batch_scratch._tensor
        batch = max(optimizer._batch_plan.local, key=lambda b: b.num_matrices)
        self.assertLess(batch.num_matrices, 2 * 2)
        self.assertEqual(scratch.nbytes, 2 * batch.num_matrices * 3 * 5)
        for step in range(3):
            self._set_grads(params, random_tensors(self.shapes, seed=step))
            optimizer.step()
        after = optimizer._redistribution_runtime.batch_scratch._tensor
        self.assertEqual(after.data_ptr(), scratch.data_ptr())

    def test_state_dict_is_that_of_dist_muon_without_batches(self):
        params, optimizer = self._build()
        self._set_grads(params, random_tensors(self.shapes, seed=1))
        optimizer.step()
        saved = optimizer.state_dict()
        names = {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps"}
        names |= {"ns_steps", "adjust_lr_fn", "params", "param_names"}
        self.assertEqual(set(saved["param_groups"][0]), names)
        for name, state in zip(self.shapes, saved["state"].values()):
            self.assertEqual(list(state), ["momentum_buffer"])
            self.assertEqual(state["momentum_buffer"].placements, params[name].placements)
            self.assertEqual(state["momentum_buffer"].dtype, torch.float32)
        # A loaded ns_steps regroups like one that is set by hand.
        saved["param_groups"][0]["ns_steps"] = 2
        optimizer.load_state_dict(saved)
        self.assertEqual({b.settings.steps for b in optimizer._batch_plan.local}, {2})

    def test_batches_have_at_least_one_matrix(self):
        with self.assertRaisesRegex(ValueError, "must be positive; got 0"):
            self._build(matrices_per_batch=0)


# Rows that do not divide by four ranks, equal shapes on one owner (a0 to a7), a shape of
# its own (uneven), one row, blocks that the border of the shards splits, five experts on
# four ranks, and two on four, so that ranks hold two, one or no expert.
SHAPES = {
    **{f"a{i}": (6, 10) for i in range(8)},
    "uneven": (5, 7),
    "row": (1, 6),
    "blocks": (3 * BLOCK_ROWS, 10),
    "experts.w1": (5, BLOCK_ROWS, 10),
    "experts.w2": (5, 10, BLOCK_ROWS),
    "few.w1": (2, BLOCK_ROWS, 10),
}
SHARDINGS = {
    name: Shard(0)
    if len(shape) == 3
    else BlockShard(0, BLOCK_ROWS)
    if name == "blocks"
    else Owned()
    for name, shape in SHAPES.items()
}
BUCKETS = (
    BucketConfig(patterns=("few*", "a*")),
    BucketConfig(patterns=("experts*",)),
    BucketConfig(patterns=("uneven", "row", "blocks")),
)
GROUPS = [
    ([name for name in SHAPES if "." not in name], {"lr": 0.02}),
    (
        [name for name in SHAPES if "." in name],
        {"lr": 0.01, "weight_decay": 0.2, "momentum": 0.8, "ns_steps": 4},
    ),
]


class TestRedistributedBatches(unittest.TestCase):
    """Rank 0 of four; what it receives does not matter."""

    def setUp(self):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        self.params, self.optimizer = build(
            mesh,
            random_tensors(SHAPES, seed=0),
            SHARDINGS,
            bucket_configs=BUCKETS,
            groups=GROUPS,
        )
        set_grads(self.params, random_tensors(SHAPES, seed=1))

    def test_two_collectives_a_bucket(self):
        with CommDebugMode() as comm_mode:
            self.optimizer.step()
        self.assertEqual(comm_mode.get_total_counts(), 2 * 2)

    def test_equal_matrices_of_one_owner_are_a_batch(self):
        dense, _ = self.optimizer._batch_plan.redistributed
        self.assertEqual([b.num_matrices for b in dense], [2])  # of a0 to a7

    def test_no_buffer_grows_or_moves_after_planning(self):
        runtime = self.optimizer._redistribution_runtime
        plan = self.optimizer._batch_plan
        batches = [*plan.local, *(b for bucket in plan.redistributed for b in bucket)]

        def buffers():
            yield runtime.batch_scratch._tensor
            for slot in runtime._context.slots:
                for reserved in slot.buffers.buffers.values():
                    yield reserved.storage_exchange
                    yield reserved.compute_exchange
                    yield reserved.storage_scratch

        before = [(b.data_ptr(), b.nbytes) for b in buffers()]
        for _ in range(3):
            self.optimizer.step()
        self.assertEqual([(b.data_ptr(), b.nbytes) for b in buffers()], before)
        largest = max(b.num_matrices * b.rows * b.columns for b in batches)
        self.assertEqual(before[0][1], 2 * largest)
        buckets = [p for p in self.optimizer._bucket_plans if hasattr(p, "group")]
        for (bucket, sent), slot in zip(zip(buckets, (8, 3)), runtime._context.slots):
            (reserved,) = slot.buffers.buffers.values()
            stored = [p.storage_partition(0).tensor_shape for p in bucket.redistribution_plans]
            computed = [p.compute_partition(0).tensor_shape for p in bucket.redistribution_plans]
            self.assertEqual(len(stored), sent)
            for buffer, numels in (
                (reserved.storage_exchange, sum(map(math.prod, stored))),
                (reserved.compute_exchange, sum(map(math.prod, computed))),
                (reserved.storage_scratch, max(map(math.prod, stored))),
            ):
                self.assertEqual(buffer.nbytes, 4 * numels)


class TestFourRanks(MultiThreadedTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_matches_plain_muon(self):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        values = random_tensors(SHAPES, seed=0)
        params, optimizer = build(
            mesh, values, SHARDINGS, bucket_configs=BUCKETS, groups=GROUPS
        )
        plain = PlainMuon(values, SHARDINGS, GROUPS)
        for step in range(5):
            grads = random_tensors(SHAPES, seed=step + 1)
            set_grads(params, grads)
            optimizer.step()
            plain.step(grads)
            if step == 0:
                self._compare_updates(params, values, plain)
        for name, param in params.items():
            whole = param.detach().full_tensor()
            got = torch.stack(matrices(whole, SHARDINGS[name]))
            expected = torch.stack([m.detach() for m in plain.params[name]])
            self.assertLess(relative(got, expected), 1e-4, name)
            if name in ("uneven", "row"):  # alone in their shape
                self.assertTrue(torch.equal(got, expected), name)

    def _compare_updates(self, params, values, plain):
        for name, param in params.items():
            before = torch.stack(matrices(values[name], SHARDINGS[name]))
            whole = param.detach().full_tensor()
            got = torch.stack(matrices(whole, SHARDINGS[name]))
            expected = torch.stack([m.detach() for m in plain.params[name]])
            self.assertLess(relative(got - before, expected - before), 1e-2, name)

    def test_replicas_are_bitwise_equal(self):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        values = random_tensors(SHAPES, seed=0)
        params, optimizer = build(
            mesh,
            values,
            SHARDINGS,
            placements=(Replicate(), Shard(0)),
            bucket_configs=BUCKETS,
        )
        for step in range(2):
            set_grads(params, random_tensors(SHAPES, seed=step))
            optimizer.step()
        self._assert_equal_replicas(params, mesh["dp_replicate"].get_group())

    def test_replicated_and_sharded_matrices_of_one_owner(self):
        # What is replicated returns to all ranks, beside what was received for other
        # matrices. All shapes differ: a matrix alone in its batch follows torch bitwise.
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        for seed in range(10):
            draw = random.Random(seed)
            sides = [(r, c) for r in range(1, 10) for c in range(1, 10)]
            shapes = {f"p{i}": s for i, s in enumerate(draw.sample(sides, 9))}
            values = random_tensors(shapes, seed)
            grads = random_tensors(shapes, seed + 1)
            placements = {n: [draw.choice([Replicate(), Shard(0)])] for n in shapes}
            params = {
                n: torch.nn.Parameter(distribute_tensor(v.clone(), mesh, placements[n]))
                for n, v in values.items()
            }
            optimizer = build_dist_muon(
                [{"params": list(params.values()), "param_names": list(params)}],
                compute_sharding_by_fqn=dict.fromkeys(
                    params, ComputeLayout({"dp_shard": Owned()})
                ),
                bucket_configs=(
                    BucketConfig(patterns=("p[0-5]",)),
                    BucketConfig(patterns=("p[6-8]",)),
                ),
            )
            plain = PlainMuon(values, dict.fromkeys(params), [(list(params), {})])
            set_grads(params, grads)
            optimizer.step()
            plain.step(grads)
            for name, param in params.items():
                (expected,) = plain.params[name]
                got = param.detach().full_tensor()
                self.assertTrue(torch.equal(got, expected.detach()), (seed, name))

    def test_a_replicated_stack_does_not_join_an_uneven_one(self):
        # Ranks hold 2, 1, 1 and 1 of the experts: with them, the replicas of the other
        # stack would be in batches of other sizes, which round in other ways.
        hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        ep = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        stored = {"r": (hsdp, (Replicate(), Shard(0))), "experts": (ep, (Shard(0),))}
        values = random_tensors({"r": (4, 24, 40), "experts": (5, 24, 40)}, seed=0)
        params = {
            name: torch.nn.Parameter(distribute_tensor(value, *stored[name]))
            for name, value in values.items()
        }
        optimizer = build_dist_muon(
            [{"params": list(params.values()), "param_names": list(params)}],
            compute_sharding_by_fqn={
                name: ComputeLayout({mesh.mesh_dim_names[-1]: Shard(0)})
                for name, (mesh, _) in stored.items()
            },
            bucket_configs=ALL,
        )
        set_grads(params, values)
        optimizer.step()
        self._assert_equal_replicas({"r": params["r"]}, hsdp["dp_replicate"].get_group())

    def _assert_equal_replicas(self, params, group):
        for name, param in params.items():
            local = param.detach().to_local()
            others = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(others, local.contiguous(), group=group)
            for other in others:
                self.assertTrue(torch.equal(other, local), name)

    def test_saved_by_four_ranks_and_loaded_by_two(self):
        folder = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder)
        four = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        two = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp_shard",))
        values = random_tensors(SHAPES, seed=0)
        params, optimizer = build(
            four, values, SHARDINGS, bucket_configs=BUCKETS, groups=GROUPS
        )
        set_grads(params, random_tensors(SHAPES, seed=1))
        optimizer.step()
        dcp.save(get_flat_optim_state_dict(optimizer), checkpoint_id=folder[0])
        weights = {n: p.detach().full_tensor() for n, p in params.items()}
        grads = random_tensors(SHAPES, seed=2)
        set_grads(params, grads)
        optimizer.step()
        expected = {n: p.detach().full_tensor() for n, p in params.items()}
        if self.rank < 2:
            params, optimizer = build(
                two, weights, SHARDINGS, bucket_configs=BUCKETS, groups=GROUPS
            )
            init_optim_state(optimizer)
            state = get_flat_optim_state_dict(optimizer)
            dcp.load(
                state, checkpoint_id=folder[0], process_group=two.get_group()
            )
            load_flat_optim_state_dict(optimizer, state)
            set_grads(params, grads)
            optimizer.step()
            for name, param in params.items():
                got = param.detach().full_tensor()
                self.assertLess(
                    relative(got - weights[name], expected[name] - weights[name]),
                    1e-2,
                    name,
                )
        dist.barrier()


if __name__ == "__main__":
    unittest.main()
