# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""DebugConfig.distinct_seed_axes: which mesh axes get different seeds."""

import ast
import contextlib
import io
import os
import typing
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.testing._internal.common_distributed import MultiProcContinuousTest

import torchtitan
from torchtitan.config import DebugConfig
from torchtitan.distributed import parallel_dims as parallel_dims_module, ParallelDims
from torchtitan.distributed.utils import set_determinism
from torchtitan.trainer import Trainer

SEED = 1000


class TestDistinctSeedAxesConfig(unittest.TestCase):
    def test_default(self):
        self.assertEqual(DebugConfig().distinct_seed_axes, ["pp"])

    def test_default_is_not_shared(self):
        DebugConfig().distinct_seed_axes.append("cp")
        self.assertEqual(DebugConfig().distinct_seed_axes, ["pp"])

    def test_string_is_a_list_of_one(self):
        self.assertEqual(
            DebugConfig(distinct_seed_axes="dp_shard").distinct_seed_axes, ["dp_shard"]
        )

    def test_order_is_kept(self):
        axes = ["efsdp", "pp", "ep"]
        self.assertEqual(DebugConfig(distinct_seed_axes=axes).distinct_seed_axes, axes)

    def test_axes_with_replicas_are_refused(self):
        for axis in ("dp_replicate", "dp", "batch", "loss"):
            for axes in (axis, ["pp", axis]):
                with self.assertRaisesRegex(ValueError, f"'{axis}'.*never meet again"):
                    DebugConfig(distinct_seed_axes=axes)

    def test_axes_with_replicas_can_be_forced(self):
        config = DebugConfig(
            distinct_seed_axes=["pp", "dp_replicate"], force_replica_seeds=True
        )
        self.assertEqual(config.distinct_seed_axes, ["pp", "dp_replicate"])

    def test_tp_warns(self):
        with self.assertLogs(level="WARNING") as logs:
            DebugConfig(distinct_seed_axes=["pp", "tp"])
        self.assertIn("norms and router gates", logs.output[0])

    def test_others_do_not_warn(self):
        with self.assertNoLogs(level="WARNING"):
            DebugConfig(distinct_seed_axes=["pp", "dp_shard", "cp"])

    def test_not_on_the_command_line(self):
        hints = typing.get_type_hints(DebugConfig, include_extras=True)
        for name in ("distinct_seed_axes", "force_replica_seeds"):
            self.assertIn(tyro.conf.Suppress, hints[name].__metadata__)
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            tyro.cli(DebugConfig, args=["--distinct-seed-axes", "cp"])

    def test_command_line_keeps_what_a_config_sets(self):
        default = DebugConfig(distinct_seed_axes=["pp", "dp_shard"])
        self.assertEqual(tyro.cli(DebugConfig, default=default, args=[]), default)

    def test_command_line_checks_what_a_config_sets(self):
        default = DebugConfig()
        default.distinct_seed_axes = "dp_replicate"
        stderr = io.StringIO()
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(stderr):
            tyro.cli(DebugConfig, default=default, args=[])
        self.assertIn("dp_replicate", stderr.getvalue())


class TestCallSites(unittest.TestCase):
    def test_trainer_passes_the_configured_axes(self):
        class ReachedError(Exception):
            pass

        config = Trainer.Config(debug=DebugConfig(distinct_seed_axes="cp"))
        config.model_spec = mock.MagicMock()
        dims = mock.MagicMock(tp=1, cp=1, dp_enabled=False)
        with (
            mock.patch("torchtitan.trainer.utils.device_module"),
            mock.patch("torchtitan.trainer.utils.get_local_device"),
            mock.patch.object(Trainer, "init_distributed", return_value=dims),
            mock.patch(
                "torchtitan.trainer.dist_utils.set_determinism",
                side_effect=ReachedError,
            ) as set_determinism,
            self.assertRaises(ReachedError),
        ):
            Trainer(config)
        self.assertEqual(
            set_determinism.call_args.kwargs["distinct_seed_mesh_dims"], ["cp"]
        )

    def test_no_call_site_has_axes_of_its_own(self):
        """Flux alone seeds a second time, after initialization, for its dropout."""
        root = Path(torchtitan.__file__).parent
        # Not rglob, which does not follow links to folders.
        paths = [
            Path(folder, file)
            for folder, _, files in os.walk(root, followlinks=True)
            for file in files
            if file.endswith(".py")
        ]
        found = {}
        for path in paths:
            text = path.read_text()
            if "set_determinism(" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                    "dist_utils.set_determinism"
                ):
                    (axes,) = (
                        k.value
                        for k in node.keywords
                        if k.arg == "distinct_seed_mesh_dims"
                    )
                    found[path.relative_to(root).as_posix()] = ast.unparse(axes)
        self.assertEqual(found.pop("models/flux/trainer.py"), "distinct_seed_mesh_dims")
        self.assertIn("trainer.py", found)
        for path, axes in found.items():
            self.assertRegex(
                axes, r"^config(\.trainer)?\.debug\.distinct_seed_axes$", path
            )


class TestDistinctSeedAxes(MultiProcContinuousTest):
    """On real meshes: FakeParallelDims of test_set_determinism.py knows every name."""

    world_size = 4

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def _dims(self, spmd_backend: str = "spmd_types", **degrees: int) -> ParallelDims:
        degrees = {
            "dp_replicate": 1,
            "dp_shard": 1,
            "cp": 1,
            "tp": 1,
            "pp": 1,
            "ep": 1,
        } | degrees
        return ParallelDims(
            **degrees, world_size=self.world_size, spmd_backend=spmd_backend
        )

    def _set(self, dims: ParallelDims, axes: list[str] | str | None, **kwargs) -> None:
        config = DebugConfig(seed=SEED, **kwargs)
        if axes is not None:
            config = DebugConfig(seed=SEED, distinct_seed_axes=axes, **kwargs)
        with mock.patch.object(parallel_dims_module, "device_type", "cpu"):
            set_determinism(
                dims,
                torch.device("cpu"),
                config,
                distinct_seed_mesh_dims=config.distinct_seed_axes,
            )

    def _offsets(
        self, dims: ParallelDims, axes: list[str] | str | None, **kwargs
    ) -> list[int]:
        """Return what each rank's seed exceeds SEED by."""
        self._set(dims, axes, **kwargs)
        offsets = [None] * self.world_size
        dist.all_gather_object(offsets, torch.initial_seed() - SEED)
        return offsets

    def test_default_separates_pipeline_stages_alone(self):
        self.assertEqual(
            self._offsets(self._dims(pp=2, dp_shard=2), None), [0, 0, 1, 1]
        )
        self.assertEqual(
            self._offsets(self._dims(dp_replicate=2, dp_shard=2), None), [0] * 4
        )

    def test_shards_differ_and_replicas_do_not(self):
        dims = self._dims(dp_replicate=2, dp_shard=2)
        self.assertEqual(self._offsets(dims, "dp_shard"), [0, 1, 0, 1])

    def test_replicas_differ_where_forced(self):
        dims = self._dims(dp_replicate=2, dp_shard=2)
        offsets = self._offsets(dims, ["dp_replicate"], force_replica_seeds=True)
        self.assertEqual(offsets, [0, 0, 1, 1])

    def test_order_changes_offsets(self):
        dims = self._dims(pp=2, dp_shard=2)
        self.assertEqual(self._offsets(dims, ["dp_shard", "pp"]), [0, 1, 2, 3])
        self.assertEqual(self._offsets(dims, ["pp", "dp_shard"]), [0, 2, 1, 3])

    def test_dp_shard_leaves_context_parallel_ranks_equal(self):
        dims = self._dims(dp_shard=2, cp=2)
        self.assertEqual(self._offsets(dims, ["dp_shard"]), [0, 0, 1, 1])
        self.assertEqual(self._offsets(dims, ["cp", "dp_shard"]), [0, 1, 2, 3])

    def test_experts(self):
        dims = self._dims(dp_shard=4, ep=2)
        self.assertEqual(self._offsets(dims, ["ep", "efsdp"]), [0, 1, 2, 3])

    def test_axes_of_size_one_are_dropped(self):
        dims = self._dims(dp_shard=4)
        self.assertEqual(
            self._offsets(dims, ["pp", "cp", "tp", "dp_shard"]), [0, 1, 2, 3]
        )

    def test_set_determinism_takes_a_string(self):
        with mock.patch.object(parallel_dims_module, "device_type", "cpu"):
            set_determinism(
                self._dims(dp_shard=4),
                torch.device("cpu"),
                DebugConfig(seed=SEED),
                distinct_seed_mesh_dims="dp_shard",
            )
        self.assertEqual(torch.initial_seed(), SEED + self.rank)

    def test_axis_names_of_each_backend(self):
        known = {
            "spmd_types": {"dp", "dp_shard"},
            "full_dtensor": {"dp_shard"},
            "partial_dtensor": {"fsdp"},
        }
        everywhere = {"pp", "batch", "loss", "dp_replicate", "cp", "tp", "ep", "efsdp"}
        for backend, names in known.items():
            dims = self._dims(backend, dp_shard=4)
            for axis in sorted({"dp", "dp_shard", "fsdp", "world"} - names):
                with self.assertRaises(ValueError) as raised:
                    self._set(dims, ["pp", axis], force_replica_seeds=True)
                message = str(raised.exception)
                self.assertIn(f"'{axis}'", message)
                listed = ast.literal_eval(message[message.index("[") :])
                self.assertEqual(set(listed), names | everywhere)

    def test_cpu_initialization(self):
        """Shards on the CPU differ along the axis, their replicas do not."""
        dims = self._dims(dp_replicate=2, dp_shard=2)
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
