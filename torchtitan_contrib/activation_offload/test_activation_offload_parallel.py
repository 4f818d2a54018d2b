# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""FullACOffload with FSDP2, DTensor, pipeline schedules and a trainer's config.

One gloo rank, on the CPU: the schedules, hooks and casts are those of many ranks.
"""

import copy
import dataclasses
import mmap
import typing
import unittest

import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    fully_shard,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)

from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.config.configs import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.activation_offload import (
    FullACOffload,
    HostOffloadEngine,
    HostPool,
)
from torchtitan.trainer import Trainer

TOKENS, DIM, NUM_BLOCKS, GIB = 8, 32, 4, 2**30


class CPUOffload(FullACOffload):
    """Computes on the CPU, also where there is a GPU."""

    def __init__(self) -> None:
        super().__init__(FullACOffload.Config(min_bytes=0))
        self.engine = HostOffloadEngine(GIB, device_type="cpu")

    def get_engine(self) -> HostOffloadEngine:
        return self.engine

    @property
    def pool(self) -> HostPool:
        return self.engine.pool

    @property
    def most_offloaded(self) -> int:
        """Number of inputs of one page or less that were on the host at once."""
        return self.pool.allocated_bytes // mmap.PAGESIZE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD + self.down(self.up(x_TD).tanh())


class Model(nn.Module):
    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(num_blocks)})

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        h_TD = self.proj(x_TD).float()
        for block in self.layers.values():
            h_TD = block(h_TD)
        return h_TD


class SingleRankTestCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        cls.mesh = init_device_mesh("cpu", (1,))

    @classmethod
    def tearDownClass(cls):
        dist.destroy_process_group()

    def setUp(self):
        torch.manual_seed(0)

    def build(self):
        """Return a model under FullAC, its copy under FullACOffload, and the latter."""
        reference = Model()
        model = copy.deepcopy(reference)
        FullAC.Config().build().apply(reference)
        offload = CPUOffload()
        offload.apply(model)
        return reference, model, offload

    def assert_same_grads(self, reference, model):
        for (name, p), (_, q) in zip(
            reference.named_parameters(), model.named_parameters(), strict=True
        ):
            p, q = (
                t.grad.to_local() if isinstance(t, DTensor) else t.grad for t in (p, q)
            )
            self.assertTrue(torch.equal(p, q), name)


class TestFSDP(SingleRankTestCase):
    def ten_steps(self, *, compiled=False, offload_policy=None, dtype=torch.bfloat16):
        reference, model, offload = self.build()
        mp_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        optimizers = []
        for m in (reference, model):
            if compiled:
                for block in m.layers.values():
                    block.compile(backend="aot_eager", fullgraph=True)
            config = {
                "mesh": self.mesh,
                "mp_policy": mp_policy,
                "offload_policy": offload_policy or OffloadPolicy(),
            }
            for block in m.layers.values():
                fully_shard(block, **config)
            fully_shard(m, **config)
            for module in m.modules():
                if isinstance(module, FSDPModule):
                    # gloo has no PREMUL_SUM
                    module.set_force_sum_reduction_for_comms(True)
            optimizers.append(torch.optim.AdamW(m.parameters(), lr=1e-2))
        for _ in range(10):
            x_TD = torch.randn(TOKENS, DIM)
            losses = []
            for m in (reference, model):
                losses.append(m(x_TD).float().square().mean())
                losses[-1].backward()
            self.assertTrue(torch.equal(*losses))
            self.assert_same_grads(reference, model)
            del losses
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.assertEqual(offload.pool.num_in_use, 0)
        return offload

    def test_mixed_precision(self):
        offload = self.ten_steps()
        # Of block 0 as well, whose float32 input FSDP casts within the wrapper's call.
        self.assertEqual(offload.most_offloaded, NUM_BLOCKS - 1)

    def test_parameters_on_the_cpu(self):
        offload = self.ten_steps(offload_policy=CPUOffloadPolicy(pin_memory=False))
        self.assertEqual(offload.most_offloaded, NUM_BLOCKS - 1)

    def test_compiled_blocks(self):
        offload = self.ten_steps(compiled=True, dtype=torch.float32)
        # Gathered weights are seen by the hooks, and are larger than the inputs.
        self.assertEqual(offload.most_offloaded, NUM_BLOCKS - 1)


class TestDTensor(SingleRankTestCase):
    def forward(self, model, placement, after_block=lambda i, h: None):
        for name, p in list(model.named_parameters()):
            if not isinstance(p, DTensor):
                module_name, _, leaf = name.rpartition(".")
                value = distribute_tensor(p.detach(), self.mesh, [Replicate()])
                module = model.get_submodule(module_name)
                module.register_parameter(leaf, nn.Parameter(value))
        h_TD = distribute_tensor(torch.ones(TOKENS, DIM), self.mesh, [placement])
        h_TD = model.proj(h_TD)
        for i, block in enumerate(model.layers.values()):
            out = block(h_TD)
            after_block(i, h_TD)
            h_TD = out
        return h_TD.square().mean().full_tensor()

    def test_inputs(self):
        for placement in (Shard(0), Shard(1), Replicate()):
            with self.subTest(placement=placement):
                reference, model, offload = self.build()
                seen = []
                for m in (reference, model):
                    for block in m.layers.values():
                        block.up.register_forward_pre_hook(
                            lambda _, args: seen.append(
                                (type(args[0]), args[0].placements)
                            )
                        )
                    self.forward(m, placement).backward()
                self.assert_same_grads(reference, model)
                self.assertEqual(offload.most_offloaded, NUM_BLOCKS - 1)
                self.assertEqual(offload.pool.num_in_use, 0)
                # In forward and in recomputation, without offload and with it.
                self.assertEqual(len(seen), 4 * NUM_BLOCKS)
                self.assertEqual(seen[: 2 * NUM_BLOCKS], seen[2 * NUM_BLOCKS :])

    def test_in_place_on_an_input(self):
        """The version of a DTensor is its own, and its shard's stays as it is."""

        def in_block(module, args):
            with torch.no_grad():
                args[0].mul_(2)

        for placement in (Shard(0), Replicate()):
            for index in range(NUM_BLOCKS):
                for when in ("in the block", "after the block"):
                    for m in self.build()[:2]:
                        if when == "in the block":
                            block = m.layers[str(index)]
                            block.up.register_forward_pre_hook(in_block)

                        def after_block(i, h_TD, index=index, when=when):
                            if i == index and when == "after the block":
                                h_TD.detach().mul_(2)

                        with self.subTest(
                            placement=placement, block=index, when=when, model=m
                        ):
                            loss = self.forward(m, placement, after_block)
                            with self.assertRaisesRegex(
                                RuntimeError, "modified by an in-?place operation"
                            ):
                                loss.backward()


class TestPipeline(SingleRankTestCase):
    """Two stages on a rank, each a model part of its own."""

    num_microbatches = 4

    def run_schedule(self, name: str, policy: FullAC, num_stages: int):
        torch.manual_seed(0)
        parts = [Model() for _ in range(num_stages)]
        for part in parts:
            policy.apply(part)
        stages = [
            PipelineStage(part, i, num_stages, torch.device("cpu"))
            for i, part in enumerate(parts)
        ]
        schedule_cls = schedules.get_schedule_class(name)
        single = issubclass(schedule_cls, schedules.PipelineScheduleSingle)
        schedule = schedule_cls(
            stages[0] if single else stages,
            n_microbatches=self.num_microbatches,
            loss_fn=lambda output, target: (output - target).square().mean(),
        )
        losses = []
        for seed in range(3):
            torch.manual_seed(seed)
            x_TD = torch.randn(self.num_microbatches * TOKENS, DIM)
            schedule.step(x_TD, target=torch.ones_like(x_TD), losses=losses)
        grads = [p.grad for part in parts for p in part.parameters()]
        return losses, grads

    def test_schedules(self):
        for name, num_stages, most_offloaded in (
            # All of four microbatches; the last one's when the first backward begins.
            ("GPipe", 1, 4 * NUM_BLOCKS),
            # The only stage is the last one: its backward follows at once.
            ("1F1B", 1, NUM_BLOCKS - 1),
            ("Interleaved1F1B", 2, None),
            ("InterleavedZeroBubble", 2, None),
            # The first backward is that of the last forward.
            ("LoopedBFS", 2, 2 * 4 * NUM_BLOCKS - 1),
        ):
            with self.subTest(schedule=name):
                full = self.run_schedule(name, FullAC(FullAC.Config()), num_stages)
                offload = CPUOffload()
                ours = self.run_schedule(name, offload, num_stages)
                for expected, result in zip(full, ours, strict=True):
                    self.assertTrue(expected)
                    for x, y in zip(expected, result, strict=True):
                        self.assertTrue(torch.equal(x, y))
                self.assertEqual(offload.pool.num_in_use, 0)
                if most_offloaded is not None:
                    self.assertEqual(offload.most_offloaded, most_offloaded)


class Stage(nn.Module):
    """Blocks alone: the input of the first one is the input of the stage."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM) if rank == 0 else None
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        h_TD = x_TD if self.proj is None else self.proj(x_TD)
        for block in self.layers.values():
            h_TD = block(h_TD)
        return h_TD


class TestPipelineRanks(DTensorTestBase):
    """Two ranks with a stage of two blocks each, and four microbatches."""

    device_type = "cpu"
    backend = "gloo"
    world_size = 2

    def run_schedule(self, name: str, policy: FullAC):
        """Return gradients, and how many block inputs are alive at each backward."""
        torch.manual_seed(self.rank)
        stage_module = Stage(self.rank)
        policy.apply(stage_module)
        inputs, alive = [], []
        for block in stage_module.layers.values():
            block.register_forward_pre_hook(
                lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage()))
            )
        stage_module.layers["1"].register_full_backward_pre_hook(
            lambda *_: alive.append(sum(not ref.expired() for ref in inputs))
        )
        stage = PipelineStage(stage_module, self.rank, 2, torch.device("cpu"))
        schedule = schedules.get_schedule_class(name)(
            stage,
            n_microbatches=4,
            loss_fn=lambda output, target: (output - target).square().mean(),
        )
        torch.manual_seed(2)
        x_TD = torch.randn(4 * TOKENS, DIM)
        if self.rank == 0:
            schedule.step(x_TD)
        else:
            schedule.step(target=torch.ones_like(x_TD))
        return [p.grad for p in stage_module.parameters()], alive

    @with_comms(backend="gloo")
    def test_what_stays_on_the_device(self):
        for name, alive_at_backwards, most_offloaded in (
            # The first stage has offloaded all inputs but the one that was made last,
            # which goes when the first backward begins. The second stage keeps its four
            # receive buffers as well, of which a copy would free nothing.
            ("GPipe", [[1, 0, 0, 0], [4 + 1, 4, 4, 4]], [4 * 2, 4]),
            # The first stage is one microbatch ahead. On the second each backward
            # follows at once: the block's input stays, beside the receive buffers.
            ("1F1B", [[1, 1, 1, 0], [1 + 1, 2 + 1, 3 + 1, 4 + 1]], [2 * 2, 0]),
        ):
            expected, _ = self.run_schedule(name, FullAC(FullAC.Config()))
            offload = CPUOffload()
            grads, alive = self.run_schedule(name, offload)
            # The first step runs another microbatch before, to learn about the shapes.
            self.assertEqual(alive[-4:], alive_at_backwards[self.rank])
            self.assertEqual(offload.most_offloaded, most_offloaded[self.rank])
            for p, q in zip(expected, grads, strict=True):
                self.assertTrue(torch.equal(p, q))
            self.assertEqual(offload.pool.num_in_use, 0)


class TestConfig(unittest.TestCase):
    def test_not_on_the_command_line(self):
        own = {f.name for f in dataclasses.fields(FullACOffload.Config)}
        own -= {f.name for f in dataclasses.fields(FullAC.Config)}
        self.assertTrue(own)
        hints = typing.get_type_hints(FullACOffload.Config, include_extras=True)
        for name in own:
            self.assertIn(tyro.conf.Suppress, hints[name].__metadata__, name)

    def test_a_full_ac_config(self):
        config = FullACOffload.Config(fraction=0.5)
        self.assertIsInstance(config, FullAC.Config)
        self.assertIs(type(config.build(dump_folder="")), FullACOffload)

    def test_cuda_graphs_are_refused(self):
        for disable_cuda_graphs in (False, True):
            build = lambda: Trainer.Config(  # noqa: E731
                activation_checkpoint=FullACOffload.Config(),
                training=TrainingConfig(disable_cuda_graphs=disable_cuda_graphs),
                parallelism=ParallelismConfig(),
                compile=CompileConfig(),
            )
            if disable_cuda_graphs:
                self.assertEqual(build().activation_checkpoint.fraction, 1.0)
            else:
                with self.assertRaisesRegex(ValueError, "disable_cuda_graphs"):
                    build()


if __name__ == "__main__":
    unittest.main()
