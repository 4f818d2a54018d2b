# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""Trainer.Config.distinct_seed_axes: which mesh axes get different seeds."""

import ast
import contextlib
import inspect
import io
import itertools
import math
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.config import DebugConfig
from torchtitan.distributed import parallel_dims as parallel_dims_module, ParallelDims
from torchtitan.distributed.utils import set_determinism
from torchtitan.trainer import Trainer

SEED = 1000
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
BACKENDS = ("partial_dtensor", "full_dtensor", "spmd_types")


def _build_dims(spmd_backend: str = "spmd_types", **degrees: int) -> ParallelDims:
    degrees = dict.fromkeys(DEGREES, 1) | degrees
    world_size = math.prod(v for name, v in degrees.items() if name != "ep")
    dims = ParallelDims(**degrees, world_size=world_size, spmd_backend=spmd_backend)
    with mock.patch.object(parallel_dims_module, "device_type", "cpu"):
        dims.build_mesh()
    return dims


def _check(dims: ParallelDims, axes: list[str]) -> list[str]:
    # Not at the top of the file, so that each test fails by itself where it is missing.
    from torchtitan.distributed.utils import check_seed_axes

    return check_seed_axes(dims, axes)


class TestConfig(unittest.TestCase):
    def test_default(self):
        self.assertEqual(Trainer.Config().distinct_seed_axes, ["pp"])

    def test_default_is_not_shared(self):
        Trainer.Config().distinct_seed_axes.append("cp")
        self.assertEqual(Trainer.Config().distinct_seed_axes, ["pp"])

    def test_not_on_the_command_line(self):
        default = Trainer.Config(distinct_seed_axes=["pp", "dp_shard"])
        config = tyro.cli(Trainer.Config, default=default, args=[])
        self.assertEqual(config.distinct_seed_axes, ["pp", "dp_shard"])
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            tyro.cli(Trainer.Config, args=["--distinct-seed-axes", "cp"])

    def test_trainer_passes_the_checked_axes(self):
        class ReachedError(Exception):
            pass

        def construct(axes, **degrees):
            config = Trainer.Config(distinct_seed_axes=axes)
            config.model_spec = mock.MagicMock()
            dims = mock.MagicMock(
                **(dict.fromkeys(DEGREES, 1) | degrees), dp_enabled=False
            )
            with (
                mock.patch("torchtitan.trainer.utils.device_module"),
                mock.patch("torchtitan.trainer.utils.get_local_device"),
                mock.patch.object(Trainer, "init_distributed", return_value=dims),
                mock.patch(
                    "torchtitan.trainer.dist_utils.set_determinism",
                    side_effect=ReachedError,
                ) as set_determinism,
            ):
                try:
                    Trainer(config)
                except ReachedError:
                    return set_determinism.call_args.kwargs["distinct_seed_mesh_dims"]

        self.assertEqual(construct(["dp_shard"], dp_replicate=2), ["dp_shard"])
        with self.assertRaisesRegex(ValueError, "'dp_replicate'"):
            construct(["pp", "dp_replicate"], dp_replicate=2)

    def test_torchft_passes_the_checked_axes(self):
        """Only its source is read: torchft need not be installed."""
        folder = Path(inspect.getfile(Trainer)).parent
        axes = []
        for file in ("trainer.py", "experiments/torchft/trainer.py"):
            axes += [
                ast.unparse(node.value)
                for node in ast.walk(ast.parse((folder / file).read_text()))
                if isinstance(node, ast.keyword)
                and node.arg == "distinct_seed_mesh_dims"
            ]
        self.assertEqual(len(axes), 2)
        self.assertIn("check_seed_axes", axes[0])
        self.assertEqual(axes[0], axes[1])


class TestReplicas(unittest.TestCase):
    """Axes along which weights have replicas are refused, and no others."""

    def setUp(self):
        self.addCleanup(lambda: dist.is_initialized() and dist.destroy_process_group())

    def _build_dims(self, *args, **degrees: int) -> ParallelDims:
        if dist.is_initialized():
            dist.destroy_process_group()
        size = math.prod(v for name, v in degrees.items() if name != "ep")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        return _build_dims(*args, **degrees)

    @staticmethod
    def _coordinates(dims: ParallelDims, axis: str) -> list[int]:
        """Each rank's position along ``axis``, read from the mesh that has it."""
        if axis == "loss":
            batch, cp = (TestReplicas._coordinates(dims, a) for a in ("batch", "cp"))
            return [b * dims.cp + c for b, c in zip(batch, cp, strict=True)]
        meshes = list(dims._global_meshes.values())
        if "dp" == axis:  # without the axis pp: the ranks of one stage
            return TestReplicas._coordinates(dims, "batch")
        mesh = next(m for m in meshes if axis in m.mesh_dim_names)
        index = mesh.mesh_dim_names.index(axis)
        return [
            (mesh.mesh == rank).nonzero()[0, index].item()
            for rank in range(dims.world_size)
        ]

    def _differ_between_replicas(self, dims: ParallelDims, axis: str) -> bool:
        """Whether two replicas of a weight have different positions along ``axis``.

        Norms are replicated along dp_replicate and tp, all weights along dp_replicate.
        """
        names = ["pp", "cp", "tp", "dp_replicate"]
        names.append("fsdp" if dims.spmd_backend == "partial_dtensor" else "dp_shard")
        position = {name: self._coordinates(dims, name) for name in [*names, axis]}
        for a, b in itertools.combinations(range(dims.world_size), 2):
            differ = {n for n in names if position[n][a] != position[n][b]}
            if len(differ) == 1 and differ <= {"tp", "dp_replicate"}:
                if position[axis][a] != position[axis][b]:
                    return True
        return False

    def test_every_mesh(self):
        """All degrees of 1 to 3 on up to 12 ranks, against the ranks of the meshes."""
        num_refused = num_accepted = 0
        for backend, degrees in itertools.product(
            BACKENDS, itertools.product((1, 2, 3), repeat=4)
        ):
            size = math.prod(degrees)
            names = ("dp_replicate", "dp_shard", "cp", "tp")
            shape = dict(zip(names, degrees, strict=True))
            if not 1 < size <= 12 or sum(d > 1 for d in degrees) > 2:
                continue
            shards = size // shape["dp_replicate"]
            for ep in (ep for ep in range(1, shards + 1) if shards % ep == 0):
                dims = self._build_dims(backend, **shape, ep=ep)
                for axis in dims._single_axis_meshes:
                    differ = (
                        dims.get_optional_mesh(axis) is not None
                        and self._differ_between_replicas(dims, axis)
                    )
                    with self.subTest(backend=backend, axis=axis, ep=ep, **shape):
                        if differ:
                            num_refused += 1
                            with self.assertRaisesRegex(ValueError, f"'{axis}'"):
                                _check(dims, ["pp", axis])
                        elif dims.get_optional_mesh(axis) is not None:
                            num_accepted += 1
                            self.assertEqual(_check(dims, ["pp", axis]), ["pp", axis])
        self.assertGreater(num_refused, 100)
        self.assertGreater(num_accepted, 100)

    def test_ep_over_the_ranks_of_tp(self):
        """The norms of TP ranks would differ, and nothing would say so."""
        dims = self._build_dims(dp_shard=2, tp=2, ep=2)
        with self.assertRaisesRegex(ValueError, r"'ep'.*norms \(tp=2\)"):
            _check(dims, ["pp", "efsdp", "ep"])
        # Each position along efsdp has whole TP groups.
        self.assertEqual(_check(dims, ["pp", "efsdp"]), ["pp", "efsdp"])

    def test_axes_of_size_one_are_accepted(self):
        dims = self._build_dims(dp_shard=4)
        axes = ["pp", "dp_replicate", "dp", "tp", "cp", "ep"]
        self.assertEqual(_check(dims, axes), axes)


class TestSeeds(MultiProcContinuousTest):
    """On real meshes: FakeParallelDims of test_set_determinism.py knows every name."""

    world_size = 4

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def _set(self, dims: ParallelDims, axes: list[str]) -> None:
        with mock.patch.object(parallel_dims_module, "device_type", "cpu"):
            set_determinism(
                dims,
                torch.device("cpu"),
                DebugConfig(seed=SEED),
                distinct_seed_mesh_dims=_check(dims, axes),
            )

    def _offsets(self, axes: list[str], **degrees: int) -> list[int]:
        """Return what each rank's seed exceeds SEED by."""
        self._set(_build_dims(**degrees), axes)
        offsets = [None] * self.world_size
        dist.all_gather_object(offsets, torch.initial_seed() - SEED)
        return offsets

    def test_default_separates_pipeline_stages_alone(self):
        default = Trainer.Config().distinct_seed_axes
        self.assertEqual(self._offsets(default, pp=2, dp_shard=2), [0, 0, 1, 1])
        self.assertEqual(self._offsets(default, dp_replicate=2, dp_shard=2), [0] * 4)

    def test_shards_differ_and_replicas_do_not(self):
        offsets = self._offsets(["dp_shard"], dp_replicate=2, dp_shard=2)
        self.assertEqual(offsets, [0, 1, 0, 1])

    def test_dp_shard_leaves_context_parallel_ranks_equal(self):
        self.assertEqual(self._offsets(["dp_shard"], dp_shard=2, cp=2), [0, 0, 1, 1])
        offsets = self._offsets(["cp", "dp_shard"], dp_shard=2, cp=2)
        self.assertEqual(offsets, [0, 1, 2, 3])

    def test_unknown_axis(self):
        for backend, unknown in (("spmd_types", "fsdp"), ("partial_dtensor", "dp")):
            dims = _build_dims(backend, dp_shard=4)
            with self.assertRaisesRegex(ValueError, f"'{unknown}'.*dp_replicate"):
                self._set(dims, ["pp", unknown])

    def test_cpu_initialization(self):
        """Shards on the CPU differ along the axis, their replicas do not."""
        dims = _build_dims(dp_replicate=2, dp_shard=2)
        self._set(dims, ["pp", "dp_shard"])
        with torch.device("meta"):
            model = nn.Linear(8, 6, bias=False)
        fully_shard(
            model,
            mesh=dims.get_mesh(["dp_replicate", "dp_shard"]),
            offload_policy=CPUOffloadPolicy(pin_memory=False),
        )
        model.to_empty(device="cpu")
        with torch.no_grad():
            nn.init.normal_(model.weight)
        shards = [None] * self.world_size
        dist.all_gather_object(shards, model.weight.to_local())
        for left, right in ((0, 2), (1, 3)):
            self.assertTrue(torch.equal(shards[left], shards[right]))
        self.assertFalse(torch.equal(shards[0], shards[1]))


if __name__ == "__main__":
    unittest.main()
