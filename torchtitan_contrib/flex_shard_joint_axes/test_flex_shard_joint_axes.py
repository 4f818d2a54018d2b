# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""DistMuon over storage that several mesh axes shard, as FSDP2 stores it with TP, EP and replicas.

Plain ``torch.optim.Muon`` on whole matrices, one by one, is the reference. What moves where is played for all
ranks in one process, for shapes, meshes and placements that hypothesis draws.
"""

import itertools
import math
import random
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import assume, given, settings, strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiThreadedTestCase,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.distributed import ParallelDims
from torchtitan.distributed.flex_shard import (
    BlockShard,
    BucketConfig,
    build_dist_muon,
    ComputeLayout,
    dist_muon,
    Owned,
)
from torchtitan.distributed.flex_shard._optimizer_reshard_schedule import (
    _build_packed_all_to_all_schedule,
    _dtensor_storage_region_at_coordinate,
    _fsdp_stored_runs,
    _num_indices,
    _RedistributionDirection,
    _stored_runs,
)
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh

HYPERPARAMETERS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
NUM_STEPS = 5


def index(region):
    return tuple(slice(o, o + s) for o, s in zip(region.offsets, region.shape))


def local_index(param):
    """Where this rank's shard lies in the whole tensor."""
    coordinate = param.device_mesh.get_coordinate()
    return index(_dtensor_storage_region_at_coordinate(param, coordinate, fqn="test"))


def draw(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def fsdp_parameters(values, fsdp_mesh, other_mesh=None, other=None, fsdp_dim=0):
    """Parameters as FSDP2 stores them, sharded by TP or EP before."""
    module = torch.nn.Module()
    for name, value in values.items():
        value = value.clone()
        if other_mesh is not None:
            value = distribute_tensor(value, other_mesh, [other[name]])
        module.register_parameter(name, torch.nn.Parameter(value))
    fully_shard(
        module, mesh=fsdp_mesh, shard_placement_fn=lambda param: Shard(fsdp_dim)
    )
    return dict(module.named_parameters())


def sharded_parameter(value, mesh, placements):
    """A parameter of any placements, stored as DTensor's arithmetic says."""
    here = stored_index(value.shape, mesh, mesh.get_coordinate(), placements)
    return torch.nn.Parameter(
        DTensor.from_local(
            value[here].clone(memory_format=torch.contiguous_format),
            mesh,
            placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    )


def build(params, shardings, buckets=(("*",),)):
    return build_dist_muon(
        [{"params": list(params.values()), "param_names": list(params)}],
        compute_sharding_by_fqn=dict.fromkeys(params, ComputeLayout(shardings)),
        bucket_configs=[BucketConfig(patterns=patterns) for patterns in buckets],
        **HYPERPARAMETERS,
    )


class Exchanges:
    """The ranks of every packed all-to-all; any other collective is an error."""

    def __enter__(self):
        self.ranks = []
        all_to_all_single = dist.all_to_all_single

        def record(*args, group, **kwargs):
            self.ranks.append(dist.get_process_group_ranks(group))
            return all_to_all_single(*args, group=group, **kwargs)

        self.patch = mock.patch.object(dist, "all_to_all_single", record)
        self.debug = CommDebugMode()
        self.patch.start()
        self.debug.__enter__()
        return self

    def __exit__(self, *exception):
        self.debug.__exit__(*exception)
        self.patch.stop()
        if not any(exception):
            assert self.debug.get_total_counts() == len(self.ranks), (
                self.debug.get_comm_counts()
            )


class TestJointAxesOnCPU(MultiProcContinuousTest):
    world_size = 4

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def _mesh(self, *names):
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)

    def _assert_follows_plain_muon(self, params, optimizer, values, *, exchanges, rtol):
        """Step both with the same gradients and compare what this rank stores."""
        matrices = {
            name: [
                torch.nn.Parameter(m.clone()) for m in value.view(-1, *value.shape[-2:])
            ]
            for name, value in values.items()
        }
        plain = torch.optim.Muon(
            list(itertools.chain(*matrices.values())), **HYPERPARAMETERS
        )
        placements = {name: param.placements for name, param in params.items()}
        shapes = {name: value.shape for name, value in values.items()}
        for step in range(NUM_STEPS):
            for name, grad in draw(shapes, seed=step + 1).items():
                param = params[name]
                param.grad = DTensor.from_local(
                    grad[local_index(param)].contiguous(),
                    param.device_mesh,
                    param.placements,
                    run_check=False,
                    shape=param.shape,
                    stride=param.stride(),
                )
                for matrix, part in zip(
                    matrices[name], grad.view(-1, *grad.shape[-2:])
                ):
                    matrix.grad = part.clone()
            before = {n: p.to_local().detach().clone() for n, p in params.items()}
            old = {
                n: torch.stack([m.detach().clone() for m in ms])
                for n, ms in matrices.items()
            }
            with Exchanges() as seen:
                optimizer.step()
            self.assertEqual(seen.ranks, exchanges)
            plain.step()
            for name, param in params.items():
                new = torch.stack([m.detach() for m in matrices[name]])
                if param.ndim == 2:
                    new, old[name] = new[0], old[name][0]
                here = local_index(param)
                expected, update = new[here], (new - old[name])[here]
                local = param.to_local().detach()
                self.assertEqual(local.shape, expected.shape)
                if rtol == 0:
                    self.assertTrue(torch.equal(local, expected), name)
                elif step == 0:
                    error = (local - before[name] - update).norm()
                    self.assertLessEqual(error, rtol * update.norm())
                self.assertEqual(param.placements, placements[name])
                momentum = optimizer.state[param]["momentum_buffer"]
                self.assertEqual(momentum.placements, placements[name])
                self.assertEqual(momentum.to_local().shape, local.shape)
        for name, param in params.items():
            expected = torch.stack([m.detach() for m in matrices[name]])
            expected = (expected[0] if param.ndim == 2 else expected)[
                local_index(param)
            ]
            torch.testing.assert_close(
                param.to_local().detach(), expected, rtol=0, atol=1e-4 if rtol else 0
            )

    def test_regions_are_what_fsdp2_stores(self):
        mesh = self._mesh("dp_shard", "tp")
        shapes = {
            f"{rows}x{columns}": (rows, columns)
            for rows in (1, 2, 3, 5, 6, 7)
            for columns in (1, 3, 4, 5)
        }
        values = draw(shapes, seed=0)
        for tp in (Shard(0), Shard(1), Replicate()):
            params = fsdp_parameters(
                values, mesh["dp_shard"], mesh["tp"], dict.fromkeys(values, tp)
            )
            for name, param in params.items():
                expected = values[name][local_index(param)]
                self.assertEqual(param.device_mesh.mesh_dim_names, ("dp_shard", "tp"))
                self.assertTrue(torch.equal(param.to_local(), expected), (name, tp))

    def test_tensor_parallel(self):
        # Neither rows nor columns divide by two in both; one row is less than two ranks.
        mesh = self._mesh("dp_shard", "tp")
        shapes = {
            "column_wise.a": (5, 7),
            "column_wise.b": (6, 5),
            "row_wise.a": (5, 7),
            "row_wise.b": (6, 5),
            "replicated.a": (5, 7),
            "replicated.one_row": (1, 6),
        }
        shapes = {name.replace(".", "_"): shape for name, shape in shapes.items()}
        values = draw(shapes, seed=0)
        tp = {
            name: Shard(0)
            if name.startswith("column")
            else Shard(1)
            if name.startswith("row")
            else Replicate()
            for name in shapes
        }
        params = fsdp_parameters(values, mesh["dp_shard"], mesh["tp"], tp)
        self.assertIs(type(params["column_wise_a"].placements[0]), _StridedShard)
        buckets = (("column*", "row_wise_a"), ("row_wise_b", "replicated*"))
        with mock.patch.object(
            DeviceMesh, "_flatten", autospec=True, side_effect=DeviceMesh._flatten
        ) as flatten:
            optimizer = build(params, {"dp_shard": Owned(), "tp": Owned()}, buckets)
        self.assertEqual(flatten.call_count, 1)
        self._assert_follows_plain_muon(
            params, optimizer, values, exchanges=[[0, 1, 2, 3]] * 4, rtol=0
        )

    def test_experts_sharded_on_their_rows(self):
        # efsdp * ep > experts: one expert an EP rank, so that one of two efsdp ranks
        # has none to compute; and three, which do not divide.
        mesh = self._mesh("efsdp", "ep")
        for num_experts in (2, 6):
            shapes = {"w1": (num_experts, 4, 6), "w2": (num_experts, 6, 4)}
            values = draw(shapes, seed=0)
            params = fsdp_parameters(
                values,
                mesh["efsdp"],
                mesh["ep"],
                dict.fromkeys(shapes, Shard(0)),
                fsdp_dim=1,
            )
            self.assertEqual(params["w1"].placements, (Shard(1), Shard(0)))
            optimizer = build(params, {"efsdp": Shard(0), "ep": Shard(0)})
            # Over the one axis needed: the ranks that share my experts.
            group = dist.get_process_group_ranks(mesh["efsdp"].get_group())
            self._assert_follows_plain_muon(
                params, optimizer, values, exchanges=[group] * 2, rtol=1e-2
            )

    def test_replicas(self):
        mesh = self._mesh("dp_replicate", "dp_shard")
        shapes = {"a": (5, 7), "b": (6, 5), "c": (1, 6)}
        values = draw(shapes, seed=0)
        params = fsdp_parameters(values, mesh)
        optimizer = build(params, {"dp_shard": Owned()})
        group = dist.get_process_group_ranks(mesh["dp_shard"].get_group())
        self._assert_follows_plain_muon(
            params, optimizer, values, exchanges=[group] * 2, rtol=0
        )
        for param in params.values():
            local = param.to_local().detach()
            other = local.clone()
            dist.broadcast(other, group=mesh["dp_replicate"].get_group(), group_src=0)
            self.assertTrue(torch.equal(local, other))


class TestJointAxesRuntime(MultiThreadedTestCase):
    """Buckets of several matrices, on four ranks that are threads."""

    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def _assert_equals_plain_muon(self, mesh, matrices, buckets=(("*",),)):
        """``matrices``: a shape and the placements by name; the updates must be bitwise."""
        shapes = {name: shape for name, (shape, _) in matrices.items()}
        values = draw(shapes, seed=0)
        params = {
            name: sharded_parameter(value, mesh, matrices[name][1])
            for name, value in values.items()
        }
        optimizer = build(params, dict.fromkeys(mesh.mesh_dim_names, Owned()), buckets)
        plain_params = {n: torch.nn.Parameter(v.clone()) for n, v in values.items()}
        plain = torch.optim.Muon(list(plain_params.values()), **HYPERPARAMETERS)
        for step in range(2):
            for name, grad in draw(shapes, seed=step + 1).items():
                param = params[name]
                param.grad = sharded_parameter(grad, mesh, param.placements).detach()
                plain_params[name].grad = grad
            optimizer.step()
            plain.step()
        for name, param in params.items():
            here = stored_index(
                param.shape, mesh, mesh.get_coordinate(), param.placements
            )
            expected = plain_params[name].detach()[here]
            self.assertTrue(
                torch.equal(param.to_local().detach(), expected), (name, matrices)
            )

    def test_two_matrices_of_one_owner(self):
        # Three matrices have an owner each, so that the fourth rank has "a" and "b". Two
        # ranks hold each shard of "a", which therefore returns to more than send it.
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        large = {f"large{i}": ((8, 16 + i), (Shard(0), Shard(1))) for i in range(3)}
        self._assert_equals_plain_muon(
            mesh,
            {
                "a": ((4, 4), (Shard(0), Replicate())),
                "b": ((4, 6), (Shard(0), Shard(1))),
                **large,
            },
        )

    def test_one_owner_among_shards_and_replicas(self):
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")
        )
        sizes = [(5, 7), (3, 3), (7, 9), (1, 6), (9, 5), (6, 5), (2, 9)]
        matrices = {
            f"{index}": (shape, (Replicate(), Shard(0)))
            for index, shape in enumerate(sizes)
        }
        self._assert_equals_plain_muon(mesh, matrices)

    def _draw_placements(self, random_, mesh, shape):
        """Any placements that are not refused: what is stored must be one rectangle."""
        while True:
            second = random_.choice([Replicate(), Shard(0), Shard(1)])
            first = random_.choice(
                [
                    Replicate(),
                    Shard(0),
                    Shard(1),
                    *(_StridedShard(d, split_factor=mesh.size(1)) for d in (0, 1)),
                ]
            )
            placements = (first, second)
            if type(first) is _StridedShard:
                if second != Shard(first.dim):
                    continue
                case = (shape[first.dim], placements, tuple(mesh.shape))
                runs = {
                    at: (_stored_runs(*case, at), _fsdp_stored_runs(*case, at))
                    for at in itertools.product(*map(range, mesh.shape))
                }
                if any(len(r) > 1 or r != fsdp for r, fsdp in runs.values()):
                    continue
            return placements

    def test_any_mixture(self):
        """Drawn matrices, sizes that do not divide, and one to three buckets."""
        meshes = [
            init_device_mesh("cpu", sizes, mesh_dim_names=names)
            for names in (("dp_shard", "tp"), ("dp_replicate", "dp_shard"))
            for sizes in ((2, 2), (4, 1), (1, 4))
        ]
        for seed in range(40):
            random_ = random.Random(seed)
            mesh = random_.choice(meshes)
            # Equal matrices may be computed as a batch, which rounds differently.
            sides = list(itertools.product(range(1, 10), repeat=2))
            num_buckets = random_.randint(1, 3)
            matrices = {
                f"{random_.randrange(num_buckets)}.{number}": (
                    shape,
                    self._draw_placements(random_, mesh, shape),
                )
                for number, shape in enumerate(
                    random_.sample(sides, random_.randint(2, 9))
                )
            }
            buckets = [(f"{b}.*",) for b in sorted({name[0] for name in matrices})]
            self._assert_equals_plain_muon(mesh, matrices, buckets)


class TestJointGroups(MultiThreadedTestCase):
    """Two pipeline stages of four ranks, of which one alone has matrices."""

    world_size = 8

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def _build_on_first_stage(self, stage, mesh):
        if stage == 0:
            value = torch.ones(4, 6)
            param = sharded_parameter(value, mesh, (Shard(0), Shard(1)))
            build({"p": param}, dict.fromkeys(mesh.mesh_dim_names, Owned()))

    def _assert_same_groups(self):
        # A group of all ranks works only if all have made as many before.
        group = dist.new_group(range(self.world_size))
        names = [None] * self.world_size
        dist.all_gather_object(names, group.group_name)
        self.assertEqual(len(set(names)), 1, names)
        total = torch.ones(())
        dist.all_reduce(total, group=group)
        self.assertEqual(total.item(), self.world_size)

    def test_parallel_dims_make_them_on_every_stage(self):
        for spmd_backend in ("spmd_types", "full_dtensor", "partial_dtensor"):
            dims = ParallelDims(
                dp_replicate=1,
                dp_shard=2,
                cp=1,
                tp=2,
                pp=2,
                ep=1,
                world_size=8,
                spmd_backend=spmd_backend,
            )
            with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):
                dims.build_mesh()
            dp = "fsdp" if spmd_backend == "partial_dtensor" else "dp_shard"
            joint = dims.get_mesh(f"{dp}_tp")
            self.assertEqual(joint.size(), 4)
            self.assertIn(f"{dp}_tp", dims.get_all_one_dimensional_meshes())
            self._build_on_first_stage(
                dims.get_mesh("pp").get_local_rank(), dims.get_mesh([dp, "tp"])
            )
            self._assert_same_groups()

    def test_context_parallel_shards_too(self):
        dims = ParallelDims(
            dp_replicate=1,
            dp_shard=2,
            cp=2,
            tp=1,
            pp=2,
            ep=1,
            world_size=8,
            spmd_backend="full_dtensor",
        )
        with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):
            dims.build_mesh()
        self._build_on_first_stage(
            dims.get_mesh("pp").get_local_rank(), dims.get_mesh(["dp_shard", "cp"])
        )
        self._assert_same_groups()

    def test_groups_that_not_all_ranks_would_make_are_refused(self):
        mesh = init_device_mesh(
            "cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp")
        )
        stage = mesh.get_local_rank("pp")
        stage_mesh = mesh["dp_shard", "tp"]
        if stage == 0:
            with self.assertRaisesRegex(
                RuntimeError,
                r"'p' is redistributed over mesh axes \['dp_shard', 'tp'\] together.*all 8 "
                r"ranks.*on 4 of them.*mesh\[\('dp_shard', 'tp'\)\]\._flatten\(\)",
            ):
                self._build_on_first_stage(stage, stage_mesh)
        self._assert_same_groups()
        stage_mesh._flatten()
        self._build_on_first_stage(stage, stage_mesh)
        self._assert_same_groups()


class TestJointGroupsOfFSDP(unittest.TestCase):
    def test_parameters_are_redistributed_in_the_groups_that_exist(self):
        """On rank 0 of a pipeline, for each way in which FSDP2 gets its mesh."""
        cases = itertools.product(
            ("spmd_types", "full_dtensor", "partial_dtensor"),
            ((1, 2, 1), (2, 2, 1), (1, 2, 2)),  # dp_replicate, dp_shard, cp
        )
        for number, (spmd_backend, sizes) in enumerate(cases):
            with self.subTest(spmd_backend=spmd_backend, sizes=sizes):
                world_size = 2 * math.prod(sizes) * 2
                dist.init_process_group(
                    "fake", store=FakeStore(), rank=0, world_size=world_size
                )
                try:
                    shape = (8, 8 + 2 * number)
                    self._check(spmd_backend, *sizes, world_size, shape=shape)
                finally:
                    dist.destroy_process_group()

    def _check(self, spmd_backend, dp_replicate, dp_shard, cp, world_size, *, shape):
        dims = ParallelDims(
            dp_replicate=dp_replicate,
            dp_shard=dp_shard,
            cp=cp,
            tp=2,
            pp=2,
            ep=1,
            world_size=world_size,
            spmd_backend=spmd_backend,
        )
        with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):
            dims.build_mesh()
        if spmd_backend == "partial_dtensor":
            tp_mesh, placements = dims.get_mesh("tp"), [Shard(1)]
            fsdp = {"mesh": dims.get_activated_mesh(["dp_replicate", "fsdp"])}
            joint = dims.get_mesh("fsdp_tp")
        else:
            tp_mesh, dp_mesh_dims = resolve_fsdp_mesh(dims)
            placements = [Replicate()] * (tp_mesh.ndim - 1) + [Shard(1)]
            fsdp = {"mesh": tp_mesh, "dp_mesh_dims": dp_mesh_dims}
            joint = dims.get_mesh("dp_shard_cp_tp" if cp > 1 else "dp_shard_tp")
        module = torch.nn.Module()
        module.p = torch.nn.Parameter(
            distribute_tensor(torch.zeros(shape), tp_mesh, placements)
        )
        fully_shard(module, **fsdp)
        axes = set(module.p.device_mesh.mesh_dim_names) - {"dp_replicate"}
        with mock.patch.object(
            dist_muon._BucketedRedistributionRuntime, "reserve_buffers"
        ), mock.patch.object(dist_muon.DistMuon, "_validate_plan_across_ranks"):
            optimizer = build({"p": module.p}, dict.fromkeys(axes, Owned()))
        self.assertIs(optimizer._specs[0].mesh, joint)


def stored_index(shape, mesh, at, placements):
    """What the rank at a mesh coordinate stores, by DTensor's own arithmetic."""
    lengths, offsets = _compute_local_shape_and_global_offset(
        shape, mesh.shape, at, placements
    )
    lengths = list(lengths)
    if 0 in lengths:  # FSDP2 narrows what is empty along the dimension that it shards
        lengths[next(p.dim for p in placements if not p.is_replicate())] = 0
    return tuple(slice(o, o + length) for o, length in zip(offsets, lengths))


def plan(shape, mesh, placements, shardings):
    """DistMuon's bucket plan for one parameter, on whatever rank this is."""
    # The mesh has some of the ranks, so that joint groups must be made before.
    mesh[tuple(shardings)]._flatten()
    param = sharded_parameter(torch.zeros(shape), mesh, placements)
    with mock.patch.object(dist_muon._BucketedRedistributionRuntime, "reserve_buffers"):
        (bucket,) = build({"p": param}, shardings)._bucket_plans
    return param, bucket


def redistribute(plan, direction, tensors):
    """Play the packed all-to-all of all ranks; each element must arrive exactly once."""
    schedules = {
        rank: _build_packed_all_to_all_schedule(
            (plan,), direction=direction, process_group=None, local_participant=rank
        )
        for rank in plan.participants
    }
    packed = {}
    for rank, schedule in schedules.items():
        buffer = torch.full((schedule.input_buffer_numel,), torch.nan)
        for span in schedule.input_spans_by_parameter[0]:
            part = buffer[span.buffer_offset :][: span.numel]
            part.copy_(tensors[rank][index(span.region)].flatten())
        packed[rank] = buffer.split(schedule.input_split_sizes)
    received = {}
    for number, (rank, schedule) in enumerate(schedules.items()):
        parts = [packed[peer][number] for peer in plan.participants]
        assert [p.numel() for p in parts] == schedule.output_split_sizes
        buffer = torch.cat(parts)
        forward = direction is _RedistributionDirection.STORAGE_TO_COMPUTE
        partition = plan.compute_partition if forward else plan.storage_partition
        received[rank] = torch.full(partition(rank).tensor_shape, torch.nan)
        writes = torch.zeros_like(received[rank])
        for span in schedule.output_spans_by_parameter[0]:
            part = buffer[span.buffer_offset :][: span.numel]
            received[rank][index(span.region)] = part.view(span.region.shape)
            writes[index(span.region)] += 1
        assert bool((writes == 1).all()), f"rank {rank} got {writes}"
    return received


class TestJointAxesPlan(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        store = FakeStore()
        dist.init_process_group("fake", store=store, rank=0, world_size=24)
        cls.addClassCleanup(dist.destroy_process_group)

    def _check(self, shape, mesh, placements, shardings, axes, compute):
        """Play one parameter; return what each rank of the group computes on."""
        param, bucket = plan(shape, mesh, placements, shardings)
        coordinate = mesh.get_coordinate()
        joint = [
            slice(None) if name in axes else c
            for name, c in zip(mesh.mesh_dim_names, coordinate)
        ]
        self.assertEqual(
            sorted(bucket.group.participants),
            sorted(mesh.mesh[tuple(joint)].flatten().tolist()),
        )

        whole = torch.arange(float(math.prod(shape))).view(shape)
        stored = {}
        for rank in bucket.group.participants:
            (at,) = (mesh.mesh == rank).nonzero().tolist()
            stored[rank] = whole[stored_index(shape, mesh, at, placements)]
        (item_plan,) = bucket.redistribution_plans
        computed = redistribute(
            item_plan, _RedistributionDirection.STORAGE_TO_COMPUTE, stored
        )
        returned = redistribute(
            item_plan, _RedistributionDirection.COMPUTE_TO_STORAGE, computed
        )
        for rank in stored:
            self.assertTrue(torch.equal(returned[rank], stored[rank]))
        compute(whole, stored, computed)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(st.data())
    def test_one_owner_of_the_joint_group(self, data):
        sizes = [
            data.draw(st.integers(1, 2)),
            data.draw(st.integers(1, 3)),
            data.draw(st.integers(1, 3)),
        ]
        if sizes[1] * sizes[2] == 1:
            sizes[1] = 2
        names = ("dp_replicate", "dp_shard", "tp")
        ranks = data.draw(st.permutations(range(math.prod(sizes))))
        mesh = DeviceMesh("cpu", torch.tensor(ranks).view(sizes), mesh_dim_names=names)
        shape = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
        tp = data.draw(st.sampled_from([Shard(0), Shard(1), Replicate()]))
        dp = Shard(0)
        if tp == Shard(0) and sizes[2] > 1:
            dp = _StridedShard(0, split_factor=sizes[2])
        if type(dp) is _StridedShard:
            for at in itertools.product(range(sizes[1]), range(sizes[2])):
                case = (shape[0], (dp, tp), sizes[1:], at)
                assume(_stored_runs(*case) == _fsdp_stored_runs(*case))
        axes = [n for n, size in zip(names, sizes) if n != "dp_replicate" and size > 1]

        def one_rank_computes_the_whole(whole, stored, computed):
            owned = [tensor for tensor in computed.values() if tensor.numel()]
            self.assertEqual(len(owned), 1)
            self.assertTrue(torch.equal(owned[0], whole))

        self._check(
            shape,
            mesh,
            (Replicate(), dp, tp),
            {"dp_shard": Owned(), "tp": Owned()},
            axes,
            one_rank_computes_the_whole,
        )

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(st.data())
    def test_whole_experts_of_each_expert_parallel_rank(self, data):
        sizes = [
            data.draw(st.integers(1, 2)),
            data.draw(st.integers(2, 4)),
            data.draw(st.integers(1, 3)),
        ]
        names = ("dp_replicate", "efsdp", "ep")
        ranks = data.draw(st.permutations(range(math.prod(sizes))))
        mesh = DeviceMesh("cpu", torch.tensor(ranks).view(sizes), mesh_dim_names=names)
        shape = tuple(data.draw(st.integers(1, 6)) for _ in range(3))
        efsdp = data.draw(st.sampled_from([Shard(1), Shard(2), Replicate()]))

        def whole_experts_are_shared_out(whole, stored, computed):
            ep_coordinate = mesh.get_coordinate()[2]
            length, offset = Shard.local_shard_size_and_offset(
                shape[0], sizes[2], ep_coordinate
            )
            own = whole[offset : offset + length]
            if not own.numel():  # fewer experts than EP ranks
                self.assertFalse(any(t.numel() for t in computed.values()))
                return
            self.assertTrue(all(len(t) == len(own) for t in stored.values()))
            parts = [computed[rank] for rank in sorted(computed)]
            self.assertTrue(torch.equal(torch.cat(parts), own))
            largest = -(-len(own) // sizes[1])
            self.assertTrue(all(len(part) <= largest for part in parts))

        self._check(
            shape,
            mesh,
            (Replicate(), efsdp, Shard(0)),
            {"efsdp": Shard(0), "ep": Shard(0)},
            ["efsdp"],
            whole_experts_are_shared_out,
        )

    def test_experts_of_the_upstream_report(self):
        # Four experts on FSDP 2 x EP 4: FSDP shards each EP rank's one expert by rows.
        mesh = DeviceMesh(
            "cpu", torch.arange(8).view(2, 4), mesh_dim_names=("efsdp", "ep")
        )
        _, bucket = plan(
            (4, 8, 8), mesh, (Shard(1), Shard(0)), {"efsdp": Shard(0), "ep": Shard(0)}
        )
        (item_plan,) = bucket.redistribution_plans
        self.assertEqual(item_plan.participants, (0, 4))
        self.assertEqual(
            [p.tensor_shape for p in item_plan.compute_partitions],
            [(1, 8, 8), (0, 8, 8)],
        )
        # Rank 4 sends its half of the expert and gets it back; rank 0's half stays.
        self.assertEqual(
            bucket.storage_to_compute_schedule.output_split_sizes, [32, 32]
        )
        self.assertEqual(bucket.compute_to_storage_schedule.input_split_sizes, [32, 32])

    def test_indices_stored_along_one_dimension(self):
        """As DTensor's arithmetic says, and as FSDP2 stores them, or refused."""
        refused = set()
        for size, tp, dp in itertools.product(range(1, 16), (1, 2, 3, 4), (1, 2, 3)):
            placements = (_StridedShard(0, split_factor=tp), Shard(0))
            for at in itertools.product(range(dp), range(tp)):
                case = (size, placements, (dp, tp), at)
                runs = _stored_runs(*case)
                (length,), (first,) = _compute_local_shape_and_global_offset(
                    (size,), (dp, tp), at, placements
                )
                self.assertEqual(_num_indices(runs), length)
                self.assertTrue(not length or runs[0][0] == first)

                # FSDP2 cuts the part that tensor parallelism has left.
                length, start = Shard.local_shard_size_and_offset(size, tp, at[1])
                length, first = Shard.local_shard_size_and_offset(length, dp, at[0])
                (run,) = _fsdp_stored_runs(*case)
                self.assertEqual(run[1] - run[0], length)
                self.assertTrue(not length or run[0] == start + first)

                if runs != [run] and (length or _num_indices(runs)):
                    refused.add((size, tp, dp))
        self.assertIn((7, 2, 3), refused)  # another rank's row
        self.assertIn((13, 2, 3), refused)  # rows apart
        self.assertFalse([case for case in refused if case[0] % case[1] == 0])
        self.assertFalse([case for case in refused if case[1:] == (2, 2)])

    def _refused(
        self,
        message,
        shape,
        sizes,
        names,
        placements,
        shardings,
        error=NotImplementedError,
    ):
        mesh = DeviceMesh(
            "cpu", torch.arange(math.prod(sizes)).view(sizes), mesh_dim_names=names
        )
        with self.assertRaisesRegex(error, message):
            plan(shape, mesh, placements, shardings)

    def test_what_is_refused_names_axes_sizes_and_what_fits(self):
        dp_tp = ("dp_shard", "tp")
        self._refused(
            r"over mesh axes 'dp_shard' \(size 2\).*Shard\(dim=1\) on mesh axis 'tp' \(size 3\); "
            r"declare that axis in its ComputeLayout as well, or store the parameter as Replicate on it",
            (4, 6),
            (2, 3),
            dp_tp,
            (Shard(0), Shard(1)),
            {"dp_shard": Owned()},
        )
        self._refused(
            r"over mesh axes 'efsdp' \(size 2\).*Shard\(dim=1\) on mesh axis 'tp' \(size 3\).*Replicate or Shard\(0\)",
            (4, 6, 6),
            (2, 3),
            ("efsdp", "tp"),
            (Shard(2), Shard(1)),
            {"efsdp": Shard(0)},
        )
        # 13 rows: tp cuts 7 + 6, of which dp_shard gives its last rank 1 + 2 rows.
        self._refused(
            r"dimension 0 sharded over mesh axes \['dp_shard', 'tp'\] of sizes \[3, 2\].*"
            r"rank at \(2, 0\) has the index ranges \[\(6, 7\), \(11, 12\)\] by.*"
            r"\[\(6, 7\)\] as FSDP2 stores them; .* divisible by 6",
            (13, 4),
            (3, 2),
            dp_tp,
            (_StridedShard(0, split_factor=2), Shard(0)),
            dict.fromkeys(dp_tp, Owned()),
        )
        # 7 rows: tp cuts 4 + 3, and FSDP2 gives the last of 3 ranks 0 + 1 rows, of
        # which the placements give tp's first rank the one.
        self._refused(
            r"index ranges \[\(6, 7\)\] by the placements .*\[\(4, 4\)\] as FSDP2",
            (7, 4),
            (3, 2),
            dp_tp,
            (_StridedShard(0, split_factor=2), Shard(0)),
            dict.fromkeys(dp_tp, Owned()),
        )
        self._refused(
            r"got Shard\(dim=1\) on mesh axis 'tp' of size 2; Owned\(\) on all sharded mesh axes",
            (8, 4),
            (2, 2),
            dp_tp,
            (Shard(0), Shard(1)),
            {"dp_shard": BlockShard(0, 4)},
            ValueError,
        )

    def test_one_bucket_has_one_transport_group(self):
        mesh = DeviceMesh(
            "cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp_shard", "tp")
        )
        params = {
            name: torch.nn.Parameter(
                DTensor.from_local(
                    torch.zeros(2, 2),
                    mesh,
                    placements,
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=(shape[1], 1),
                )
            )
            for name, placements, shape in (
                ("both", (Shard(0), Shard(1)), (4, 4)),
                ("one", (Shard(0), Replicate()), (4, 2)),
            )
        }
        mesh._flatten()
        layouts = {
            "both": ComputeLayout({"dp_shard": Owned(), "tp": Owned()}),
            "one": ComputeLayout({"dp_shard": Owned()}),
        }
        with self.assertRaisesRegex(
            NotImplementedError,
            r"'both' is exchanged over mesh axes \['dp_shard', 'tp'\] \(size 4\), "
            r"'one' over \['dp_shard'\] \(size 2\); split its BucketConfig patterns",
        ):
            build_dist_muon(
                [{"params": list(params.values()), "param_names": list(params)}],
                compute_sharding_by_fqn=layouts,
                bucket_configs=[BucketConfig(patterns=("*",), name="all")],
            )


if __name__ == "__main__":
    unittest.main()
