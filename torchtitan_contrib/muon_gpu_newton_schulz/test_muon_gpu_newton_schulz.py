# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""DistMuon with parameters on the host and Newton-Schulz on the compute device.

On gloo the compute device is the CPU: the same code, with streams that do nothing,
must then give bitwise what DistMuon gives without offload.
"""

import copy
import shutil
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, OffloadPolicy
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.components.checkpoint_utils import (
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.flex_shard import (
    BlockShard,
    BucketConfig,
    build_dist_muon,
    ComputeLayout,
    Owned,
)
from torchtitan.distributed.flex_shard import _muon_host_offload
from torchtitan.distributed.flex_shard._host_offload import _UpdateSplit
from torchtitan.distributed.flex_shard._host_passes import HostPasses

SPLITS = [split.value for split in _UpdateSplit]
BLOCK_ROWS = 4
GROUPS = (
    {"lr": 0.03, "weight_decay": 0.2, "momentum": 0.8},
    {"lr": 0.01, "weight_decay": 0.0, "momentum": 0.95, "nesterov": False},
)
# Rows that do not divide, an empty shard, blocks split by the border of the shards,
# stacks of several experts, and a group of its own.
VALUES = {
    "uneven": (5, 7),
    "one_row": (1, 6),
    "blocks": (3 * BLOCK_ROWS, 5),
    "experts_a": (4, 3, 6),
    "experts_b": (6, 3, 6),
    "other_group": (4, 3, 6),
}
COMPUTE = {
    "uneven": Owned(),
    "one_row": Owned(),
    "blocks": BlockShard(dim=0, block_size=BLOCK_ROWS),
    "experts_a": Shard(0),
    "experts_b": Shard(0),
    "other_group": Shard(0),
}


def whole_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in VALUES.items()
    }


def build(mesh, values, **kwargs):
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    params = {
        name: nn.Parameter(distribute_tensor(value.clone(), mesh, placements))
        for name, value in values.items()
    }
    names = [[n for n in params if n != "other_group"], ["other_group"]]
    optimizer = build_dist_muon(
        [
            {"params": [params[n] for n in group_names], "param_names": group_names}
            | settings
            for group_names, settings in zip(names, GROUPS)
        ],
        compute_sharding_by_fqn={
            name: ComputeLayout({"dp_shard": sharding})
            for name, sharding in COMPUTE.items()
        },
        bucket_configs=[BucketConfig(patterns=("*",), name="all")],
        matrices_per_batch=2,
        **kwargs,
    )
    return params, optimizer


def set_gradients(params, seed, scale=1.0):
    for name, grad in whole_tensors(seed).items():
        param = params[name]
        param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad.mul_(scale)


def tensors_of(params, optimizer):
    """Local parameters and momentum."""
    return [p.detach().to_local() for p in params.values()] + [
        optimizer.state[p]["momentum_buffer"].to_local() for p in params.values()
    ]


class SpawnedTest(MultiProcContinuousTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # A fork would inherit an OpenMP pool without its threads, and hang, where
        # tests before this one have used the pool.
        torch.multiprocessing.set_start_method("spawn", force=True)


class TestOnCPU(SpawnedTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def _assert_equal(self, tensors, expected):
        for tensor, reference in zip(tensors, expected, strict=True):
            self.assertTrue(torch.equal(tensor, reference))

    def _mesh(self):
        return init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))

    def _train(self, steps=4, *, reload_after=None, **kwargs):
        mesh = self._mesh()
        params, optimizer = build(mesh, whole_tensors(0), **kwargs)
        for step in range(steps):
            if step == reload_after:
                state = get_flat_optim_state_dict(optimizer)
                values = {n: p.detach().full_tensor() for n, p in params.items()}
                params, optimizer = build(mesh, values, **kwargs)
                init_optim_state(optimizer)
                load_flat_optim_state_dict(optimizer, state)
            set_gradients(params, step + 1)
            optimizer.step()
            for group in optimizer.param_groups:  # a schedule changes the groups
                group["lr"] *= 0.9
        return params, optimizer

    def test_each_split_equals_no_offload(self):
        expected = tensors_of(*self._train())
        for split in SPLITS:
            got = tensors_of(*self._train(host_offload=True, update_split=split))
            self._assert_equal(got, expected)

    def test_checkpoint(self):
        expected = tensors_of(*self._train())
        for kwargs in ({}, {"host_offload": True}):
            self._assert_equal(
                tensors_of(*self._train(reload_after=2, **kwargs)), expected
            )

    def test_state_moves_between_offloaded_and_not(self):
        params, optimizer = self._train(steps=2)
        offloaded_params, offloaded = build(
            self._mesh(),
            {n: p.detach().full_tensor() for n, p in params.items()},
            host_offload=True,
        )
        init_optim_state(offloaded)
        # A checkpoint holds copies; a state dict shares its tensors.
        state = copy.deepcopy(get_flat_optim_state_dict(optimizer))
        load_flat_optim_state_dict(offloaded, state)
        for each, its_params in ((optimizer, params), (offloaded, offloaded_params)):
            set_gradients(its_params, seed=9)
            each.step()
        self._assert_equal(
            tensors_of(offloaded_params, offloaded), tensors_of(params, optimizer)
        )

    def test_bfloat16_momentum(self):
        for split in SPLITS:
            options = {"host_offload": True, "update_split": split}
            params, optimizer = self._train(**options, momentum_dtype="bfloat16")
            wide_params, wide = self._train(**options)
            for name, param in params.items():
                momentum = optimizer.state[param]["momentum_buffer"]
                self.assertEqual(momentum.dtype, torch.bfloat16)
                reference = wide.state[wide_params[name]]["momentum_buffer"]
                torch.testing.assert_close(
                    momentum.to_local().float(),
                    reference.to_local(),
                    rtol=0.02,
                    atol=0.02,
                )
            # Optimizer.load_state_dict casts momentum to float32; the next step undoes it.
            optimizer.load_state_dict(optimizer.state_dict())
            set_gradients(params, seed=9)
            optimizer.step()
            for param in params.values():
                momentum = optimizer.state[param]["momentum_buffer"]
                self.assertEqual(momentum.to_local().dtype, torch.bfloat16)

    def test_momentum_is_a_dtensor_in_storage_layout(self):
        params, optimizer = self._train(host_offload=True)
        for param in params.values():
            momentum = optimizer.state[param]["momentum_buffer"]
            self.assertIsInstance(momentum, DTensor)
            self.assertEqual(momentum.placements, param.placements)
            self.assertEqual(momentum.shape, param.shape)
            self.assertEqual(momentum.to_local().shape, param.to_local().shape)
            self.assertEqual(momentum.full_tensor().shape, param.shape)

    def test_scaled_gradients(self):
        # Clipping: a factor of the step equals a multiplication of the gradients. Each
        # parameter has its own, and some have none.
        names = list(VALUES)
        factors_by_step = (
            dict.fromkeys(names, 0.25),
            dict(zip(names, (0.5, 0.1, 0.3, 0.7))),
            dict(zip(names[2:], (0.9, 0.2, 0.6, 0.4))),
        )
        for split in SPLITS:
            results = []
            for folded in (False, True):
                params, optimizer = build(
                    self._mesh(),
                    whole_tensors(0),
                    host_offload=True,
                    update_split=split,
                )
                for step, factors in enumerate(factors_by_step):
                    set_gradients(params, step + 1)
                    before = [p.grad.to_local().clone() for p in params.values()]
                    for name, factor in factors.items():
                        if folded:
                            optimizer.scale_gradient(params[name], factor)
                        else:
                            params[name].grad.mul_(factor)
                    optimizer.step()
                    if folded:
                        self._assert_equal(
                            [p.grad.to_local() for p in params.values()], before
                        )
                # The factor is of one step.
                set_gradients(params, seed=9)
                optimizer.step()
                results.append(tensors_of(params, optimizer))
            self._assert_equal(*results)

    def _container(self, folded):
        """Two matrices with Muon and a vector with AdamW, on the host."""
        mesh = self._mesh()
        model = nn.ParameterDict(
            {
                name: nn.Parameter(
                    distribute_tensor(torch.ones(shape), mesh, [Shard(0)])
                )
                for name, shape in (("a", (4, 6)), ("b", (6, 4)), ("vector", (4,)))
            }
        )
        config = OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern="^[ab]$",
                    optimizer_name="DistMuon",
                    optimizer_kwargs={"lr": 0.1, "fused": False, "foreach": False},
                ),
                ParamGroupConfig(
                    pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1}
                ),
            ],
            implementation="for-loop",
            optimizer_factory_kwargs_by_name={
                "DistMuon": {
                    "compute_sharding_by_fqn": {
                        name: ComputeLayout({"dp_shard": Owned()}) for name in "ab"
                    },
                    "bucket_configs": [BucketConfig(patterns=("*",))],
                    "host_offload": folded or None,
                }
            },
        )
        return model, config.build(model_parts=[model])

    def test_clipping(self):
        # Each entry clips some parameters to a norm: the same as in place.
        cases = {
            "one after the other": [("a", 0.5), ("b", 0.1)],
            "only what AdamW has": [("vector", 0.1)],
            "all": [("ab,vector", 1.0)],
            "again": [("ab,vector", 2.0), ("a,vector", 0.5), ("ab", 0.25)],
            "nothing to do": [("ab", 1e6)],
            "a parameter without gradient": [("ab,none", 0.5)],
        }
        for name, clips in cases.items():
            results = []
            for folded in (False, True):
                model, container = self._container(folded)
                for step in range(2):
                    for index, param in enumerate(model.values()):
                        generator = torch.Generator().manual_seed(10 * step + index)
                        grad = torch.randn(param.shape, generator=generator)
                        param.grad = distribute_tensor(
                            grad, param.device_mesh, param.placements
                        )
                    norms = []
                    for names, max_norm in clips:
                        params = [
                            param
                            for key, param in model.items()
                            if key in names.replace("ab", "a,b").split(",")
                        ]
                        if "none" in names:
                            params.append(nn.Parameter(torch.ones(2)))
                        norms.append(
                            dist_utils.clip_grad_norm_(
                                params,
                                max_norm,
                                clipper=container if folded else None,
                            )
                        )
                    container.step()
                    container.zero_grad()
                momentum = container.optimizers[0].state
                results.append(
                    [p.detach().to_local() for p in model.values()]
                    + [
                        momentum[model[k]]["momentum_buffer"].to_local() for k in "ab"
                    ]
                    + norms
                )
            for got, expected in zip(*results, strict=True):
                torch.testing.assert_close(got, expected, msg=lambda m: f"{name}: {m}")

    def test_clipping_is_of_the_gradient_that_was_there(self):
        params, optimizer = build(self._mesh(), whole_tensors(0), host_offload=True)
        expected_params, expected = build(self._mesh(), whole_tensors(0))

        def check():
            set_gradients(expected_params, 1)
            expected.step()
            optimizer.step()
            self._assert_equal(
                tensors_of(params, optimizer), tensors_of(expected_params, expected)
            )

        # A step that was skipped: its factors go with its gradients.
        set_gradients(params, 5)
        optimizer.scale_gradient(params["blocks"], 0.1)
        optimizer.zero_grad()
        set_gradients(params, 1)
        check()
        set_gradients(params, 5)
        optimizer.scale_gradient(params["blocks"], 0.1)
        set_gradients(params, 1)  # by hand
        check()
        # Of a gradient to which a later backward adds, a part is not clipped.
        set_gradients(params, 5)
        optimizer.scale_gradient(params["blocks"], 0.1)
        local = params["blocks"].grad.to_local()
        local += 1
        before = tensors_of(params, optimizer)
        before = [tensor.clone() for tensor in before]
        with self.assertRaisesRegex(RuntimeError, "changed in place after it was clipped"):
            optimizer.step()
        self._assert_equal(tensors_of(params, optimizer), before)

    def _resume(self, folder, container, **others):
        manager = SimpleNamespace(states={"optimizer": container, **others})
        CheckpointManager.dcp_load(
            manager,
            dict(manager.states),
            checkpoint_id=folder,
            from_hf=False,
            from_quantized=False,
        )

    def test_a_checkpoint_keeps_the_split(self):
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        _, container = self._container(True)
        muon = container.optimizers[0]
        self.assertEqual(muon.update_split, "on_device")
        muon.restore_update_split("weight_on_host")  # as if it had been timed
        groups = [set(group) for group in muon.param_groups]
        dcp.save({"optimizer": container}, checkpoint_id=folder[0])
        _, resumed = self._container(True)
        self._resume(folder[0], resumed)
        self.assertEqual(resumed.optimizers[0].update_split, "weight_on_host")
        # It is no hyper-parameter.
        self.assertEqual([set(g) for g in resumed.optimizers[0].param_groups], groups)
        # What the user chose counts more.
        _, chosen = self._container(True)
        options = chosen.optimizers[0]._host_offload.options
        with mock.patch.object(
            chosen.optimizers[0]._host_offload,
            "options",
            type(options)(update_split="on_device"),
        ):
            self._resume(folder[0], chosen)
        self.assertEqual(chosen.optimizers[0].update_split, "on_device")
        # Without offload the key is not asked for.
        _, plain = self._container(False)
        dcp.load({"optimizer": plain}, checkpoint_id=folder[0])
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])

    def test_a_checkpoint_without_the_split_loads(self):
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        _, plain = self._container(False)
        dcp.save({"optimizer": plain}, checkpoint_id=folder[0])
        model, container = self._container(True)
        container.optimizers[0].restore_update_split("weight_on_host")
        with self.assertRaisesRegex(CheckpointException, "Missing key.*update_split"):
            dcp.load({"optimizer": container}, checkpoint_id=folder[0])
        self._resume(folder[0], container)
        self.assertEqual(container.optimizers[0].update_split, "weight_on_host")
        # Any other key must be there.
        with self.assertRaisesRegex(CheckpointException, "Missing key.*absent"):
            self._resume(folder[0], container, absent=torch.ones(1))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])

    def test_batches_fit_the_buffers(self):
        # Stacks of up to four matrices of 18 elements, and a limit of two a batch.
        limit = 2 * 18 * 3 * 14 / 2**30
        params, optimizer = self._train(
            host_offload=True, update_split="on_device", max_buffer_gib=limit
        )
        local = optimizer._batch_plan.local
        self.assertEqual({batch.num_matrices for batch in local}, {1, 2})
        _, unlimited = self._train(host_offload=True, update_split="on_device")
        self.assertEqual(
            sum(batch.num_matrices for batch in local),
            sum(batch.num_matrices for batch in unlimited._batch_plan.local),
        )
        # The same matrices, in smaller batches, whose products may round differently.
        for got, expected in zip(
            tensors_of(params, optimizer), tensors_of(*self._train()), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=0.01, atol=0.01)
        with self.assertLogs(_muon_host_offload.logger, "WARNING") as logs:
            build(
                self._mesh(), whole_tensors(0), host_offload=True, max_buffer_gib=1e-9
            )
        self.assertIn("largest matrix alone, of 18 elements", logs.output[0])

    def test_other_work_runs_before_the_step_ends(self):
        params, optimizer = build(self._mesh(), whole_tensors(0), host_offload=True)
        set_gradients(params, 1)
        calls = []
        finish = optimizer._host_offload.finish
        optimizer._host_offload.finish = lambda: (calls.append("finish"), finish())
        optimizer.step(meanwhile=lambda: calls.append("meanwhile"))
        self.assertEqual(calls, ["meanwhile", "finish"])

    def test_host_parameters_may_move(self):
        # FSDP pins host shards anew when a checkpoint is loaded.
        params, optimizer = self._train(host_offload=True)
        for param in params.values():
            param._local_tensor = param._local_tensor.clone()
        set_gradients(params, seed=9)
        optimizer.step()

    def test_update_is_orthogonal(self):
        # The singular values of five steps of this iteration lie in 0.68 to 1.14; a
        # step that skipped it would return the gradient's own, 0.1 to 10 here.
        mesh = self._mesh()
        gradient = torch.linalg.qr(torch.randn(4, 16, 16, dtype=torch.float64))[0]
        gradient = gradient * torch.logspace(-1, 1, 16, dtype=torch.float64)
        gradient = gradient.float().contiguous()
        for split in SPLITS:
            param = nn.Parameter(
                distribute_tensor(torch.zeros(4, 16, 16), mesh, [Shard(0)])
            )
            optimizer = build_dist_muon(
                [{"params": [param], "param_names": ["experts"]}],
                compute_sharding_by_fqn={
                    "experts": ComputeLayout({"dp_shard": Shard(0)})
                },
                bucket_configs=[BucketConfig(patterns=("*",))],
                lr=1.0,
                host_offload=True,
                update_split=split,
            )
            param.grad = distribute_tensor(gradient.clone(), mesh, [Shard(0)])
            optimizer.step()
            values = torch.linalg.svdvals(param.detach().to_local())
            self.assertGreater(values.min(), 0.6)
            self.assertLess(values.max(), 1.25)


class TestReplicas(SpawnedTest):
    world_size = 4

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def test_replicas_stay_equal(self):
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")
        )
        params, optimizer = build(mesh, whole_tensors(0), host_offload=True)
        for step in range(3):
            set_gradients(params, step + 1)
            optimizer.step()
        for tensor in tensors_of(params, optimizer):
            both = [torch.empty_like(tensor) for _ in range(2)]
            dist.all_gather(both, tensor.contiguous(), group=mesh.get_group(0))
            self.assertTrue(torch.equal(*both))

    def test_ranks_agree_on_what_each_measured(self):
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")
        )
        measured = [0.1 * 2**self.rank, 0.7 - 0.1 * self.rank]
        agreed = _muon_host_offload.agree(measured, [mesh], torch.device("cpu"))
        self.assertAlmostEqual(agreed[0], 1.5 / 4)
        self.assertAlmostEqual(agreed[1], 2.2 / 4)
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, agreed)
        self.assertEqual(everyone, [agreed] * self.world_size)


class TestArguments(unittest.TestCase):
    def setUp(self):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)

    def _build(self, **kwargs):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        return build(mesh, whole_tensors(0), **kwargs)[1]

    def test_unknown_values(self):
        with self.assertRaisesRegex(ValueError, "one of auto, .*on_device; got 'gpu'"):
            self._build(host_offload=True, update_split="gpu")
        with self.assertRaisesRegex(ValueError, "float32, bfloat16; got 'float16'"):
            self._build(host_offload=True, momentum_dtype="float16")
        for gib in (0, -1.0, float("nan")):
            with self.assertRaisesRegex(ValueError, "max_buffer_gib must be positive"):
                self._build(host_offload=True, max_buffer_gib=gib)

    def test_other_dtypes_than_float32_are_refused(self):
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            values = whole_tensors(0)
            values["experts_b"] = values["experts_b"].to(dtype)
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
            with self.assertRaisesRegex(
                ValueError, rf"1 have another dtype, the first experts_b \({dtype}\)"
            ):
                build(mesh, values, host_offload=True)

    def test_the_split_is_fixed_in_deterministic_mode(self):
        # The device is a CPU here, for which "auto" is never timed: pretend.
        offload = self._build(host_offload=True)._host_offload
        seconds = {split: 1.0 + index for index, split in enumerate(_UpdateSplit)}
        with (
            mock.patch.object(offload, "device", torch.device("meta")),
            mock.patch.object(offload, "_host_passes"),
            mock.patch.object(
                _muon_host_offload, "time_splits", return_value=seconds
            ) as time,
            mock.patch.object(
                _muon_host_offload, "agree", side_effect=lambda values, *_: [*values]
            ),
        ):
            self.assertIs(offload._choose_split(), min(seconds, key=seconds.get))
            # What most of the parameters are, not what the largest batch is.
            self.assertEqual(time.call_args.args[1], (3, 6))
            torch.use_deterministic_algorithms(True)
            self.addCleanup(torch.use_deterministic_algorithms, False)
            self.assertIs(offload._choose_split(), _UpdateSplit.ON_DEVICE)
            time.assert_called_once()
            self.assertIs(type(offload._make_passes()), HostPasses)

    def test_ignored_values_are_refused(self):
        for ignored in (
            {"update_split": "on_device"},
            {"momentum_dtype": "bfloat16"},
            {"max_buffer_gib": 1.0},
        ):
            with self.assertRaisesRegex(ValueError, "offloaded to the host only"):
                self._build(**ignored)

    def test_offload_is_off_where_parameters_are_on_the_device(self):
        self.assertFalse(self._build().offloads_to_host)
        self.assertTrue(self._build(host_offload=True).offloads_to_host)


class Layer(nn.Module):
    """A dense matrix and a stack of experts, each a group of its own."""

    def __init__(self, dim, experts):
        super().__init__()
        self.dense = nn.Linear(dim, dim, bias=False)
        self.experts = nn.Parameter(torch.randn(experts, dim, 2 * dim) * dim**-0.5)

    def forward(self, x):
        hidden = torch.einsum("bd,edf->ebf", x, self.experts)
        out = torch.einsum("ebf,edf->bd", hidden.relu(), self.experts)
        return x + self.dense(x) + out / len(self.experts)


@unittest.skipUnless(torch.cuda.device_count() >= 2, "requires two CUDA devices")
class TestOnCUDA(SpawnedTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "cpu:gloo,cuda:nccl"

    @classmethod
    def device_type(cls):
        return "cuda"

    def _build(self, *, offload, num_layers=3, dim=256, **kwargs):
        torch.manual_seed(0)
        layers = nn.Sequential(*(Layer(dim, experts=4) for _ in range(num_layers)))
        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp_shard",))
        if not offload:
            layers = layers.cuda()
        policy = CPUOffloadPolicy() if offload else OffloadPolicy()
        for layer in layers:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(layers, mesh=mesh, offload_policy=policy)
        params = dict(layers.named_parameters())
        optimizer = build_dist_muon(
            [{"params": list(params.values()), "param_names": list(params)}],
            compute_sharding_by_fqn={
                name: ComputeLayout({"dp_shard": Shard(0) if p.ndim == 3 else Owned()})
                for name, p in params.items()
            },
            bucket_configs=[BucketConfig(patterns=("*",))],
            lr=0.01,
            matrices_per_batch=2,
            **kwargs,
        )
        return layers, optimizer

    def _backward(self, model, seed, accumulate=1):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        dim = model[0].dense.in_features
        data = torch.randn(64, dim, device="cuda", generator=generator)
        total = 0.0
        for part in data.chunk(accumulate):
            loss = model(part).square().mean() / accumulate
            loss.backward()
            total += loss.item()
        return total

    def _train(self, *, reload=False, accumulate=1, steps=10, **kwargs):
        model, optimizer = self._build(**kwargs)
        losses = []
        for step in range(steps):
            if reload and step == 5:
                weights = {n: p.detach().clone() for n, p in model.named_parameters()}
                state = get_flat_optim_state_dict(optimizer)
                model, optimizer = self._build(**kwargs)
                with torch.no_grad():
                    for name, param in model.named_parameters():
                        param.copy_(weights[name])
                init_optim_state(optimizer)
                load_flat_optim_state_dict(optimizer, state)
            losses.append(self._backward(model, step, accumulate))
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, losses

    def test_offloaded_training_equals_training_on_the_device(self):
        *_, expected = self._train(offload=False)
        for split in ["auto", *SPLITS]:
            for reload in (False, True):
                model, optimizer, losses = self._train(
                    offload=True, update_split=split, reload=reload
                )
                torch.testing.assert_close(losses, expected, rtol=1e-3, atol=0)
                for param in model.parameters():
                    self.assertEqual(param.to_local().device.type, "cpu")
                    momentum = optimizer.state[param]["momentum_buffer"].to_local()
                    self.assertTrue(momentum.is_pinned())

    def test_one_step_on_equal_gradients(self):
        reference, plain = self._build(offload=False)
        self._backward(reference, seed=0)
        gradients = {n: p.grad for n, p in reference.named_parameters()}
        before = {n: p.detach().clone() for n, p in reference.named_parameters()}
        plain.step()
        for split in SPLITS:
            model, optimizer = self._build(offload=True, update_split=split)
            for name, param in model.named_parameters():
                host = gradients[name].to_local().cpu().pin_memory()
                param.grad = torch.zeros_like(param)
                param.grad.to_local().copy_(host)
            optimizer.step()
            for name, param in model.named_parameters():
                grad = gradients[name].to_local().cpu()
                momentum = optimizer.state[param]["momentum_buffer"].to_local()
                plain_param = dict(reference.named_parameters())[name]
                expected = plain.state[plain_param]["momentum_buffer"].to_local().cpu()
                ulp = 2**-23 * grad.abs()
                self.assertTrue(((momentum - expected).abs() <= 2 * ulp).all())
                start = before[name].to_local().cpu()
                update = param.detach().to_local() - start
                reference_update = plain_param.detach().to_local().cpu() - start
                error = (update - reference_update).norm() / reference_update.norm()
                self.assertLessEqual(error.item(), 1e-2)

    def test_gradient_accumulation(self):
        weights = [
            torch.cat(
                [
                    p.detach().to_local().flatten()
                    for p in self._train(offload=True, accumulate=n, steps=3)[0].parameters()
                ]
            )
            for n in (1, 4)
        ]
        error = (weights[0] - weights[1]).norm() / weights[0].norm()
        self.assertLessEqual(error.item(), 1e-3)

    def test_repeats_are_bitwise_equal(self):
        # A race between the streams would be an error that moves.
        for split in SPLITS:
            first = None
            for _ in range(17):  # 51 runs over the splits
                model, _, losses = self._train(offload=True, update_split=split, steps=2)
                got = [p.detach().to_local().clone() for p in model.parameters()]
                first = first or got
                for tensor, expected in zip(got, first):
                    self.assertTrue(torch.equal(tensor, expected))


if __name__ == "__main__":
    unittest.main()
