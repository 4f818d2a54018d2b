# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""Training without an accelerator: device, memory monitor, router, mask, profiler.

The process-wide device type is fixed at import, so each test sets it where the code
under test reads it. What an accelerator would do is shown with mock device modules.
"""

import contextlib
import logging
import os
import runpy
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torchtitan.components import metrics
from torchtitan.components.checkpointer import dcp
from torchtitan.config import CommConfig, TrainingConfig
from torchtitan.distributed import fsdp, utils as dist_utils
from torchtitan.models.common import attention, vision_encoder
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.tools import profiler, utils


class TestDevice(unittest.TestCase):
    """get_device_info and get_local_device."""

    def test_cpu_only_without_accelerator(self):
        for available, expected in (
            (None, ("cpu", torch.cpu)),
            ("cuda", ("cuda", torch.cuda)),
            ("xpu", ("xpu", torch.xpu)),
        ):
            with mock.patch.object(
                utils, "_get_available_device_type", return_value=available
            ):
                self.assertEqual(utils.get_device_info(), expected)

    def _local_device(self, device_type, device_module, local_rank):
        with (
            mock.patch.object(utils, "device_type", device_type),
            mock.patch.object(utils, "device_module", device_module),
            mock.patch.dict(os.environ, {"LOCAL_RANK": local_rank}),
        ):
            return utils.get_local_device()

    def test_all_local_ranks_share_the_cpu(self):
        for local_rank in ("0", "1", "7"):
            device = self._local_device("cpu", torch.cpu, local_rank)
            # The form that tensors, modules and meshes report.
            self.assertEqual(device, torch.empty(0, device="cpu").device)
            self.assertEqual(torch.empty(0).to(device).device, device)

    def test_invalid_local_rank_is_rejected_on_cpu(self):
        for local_rank in ("-1", "zero"):
            with self.assertRaisesRegex(ValueError, "LOCAL_RANK"):
                self._local_device("cpu", torch.cpu, local_rank)

    def test_cuda_index_is_unchanged(self):
        def cuda(count):
            return SimpleNamespace(device_count=lambda: count)

        self.assertEqual(
            self._local_device("cuda", cuda(8), "3"), torch.device("cuda:3")
        )
        self.assertEqual(
            self._local_device("cuda", cuda(1), "3"), torch.device("cuda:0")
        )


class TestMemoryMonitor(unittest.TestCase):
    """The memory columns of the step log."""

    def _build(self, device_type, device_module):
        with (
            mock.patch.object(metrics, "device_type", device_type),
            mock.patch.object(metrics, "device_module", device_module),
        ):
            monitor = metrics.build_device_memory_monitor()
            monitor.reset_peak_stats()
            return monitor, monitor.get_peak_stats()

    def test_cpu_reports_peak_resident_set(self):
        monitor, before = self._build("cpu", torch.cpu)
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.assertGreater(monitor.device_capacity, 0)
        self.assertLessEqual(monitor.device_capacity, host)
        self.assertGreater(before.max_reserved_gib, 0.05)  # torch alone is more
        self.assertLess(before.max_reserved_gib, monitor.device_capacity_gib)

        # 0.25 GiB above the peak so far, of which a part may be free again.
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
        size = before.max_reserved_gib - resident + 0.25
        torch.ones(int(size * 2**30), dtype=torch.uint8)
        after = monitor.get_peak_stats()
        grown = after.max_reserved_gib - before.max_reserved_gib
        self.assertAlmostEqual(grown, 0.25, delta=0.05)
        self.assertAlmostEqual(
            after.max_reserved_pct,
            100 * after.max_reserved_gib / monitor.device_capacity_gib,
        )
        self.assertEqual(after.max_active_gib, after.max_reserved_gib)
        self.assertEqual((after.num_alloc_retries, after.num_ooms), (0, 0))

    def test_cpu_is_announced(self):
        with self.assertLogs(level=logging.WARNING) as logs:
            self._build("cpu", torch.cpu)
        self.assertIn("No accelerator", logs.output[0])

    def test_cuda_reads_the_allocator(self):
        cuda = mock.Mock()
        cuda.get_device_name.return_value = "NVIDIA H100"
        cuda.get_device_properties.return_value.total_memory = 80 * 2**30
        cuda.memory_stats.return_value = {
            "active_bytes.all.peak": 20 * 2**30,
            "reserved_bytes.all.peak": 40 * 2**30,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }
        # Not the monitor of the CPU, and no call that is made for it.
        monitor, stats = self._build("cuda", cuda)
        self.assertIs(type(monitor), metrics.DeviceMemoryMonitor)
        with mock.patch.object(metrics, "device_module", cuda):
            self.assertEqual(stats, (20.0, 25.0, 40.0, 50.0, 0, 0))
        self.assertEqual(cuda.reset_peak_memory_stats.call_count, 2)

    def test_mfu_is_not_available_on_cpu(self):
        with mock.patch.object(utils.subprocess, "run") as lspci:
            peak = utils.get_peak_flops("CPU x86_64")
        lspci.assert_not_called()
        with (
            mock.patch.object(metrics, "device_type", "cpu"),
            mock.patch.object(metrics, "device_module", torch.cpu),
            tempfile.TemporaryDirectory() as folder,
        ):
            processor = metrics.MetricsProcessor.Config(
                disable_color_printing=True
            ).build(
                parallel_dims=mock.Mock(non_data_parallel_size=1, pp_enabled=False),
                dump_folder=folder,
                pp_schedule="",
            )
        self.assertEqual(str(processor.gpu_peak_flops), str(peak))
        processor.num_flops_per_token = 1000
        processor.data_loading_times.append(0.0)
        processor.ntokens_since_last_log = 10
        processor.logger = mock.Mock()
        with mock.patch.object(metrics.logger, "info") as info:
            processor.log(1, 2.0, 2.0, 1.0)
        self.assertIn("mfu: N/A", info.call_args.args[0])
        self.assertNotIn("mfu(%)", processor.logger.log.call_args.args[0])

    def test_peak_flops_of_accelerators_is_unchanged(self):
        no_lspci = mock.patch.object(
            utils.subprocess, "run", side_effect=FileNotFoundError
        )
        with no_lspci:
            self.assertEqual(utils.get_peak_flops("NVIDIA H100 80GB HBM3"), 989e12)
            self.assertEqual(utils.get_peak_flops("unheard of"), 312e12)


class TestHostMemory(unittest.TestCase):
    """The files that host memory is read from."""

    def setUp(self):
        from torchtitan.tools import host_memory

        self.host_memory = host_memory
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.proc = Path(folder.name) / "proc"
        self.cgroup = Path(folder.name) / "cgroup"
        self.host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _limit(self) -> int:
        return self.host_memory.get_memory_limit(self.proc, self.cgroup)

    def test_peak_is_in_bytes(self):
        self._write(
            self.proc / "status", "VmPeak:\t  999 kB\nVmHWM:\t    7 kB\nVmRSS:\t 5 kB\n"
        )
        self.assertEqual(self.host_memory.get_peak_resident_set(self.proc), 7 * 1024)

    def test_peak_without_procfs(self):
        for platform, unit in (("linux", 1024), ("darwin", 1)):
            usage = mock.Mock(ru_maxrss=7)
            with mock.patch.object(
                self.host_memory.resource, "getrusage", return_value=usage
            ):
                with mock.patch.object(self.host_memory.sys, "platform", platform):
                    peak = self.host_memory.get_peak_resident_set(self.proc)
            self.assertEqual(peak, 7 * unit)

    def test_no_cgroup(self):
        self.assertEqual(self._limit(), self.host)

    def test_least_limit_up_the_v2_tree(self):
        self._write(self.proc / "cgroup", "0::/job/step\n")
        self._write(self.cgroup / "memory.max", "max\n")
        self._write(self.cgroup / "job/memory.max", "4096\n")
        self._write(self.cgroup / "job/step/memory.max", "8192\n")
        self.assertEqual(self._limit(), 4096)

    def test_v1_controller_beside_others(self):
        self._write(self.proc / "cgroup", "5:cpu,cpuacct:/a\n4:memory:/job\n0::/\n")
        self._write(self.cgroup / "memory/job/memory.limit_in_bytes", "4096\n")
        self._write(self.cgroup / "memory/memory.limit_in_bytes", str(2**63 - 4096))
        self.assertEqual(self._limit(), 4096)

    def test_folders_of_the_host_unseen_in_a_container(self):
        self._write(self.proc / "cgroup", "4:memory:/docker/0123\n")
        self._write(self.cgroup / "memory/memory.limit_in_bytes", "4096\n")
        self.assertEqual(self._limit(), 4096)


class TestRouterGate(unittest.TestCase):
    """The gate runs in float32, whatever the parameters' dtype."""

    def setUp(self):
        torch.manual_seed(0)
        self.router = TokenChoiceTopKRouter.Config(
            num_experts=8,
            gate=Linear.Config(in_features=64, out_features=8),
            top_k=2,
            score_func="softmax",
            route_norm=False,
        ).build()
        nn.init.normal_(self.router.gate.weight)
        self.router.to(torch.bfloat16)
        self.x_BLD = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)

    def _run(self, context=None):
        self.router.zero_grad()
        self.x_BLD.grad = None
        with context or contextlib.nullcontext():
            _, expert_ids_BLK, scores_BLE = self.router(self.x_BLD)
        scores_BLE.square().sum().backward()
        return expert_ids_BLK, scores_BLE, self.router.gate.weight.grad, self.x_BLD.grad

    def test_bitwise_as_float32_autocast(self):
        # The oracle is autocast's own casts, which on a CPU only torch.autocast bars
        # from float32: the dispatcher below has one policy for all devices.
        @contextlib.contextmanager
        def autocast_float32():
            dtype = torch.get_autocast_dtype("cpu")
            torch.set_autocast_dtype("cpu", torch.float32)
            torch.set_autocast_enabled("cpu", True)
            torch.autocast_increment_nesting()
            try:
                yield
            finally:
                torch.autocast_decrement_nesting()
                torch.clear_autocast_cache()
                torch.set_autocast_enabled("cpu", False)
                torch.set_autocast_dtype("cpu", dtype)

        with autocast_float32():
            logits_BLE = self.router.gate(self.x_BLD)
        self.assertEqual(logits_BLE.dtype, torch.float32)
        expected = F.softmax(logits_BLE, dim=-1)
        expected_grads = torch.autograd.grad(
            expected.square().sum(), (self.router.gate.weight, self.x_BLD)
        )

        # Within an outer bfloat16 autocast too, as without FSDP.
        for outer in (None, torch.autocast("cpu", torch.bfloat16)):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                _, scores_BLE, weight_grad, x_grad = self._run(outer)
            self.assertEqual(scores_BLE.dtype, torch.float32)
            self.assertTrue(torch.equal(scores_BLE, expected))
            self.assertEqual(weight_grad.dtype, torch.bfloat16)
            self.assertTrue(torch.equal(weight_grad, expected_grads[0]))
            self.assertTrue(torch.equal(x_grad, expected_grads[1]))

    def test_other_devices_use_autocast(self):
        x_BLD = torch.empty(2, 16, 64, dtype=torch.bfloat16, device="meta")
        self.router.to("meta")
        autocast = mock.MagicMock()
        with mock.patch.object(torch, "autocast", autocast):
            self.router(x_BLD)
        autocast.assert_called_once_with(device_type="meta", dtype=torch.float32)


class TestEagerAttentionMask(unittest.TestCase):
    """No mask is compiled on a CPU."""

    def _create(self, device_type, compiled):
        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        with (
            mock.patch.object(attention, "device_type", device_type),
            mock.patch.object(attention, "_compiled_create_block_mask", compiled),
        ):
            return attention.create_attention_mask(
                causal, 1, None, 256, 256, device="cpu", BLOCK_SIZE=64
            )

    def test_cpu_does_not_compile(self):
        compiled = mock.Mock(side_effect=AssertionError("compiled"))
        block_mask = self._create("cpu", compiled)
        dense = create_mask(block_mask.mask_mod, 1, None, 256, 256, device="cpu")
        self.assertTrue(torch.equal(dense[0, 0], torch.ones(256, 256).tril().bool()))
        self.assertEqual(block_mask.BLOCK_SIZE, (64, 64))
        # 6 of the 16 blocks lie above the diagonal.
        self.assertEqual(block_mask.sparsity(), 100 * 6 / 16)

    def test_cuda_compiles(self):
        compiled = mock.Mock(return_value="compiled")
        self.assertEqual(self._create("cuda", compiled), "compiled")
        self.assertEqual(compiled.call_args.kwargs, {"device": "cpu", "BLOCK_SIZE": 64})

    def test_vision_encoder(self):
        def compiled_create_block_mask(device_type):
            with mock.patch.object(utils, "device_type", device_type):
                return runpy.run_path(vision_encoder.__file__)[
                    "compiled_create_block_mask"
                ]

        self.assertIs(compiled_create_block_mask("cpu"), create_block_mask)
        compiled = compiled_create_block_mask("cuda")
        self.assertIs(compiled._torchdynamo_orig_callable, create_block_mask)


class TestDistributedSetup(unittest.TestCase):
    """What is asked of torch.distributed for each device type."""

    def _backend(self, device_type, enable_cpu_backend):
        multithreading = torch._C._is_multithreading_enabled()
        self.addCleanup(torch.autograd.set_multithreading_enabled, multithreading)
        with (
            mock.patch.object(dist_utils, "device_type", device_type),
            mock.patch.dict(os.environ),
            mock.patch.object(torch.distributed, "init_process_group") as init,
            mock.patch.object(torch.distributed, "get_world_size"),
        ):
            dist_utils.init_distributed(
                CommConfig(trace_buf_size=0), enable_cpu_backend
            )
        return init.call_args.kwargs["backend"]

    def test_backend(self):
        self.assertEqual(self._backend("cpu", False), "gloo")
        self.assertEqual(self._backend("cpu", True), "gloo")
        self.assertEqual(self._backend("cuda", False), "nccl")
        self.assertEqual(self._backend("cuda", True), "cuda:nccl,cpu:gloo")

    def _barrier_device_ids(self, device_type, device_module):
        parallel_dims = mock.Mock()
        parallel_dims.get_all_one_dimensional_meshes.return_value = {}
        with (
            mock.patch.object(dist_utils, "device_type", device_type),
            mock.patch.object(dist_utils, "device_module", device_module),
            mock.patch.object(torch.distributed, "barrier") as barrier,
            mock.patch.object(torch.distributed, "set_timeout"),
        ):
            dist_utils.set_pg_timeouts(mock.Mock(), parallel_dims)
        return barrier.call_args.kwargs["device_ids"]

    def test_barrier_takes_no_cpu_index(self):
        self.assertIsNone(self._barrier_device_ids("cpu", torch.cpu))
        cuda = mock.Mock()
        cuda.current_device.return_value = 3
        self.assertEqual(self._barrier_device_ids("cuda", cuda), [3])
        cuda.synchronize.assert_called_once_with()

    def test_sum_reduction_is_forced_by_the_mesh(self):
        """By its device, not by that of the process; a module need not have parameters."""
        for device_type, forced in (("cpu", 1), ("cuda", 0), (None, 0)):
            module = mock.Mock()
            param = mock.Mock(**{"device_mesh.device_type": device_type})
            params = [mock.Mock(spec=[]), param] if device_type else []
            module.parameters.side_effect = lambda params=params: iter(params)
            model = mock.Mock(**{"modules.return_value": [module]})
            with mock.patch.object(fsdp, "FSDPModule", mock.Mock):
                fsdp.disable_fsdp_gradient_division(model)
            module.set_gradient_divide_factor.assert_called_once_with(1.0)
            calls = module.set_force_sum_reduction_for_comms.mock_calls
            self.assertEqual(calls, [mock.call(True)] * forced)

    def test_offload_pins_for_an_accelerator_only(self):
        model = nn.Module()
        model.enable_weight_tying = False
        model.tok_embeddings, model.norm, model.lm_head = None, None, None
        model.layers = nn.ModuleDict({"0": nn.Linear(2, 2)})
        for available in (False, True):
            with (
                mock.patch.object(
                    torch.accelerator, "is_available", return_value=available
                ),
                mock.patch.object(fsdp, "fully_shard") as fully_shard,
            ):
                fsdp.apply_fsdp_to_decoder(
                    model,
                    dp_mesh=mock.Mock(mesh_dim_names=()),
                    param_dtype=torch.bfloat16,
                    reduce_dtype=torch.float32,
                    pp_enabled=False,
                    cpu_offload=True,
                )
            policies = {
                call.kwargs["offload_policy"].pin_memory
                for call in fully_shard.mock_calls
            }
            self.assertEqual(policies, {available})


class TestFluxOffload(unittest.TestCase):
    """Flux, which calls fully_shard itself."""

    def _pin_memory(self, fully_shard) -> set[bool]:
        return {
            call.kwargs["offload_policy"].pin_memory for call in fully_shard.mock_calls
        }

    def test_offload_pins_for_an_accelerator_only(self):
        # transformers is not needed to shard.
        with mock.patch.dict(sys.modules, {"transformers": mock.MagicMock()}):
            from torchtitan.models.flux import parallelize as flux
        encoder = nn.Module()
        encoder.encoder = nn.Module()
        encoder.encoder.block = nn.ModuleList([nn.Linear(2, 2)])
        for available in (False, True):
            with (
                mock.patch.object(
                    torch.accelerator, "is_available", return_value=available
                ),
                mock.patch.object(flux, "fully_shard") as fully_shard,
                mock.patch.object(flux, "disable_fsdp_gradient_division"),
            ):
                flux.apply_fsdp(
                    mock.Mock(double_blocks=[mock.Mock()], single_blocks=[]),
                    mock.Mock(),
                    torch.bfloat16,
                    torch.float32,
                    cpu_offload=True,
                )
                self.assertEqual(self._pin_memory(fully_shard), {available})
                fully_shard.reset_mock()
                flux.parallelize_encoders(
                    mock.Mock(hf_module=encoder),
                    mock.Mock(),
                    mock.Mock(spmd_backend="partial_dtensor"),
                    training=TrainingConfig(enable_cpu_offload=True),
                )
                self.assertEqual(self._pin_memory(fully_shard), {available})


class TestAsyncCheckpoint(unittest.TestCase):
    """checkpoint.async_mode async_with_pinned_mem, up to the process that writes."""

    def _save(self, state: dict[str, torch.Tensor]) -> dcp.DefaultStager:
        manager = mock.MagicMock(
            async_mode=dcp.AsyncMode.ASYNC_WITH_PINNED_MEM, stager=None
        )
        manager._flattened_model_states_sd.return_value = state
        manager._should_save.return_value = True
        manager.dcp_save.return_value = mock.Mock(spec=dcp.AsyncSaveResponse)
        manager.dcp_save.return_value.staging_completion = None
        manager.dcp_save.return_value.upload_completion = None
        dcp.CheckpointManager._save(manager, 1)
        return manager.stager

    def test_stages_without_an_accelerator(self):
        with mock.patch.object(torch.accelerator, "is_available", return_value=False):
            weight = torch.arange(6.0)
            stager = self._save({"weight": weight})
            staged = stager.stage({"weight": weight}).result()
            weight.zero_()
        self.assertTrue(torch.equal(staged["weight"], torch.arange(6.0)))
        stager.close()

    def test_pins_for_an_accelerator(self):
        for available in (False, True):
            with (
                mock.patch.object(
                    torch.accelerator, "is_available", return_value=available
                ),
                mock.patch.object(dcp, "DefaultStager") as stager,
            ):
                self._save({})
            options = stager.call_args.args[0]
            self.assertEqual(options.use_pinned_memory, available)
            self.assertEqual(options.use_non_blocking_copy, available)


class TestMemorySnapshot(unittest.TestCase):
    def _enter(self, device_module, folder):
        config = profiler.Profiler.Config(enable_memory_snapshot=True)
        with (
            mock.patch.object(profiler, "device_module", device_module),
            mock.patch.object(torch.distributed, "get_rank", return_value=0),
            config.build(global_step=0, base_folder=folder) as active,
        ):
            active.step()
            return active.memory_profiler

    def test_ignored_without_allocator_history(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.assertLogs(level=logging.WARNING) as logs:
                self.assertIsNone(self._enter(torch.cpu, folder))
            self.assertIn("enable_memory_snapshot is ignored", logs.output[0])

            cuda = mock.Mock()
            self.assertIsInstance(self._enter(cuda, folder), profiler.MemoryProfiler)
            cuda.memory._record_memory_history.assert_called_once()


if __name__ == "__main__":
    unittest.main()
