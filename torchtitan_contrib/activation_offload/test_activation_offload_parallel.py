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

    def get_engine(self) -> HostOffloadEngine:
        self.engine = HostOffloadEngine(GIB, device_type="cpu")
        return self.engine

    @property
    def pool(self) -> HostPool:
        return self.engine.pool


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


def num_in_use(pool: HostPool) -> int:
    return pool.num_buffers - sum(len(buffers) for buffers in pool._free.values())


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
        self.assertEqual(num_in_use(offload.pool), 0)
        return offload

    def test_mixed_precision(self):
        offload = self.ten_steps()
        # Of block 0 as well, whose float32 input FSDP casts within the wrapper's call.
        self.assertEqual(offload.pool.num_buffers, NUM_BLOCKS - 1)

    def test_parameters_on_the_cpu(self):
        offload = self.ten_steps(offload_policy=CPUOffloadPolicy(pin_memory=False))
        self.assertEqual(offload.pool.num_buffers, NUM_BLOCKS - 1)

    def test_compiled_blocks(self):
        offload = self.ten_steps(compiled=True, dtype=torch.float32)
        # Gathered weights are seen by the hooks, and are larger than the inputs.
        self.assertEqual(offload.pool.num_buffers, NUM_BLOCKS - 1)
        self.assertEqual(list(offload.pool._free), [4096])


class TestDTensor(SingleRankTestCase):
    def test_inputs(self):
        for placement in (Shard(0), Replicate()):
            with self.subTest(placement=placement):
                reference, model, offload = self.build()
                seen = []
                for m in (reference, model):
                    for p_name, p in list(m.named_parameters()):
                        module = m.get_submodule(p_name.rpartition(".")[0])
                        leaf = p_name.rpartition(".")[2]
                        value = distribute_tensor(p.detach(), self.mesh, [Replicate()])
                        module.register_parameter(leaf, nn.Parameter(value))
                    x_TD = distribute_tensor(
                        torch.ones(TOKENS, DIM), self.mesh, [placement]
                    )
                    handles = [
                        block.up.register_forward_pre_hook(
                            lambda _, args: seen.append(
                                (type(args[0]), args[0].placements)
                            )
                        )
                        for block in m.layers.values()
                    ]
                    m(x_TD).square().mean().full_tensor().backward()
                    for handle in handles:
                        handle.remove()
                self.assert_same_grads(reference, model)
                self.assertEqual(offload.pool.num_buffers, NUM_BLOCKS - 1)
                self.assertEqual(num_in_use(offload.pool), 0)
                # In forward and in recomputation, with and without offload.
                self.assertEqual(seen, [(DTensor, (placement,))] * 4 * NUM_BLOCKS)


class TestPipeline(SingleRankTestCase):
    """Two stages on a rank; each is a model part with an engine of its own."""

    num_microbatches = 4

    def run_schedule(self, name: str, ac_cls: type, num_stages: int):
        torch.manual_seed(0)
        parts = [Model() for _ in range(num_stages)]
        policies = []
        for part in parts:
            policy = ac_cls()
            policy.apply(part)
            policies.append(policy)
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
        return losses, grads, policies

    def test_schedules(self):
        for name, num_stages in (
            ("GPipe", 1),
            ("1F1B", 1),
            ("Interleaved1F1B", 2),
            ("InterleavedZeroBubble", 2),
            ("LoopedBFS", 2),
        ):
            with self.subTest(schedule=name):
                full = self.run_schedule(
                    name, lambda: FullAC(FullAC.Config()), num_stages
                )
                ours = self.run_schedule(name, CPUOffload, num_stages)
                for expected, result in zip(full[:2], ours[:2], strict=True):
                    self.assertTrue(expected)
                    for x, y in zip(expected, result, strict=True):
                        self.assertTrue(torch.equal(x, y))
                for policy in ours[2]:
                    pool = policy.pool
                    self.assertEqual(num_in_use(pool), 0)
                    # As many as were in flight at once.
                    self.assertGreaterEqual(pool.num_buffers, NUM_BLOCKS - 1)
                    self.assertLessEqual(
                        pool.num_buffers, self.num_microbatches * (NUM_BLOCKS - 1)
                    )


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
