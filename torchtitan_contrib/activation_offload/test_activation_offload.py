# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""FullACOffload on one device: right bits, freed bytes, and every way to leave a step.

Each test of TestFullACOffload runs on the CPU, and on a GPU if there is one. The
reference is always FullAC on a copy of the same model.
"""

import copy
import ctypes
import gc
import time
import unittest
import weakref
from contextlib import nullcontext
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
)
from torch.multiprocessing.reductions import StorageWeakRef

from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.activation_offload import (
    BlockInputPolicy,
    engine as engine_module,
    FullACOffload,
    HostOffloadEngine,
    HostPool,
)
from torchtitan.distributed.activation_offload.pool import round_up
from torchtitan.distributed.activation_offload.streams import BlockingCopies

TOKENS, DIM, NUM_BLOCKS = 16, 64, 5
INPUT_BYTES = TOKENS * DIM * 4  # float32
GIB = 2**30


class Block(nn.Module):
    """A residual block with dropout, so that recomputation needs the right RNG state."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD + F.dropout(self.down(F.gelu(self.up(x_TD))), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module], dim: int = DIM) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.layers = nn.ModuleDict({str(i): b for i, b in enumerate(blocks)})

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        h_TD = self.proj(x_TD)
        for block in self.layers.values():
            h_TD = self.call(block, h_TD)
        return h_TD.float().square().mean()

    def call(self, block: nn.Module, h_TD: torch.Tensor) -> torch.Tensor:
        return block(h_TD)


class Offload(FullACOffload):
    """FullACOffload with the engine of a given device, which the test can look into."""

    def __init__(self, device: str, **config) -> None:
        super().__init__(FullACOffload.Config(**({"min_bytes": 0} | config)))
        self.device = device
        self.engine: HostOffloadEngine | None = None

    def get_engine(self) -> HostOffloadEngine:
        self.engine = HostOffloadEngine(
            int(self.config.max_host_gib * GIB), device_type=self.device
        )
        return self.engine

    @property
    def pool(self) -> HostPool:
        return self.engine.pool

    @property
    def num_free(self) -> int:
        return sum(len(buffers) for buffers in self.pool._free.values())


class TestPolicy(unittest.TestCase):
    def test_blocks_are_spread_evenly(self):
        for fraction, num_blocks, expected in (
            (0.0, 9, []),
            (1.0, 9, [0, 1, 2, 3, 4, 5, 6, 7]),
            (0.5, 9, [1, 3, 5, 7]),
            (0.25, 9, [3, 7]),
            (0.75, 9, [1, 2, 3, 5, 6, 7]),
            (1.0, 1, []),
            (1.0, 0, []),
            (0.5, 2, []),  # round(0.5) is 0
            (1.0, 2, [0]),
        ):
            with self.subTest(fraction=fraction, num_blocks=num_blocks):
                selected = BlockInputPolicy(fraction=fraction).select_blocks(num_blocks)
                self.assertEqual(sorted(selected), expected)

    def test_the_count_is_the_fraction_and_the_last_block_stays(self):
        for num_blocks in range(2, 80):
            for percent in range(0, 101, 5):
                policy = BlockInputPolicy(fraction=percent / 100)
                selected = policy.select_blocks(num_blocks)
                self.assertEqual(len(selected), round(percent / 100 * (num_blocks - 1)))
                self.assertNotIn(num_blocks - 1, selected)

    def test_tensors(self):
        policy = BlockInputPolicy(min_bytes=64)
        x = torch.zeros(16, requires_grad=True) * 1
        self.assertTrue(policy.select_tensor(x))
        self.assertFalse(policy.select_tensor(x[:15]), "too small")
        self.assertFalse(policy.select_tensor(torch.zeros(16)), "needs no grad")
        self.assertFalse(policy.select_tensor(torch.arange(16)), "positions")
        self.assertFalse(policy.select_tensor(nn.Parameter(torch.zeros(16))))

    def test_rejects(self):
        for build in (
            lambda: BlockInputPolicy(fraction=1.5),
            lambda: BlockInputPolicy(min_bytes=-1),
            lambda: FullACOffload.Config(fraction=-0.1),
            lambda: FullACOffload.Config(min_bytes=-1),
            lambda: FullACOffload.Config(max_host_gib=0),
        ):
            with self.assertRaisesRegex(ValueError, "but got"):
                build()


class TestHostPool(unittest.TestCase):
    def test_rounding(self):
        for num_bytes, expected in (
            (1, 4096),
            (4096, 4096),
            (4097, 8192),
            (16 << 20, 16 << 20),
            (65_536 * 6_144 * 2, 65_536 * 6_144 * 2),  # 768 MiB
            ((16 << 20) + 1, 18 << 20),
        ):
            self.assertEqual(round_up(num_bytes), expected)

    def test_bound_and_reuse(self):
        pool = HostPool(3 * 4096, "cpu")
        first, second = pool.take(4000), pool.take(4096)
        self.assertEqual((first.numel(), first.dtype), (4096, torch.uint8))
        self.assertIsNone(pool.take(5000), "8192 more would pass the bound")
        self.assertIsNotNone(pool.take(1))
        self.assertEqual((pool.num_buffers, pool.allocated_bytes), (3, 3 * 4096))
        self.assertIsNone(pool.take(1))
        pool.put(second)
        self.assertEqual(pool.take(17).data_ptr(), second.data_ptr())
        self.assertEqual(pool.num_buffers, 3)


class TestFullACOffload(unittest.TestCase):
    device = "cpu"

    def setUp(self):
        torch.manual_seed(0)
        self.input_TD = torch.randn(TOKENS, DIM, device=self.device)

    def build(
        self, *, model_cls=Model, block_cls=Block, num_blocks=NUM_BLOCKS, **config
    ):
        """Return a model under FullAC, its copy under FullACOffload, and the latter."""
        torch.manual_seed(1)
        reference = model_cls([block_cls() for _ in range(num_blocks)]).to(self.device)
        model = copy.deepcopy(reference)
        FullAC.Config().build().apply(reference)
        offload = Offload(self.device, **config)
        offload.apply(model)
        return reference, model, offload

    def step(self, model, inputs=None, seed=2):
        torch.manual_seed(seed)  # dropout
        loss = model(self.input_TD if inputs is None else inputs)
        loss.backward()
        return loss.detach()

    def assert_same_step(self, reference, model, seed=2):
        for m in (reference, model):
            m.zero_grad()
        expected = self.step(reference, seed=seed)
        self.assertTrue(torch.equal(self.step(model, seed=seed), expected))
        self.assert_same_grads(reference, model)

    def assert_same_grads(self, reference, model):
        for (name, p), (_, q) in zip(
            reference.named_parameters(), model.named_parameters(), strict=True
        ):
            self.assertIsNotNone(p.grad, name)
            self.assertTrue(torch.equal(p.grad, q.grad), name)

    def assert_all_returned(self, offload, num_buffers=NUM_BLOCKS - 1):
        self.assertEqual(offload.num_free, offload.pool.num_buffers)
        self.assertEqual(offload.pool.num_buffers, num_buffers)
        self.assertEqual(len(offload.engine._copies), 0)

    # Right numbers

    def test_ten_steps_bitwise(self):
        for fraction in (0.0, 0.25, 0.5, 1.0):
            with self.subTest(fraction=fraction):
                reference, model, offload = self.build(fraction=fraction)
                optimizers = [
                    torch.optim.AdamW(m.parameters(), lr=1e-2)
                    for m in (reference, model)
                ]
                for seed in range(10):
                    self.input_TD = torch.randn_like(self.input_TD)
                    self.assert_same_step(reference, model, seed)
                    for optimizer in optimizers:
                        optimizer.step()
                if fraction:
                    self.assert_all_returned(offload, round(fraction * 4))

    def test_fifty_repeats_bitwise(self):
        _, model, offload = self.build()
        expected = None
        for _ in range(50):
            model.zero_grad()
            loss = self.step(model)
            result = [loss, *(p.grad.clone() for p in model.parameters())]
            expected = expected or result
            for x, y in zip(result, expected, strict=True):
                self.assertTrue(torch.equal(x, y))
        self.assert_all_returned(offload)

    # Memory

    def test_inputs_are_freed_after_forward(self):
        """The formula, in tensors: all block inputs but the last one are gone."""

        class RecordingModel(Model):
            def call(self, block, h_TD):
                self.storages.append(StorageWeakRef(h_TD.untyped_storage()))
                return block(h_TD)

        for fraction, alive in ((0.0, 5), (0.5, 3), (1.0, 1)):
            with self.subTest(fraction=fraction):
                _, model, offload = self.build(
                    model_cls=RecordingModel, fraction=fraction
                )
                model.storages = []
                loss = model(self.input_TD)
                is_alive = [not s.expired() for s in model.storages]
                self.assertEqual(sum(is_alive), alive)
                self.assertTrue(is_alive[-1])
                if fraction:
                    freed = NUM_BLOCKS - alive
                    self.assertEqual(offload.pool.num_buffers, freed)
                    self.assertEqual(offload.pool.allocated_bytes, freed * INPUT_BYTES)
                    self.assertEqual(offload.num_free, 0)
                loss.backward()
                self.assertTrue(all(s.expired() for s in model.storages))

    def test_no_allocation_after_the_first_step(self):
        _, model, offload = self.build()
        self.step(model)
        pointers = {b.data_ptr() for bs in offload.pool._free.values() for b in bs}
        for _ in range(3):
            self.step(model)
            self.assertEqual(
                pointers,
                {b.data_ptr() for bs in offload.pool._free.values() for b in bs},
            )
        self.assert_all_returned(offload)

    def test_at_the_bound_inputs_stay_on_the_device_and_are_counted(self):
        reference, model, offload = self.build(max_host_gib=2.5 * INPUT_BYTES / GIB)
        with self.assertLogs(level="WARNING") as logs:
            self.assert_same_step(reference, model)
            self.assert_same_step(reference, model)
        self.assert_all_returned(offload, num_buffers=2)
        self.assertEqual(offload.engine.num_over_bound, 2 * 2)
        self.assertEqual(len(logs.output), 1)
        self.assertIn("max_host_gib", logs.output[0])

    def test_reports_its_size(self):
        with self.assertLogs(level="INFO") as logs:
            _, model, _ = self.build(max_host_gib=2)
        self.assertIn("inputs of 4 of 5 blocks to at most 2.00 GiB", str(logs.output))
        with self.assertLogs(level="INFO") as logs:
            self.step(model)
            self.step(model)
        (message,) = logs.output
        self.assertIn("4 buffers, 0.0 MiB (at most 2.00 GiB)", message)

    # Ways through a step, and out of it

    def test_recomputation_does_not_offload_again(self):
        reference, model, offload = self.build()
        loss = model(self.input_TD)
        with mock.patch.object(
            offload.pool, "take", side_effect=AssertionError("offload in backward")
        ):
            loss.backward()
        self.assert_same_step(reference, model)

    def test_gradient_accumulation(self):
        reference, model, offload = self.build()
        for m in (reference, model):
            for seed in range(3):
                self.step(m, self.input_TD + seed, seed)
        self.assert_same_grads(reference, model)
        self.assert_all_returned(offload)

    def test_evaluation(self):
        reference, model, offload = self.build()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for m in (reference.eval(), model.eval()):
                    m(self.input_TD)
        self.assertEqual(offload.pool.num_buffers, 0)
        self.assert_same_step(reference.train(), model.train())
        self.assert_all_returned(offload)

    def test_forward_without_backward(self):
        reference, model, offload = self.build()
        loss = model(self.input_TD)
        self.assertEqual(offload.num_free, 0)
        del loss
        self.assert_all_returned(offload)
        self.assert_same_step(reference, model)
        self.assert_all_returned(offload)

    def test_exception_in_forward(self):
        reference, model, offload = self.build()

        def fail(module, args):
            raise KeyError("in the middle")

        handle = model.layers["2"].up.register_forward_pre_hook(fail)
        with self.assertRaises(KeyError):
            model(self.input_TD)
        handle.remove()
        self.assert_all_returned(offload, num_buffers=3)
        self.assert_same_step(reference, model)
        self.assert_all_returned(offload)

    def test_exception_in_backward(self):
        reference, model, offload = self.build()

        def fail(grad):
            raise KeyError("in the middle")

        handle = model.layers["2"].up.weight.register_hook(fail)
        with self.assertRaises(KeyError):
            self.step(model)
        handle.remove()
        # Autograd holds what is left of the failed graph, here the inputs of blocks 0
        # and 1, until its thread's next backward (with FullAC as well).
        self.assert_same_step(reference, model)
        self.assertEqual(offload.num_free, offload.pool.num_buffers)
        self.assertLessEqual(offload.pool.num_buffers, NUM_BLOCKS - 1 + 2)
        self.assertEqual(len(offload.engine._copies), 0)

    def test_retain_graph(self):
        reference, model, offload = self.build()
        for m in (reference, model):
            torch.manual_seed(2)
            loss = m(self.input_TD)
            loss.backward(retain_graph=True)
            loss.backward()
        self.assert_same_grads(reference, model)
        del loss
        self.assert_all_returned(offload)

    def test_backward_to_some_inputs_only(self):
        reference, model, offload = self.build()
        grads = []
        for m in (reference, model):
            torch.manual_seed(2)
            loss = m(self.input_TD)
            # Stops at block 3; block 2 has been fetched by then, and is not used.
            grads.append(torch.autograd.grad(loss, m.layers["3"].down.weight)[0])
            del loss
        self.assertTrue(torch.equal(*grads))
        self.assert_all_returned(offload)

    def test_backward_inside_forward(self):
        """A graph is unpacked while its block's copy still holds the device memory."""

        class EagerBackward(Block):
            def forward(self, x):
                y = super().forward(x)
                if torch.is_grad_enabled() and not hasattr(x, "recomputed"):
                    (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
                    y = y + grad.detach()
                return y

        self.assert_same_step(*self.build(block_cls=EagerBackward)[:2])

    def test_interleaved_micro_batches(self):
        """Backwards in an order that is not the reverse of the forwards (1F1B)."""
        reference, model, offload = self.build()
        for m in (reference, model):
            losses = {}
            for action, i in (
                "F0",
                "F1",
                "F2",
                "B0",
                "F3",
                "B1",
                "B2",
                "F4",
                "B4",
                "B3",
            ):
                torch.manual_seed(int(i))
                if action == "F":
                    losses[i] = m(self.input_TD + int(i))
                else:
                    losses.pop(i).backward()
        self.assert_same_grads(reference, model)
        self.assert_all_returned(offload, num_buffers=3 * (NUM_BLOCKS - 1))

    # Inputs of all kinds

    def test_views_and_aliases(self):
        """A square tensor and its transpose: same storage, size and dtype."""
        pointers = []

        class Transposed(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(DIM, DIM)

            def forward(self, x, x_t):
                pointers.append(
                    (x.data_ptr(), x_t.data_ptr(), x.stride(), x_t.stride())
                )
                return x + self.linear(x_t).tanh()

        class TransposedModel(Model):
            def call(self, block, h):
                return block(h, h.t())

        self.input_TD = torch.randn(DIM, DIM, device=self.device)
        reference, model, offload = self.build(
            model_cls=TransposedModel, block_cls=Transposed
        )
        self.assert_same_step(reference, model)
        self.assert_all_returned(offload)  # one buffer a block, not two
        for x, x_t, stride, stride_t in pointers:
            self.assertEqual(x, x_t, "the alias came back as a copy")
            self.assertEqual((stride, stride_t), ((DIM, 1), (1, DIM)))

    def test_blocks_that_share_an_input(self):
        class Skip(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(DIM, DIM)

            def forward(self, x, first):
                return x + self.linear(first * x)

        class SkipModel(Model):
            def forward(self, x):
                h = first = self.proj(x)
                for block in self.layers.values():
                    h = block(h, first)
                return h.square().mean()

        reference, model, offload = self.build(model_cls=SkipModel, block_cls=Skip)
        self.assert_same_step(reference, model)
        # ``first`` is the input of block 0 as well: it has one buffer in all.
        self.assert_all_returned(offload)

    def test_part_of_a_larger_storage_stays(self):
        class SliceModel(Model):
            def call(self, block, h):
                return block(torch.cat([h, h])[: len(h)])

        reference, model, offload = self.build(model_cls=SliceModel)
        self.assert_same_step(reference, model)
        self.assertEqual(offload.pool.num_buffers, 0)

    def test_an_address_that_is_used_again(self):
        """A new tensor at a freed tensor's address is not taken for it."""
        reference, model, offload = self.build()
        for m in (reference, model):
            torch.manual_seed(2)
            losses = [m(self.input_TD * (i + 1)) for i in range(4)]
            for loss in losses:
                loss.backward()
        self.assert_same_grads(reference, model)

    def test_tuple_and_keyword_inputs(self):
        class Nested(Block):
            def forward(self, pair, positions, *, gate=None, extra=None, flag):
                assert flag == "on" and type(pair) is tuple and type(extra) is list
                x, (y,) = pair
                return super().forward(x) * gate + y + extra[0] + positions[:, None]

        class NestedModel(Model):
            def call(self, block, h):
                positions = torch.arange(TOKENS, device=h.device)
                gate, extra = h.sigmoid(), [h.cos()]
                return block(
                    (h, (h.sin(),)), positions, gate=gate, extra=extra, flag="on"
                )

        reference, model, offload = self.build(model_cls=NestedModel, block_cls=Nested)
        self.assert_same_step(reference, model)
        # Of each block but the last: h, its sine and the gate; not what is in a list.
        self.assert_all_returned(offload, num_buffers=3 * (NUM_BLOCKS - 1))

    def test_a_list_is_the_callers(self):
        class Appending(Block):
            def forward(self, x, seen):
                seen.append(len(seen))
                return super().forward(x)

        class AppendingModel(Model):
            def call(self, block, h):
                return block(h, self.seen)

        _, model, _ = self.build(model_cls=AppendingModel, block_cls=Appending)
        model.seen = []
        model(self.input_TD)
        self.assertEqual(len(model.seen), NUM_BLOCKS)

    def test_mixed_dtypes_and_odd_layouts(self):
        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(DIM, DIM)

            def forward(self, x, half, double, z, wide, conj):
                h = self.linear(x) + half.float() + double.float() + z.real
                return (h + wide.sum(0) + conj.imag).tanh()

        class MixedModel(Model):
            def call(self, block, h):
                z = torch.complex(h, h * 2)
                wide = (h * 3).expand(3, *h.shape)  # smaller than it looks
                return block(
                    h,
                    h.bfloat16(),
                    h.double().t().contiguous().t(),
                    z,
                    wide,
                    (z * 2).conj(),
                )

        reference, model, offload = self.build(model_cls=MixedModel, block_cls=Mixed)
        self.assert_same_step(reference, model)
        # All but the lazily conjugated one, of which the bytes do not tell the values.
        self.assert_all_returned(offload, num_buffers=5 * (NUM_BLOCKS - 1))

    def test_odd_number_of_bytes(self):
        class Truncating(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(3))

            def forward(self, x):
                return x * self.scale.to(x.dtype)

        class TruncatingModel(Model):
            def forward(self, x):
                h = self.proj(x)[:1, :3].bfloat16()
                for block in self.layers.values():
                    h = block(h)
                return h.float().sum()

        self.assert_same_step(
            *self.build(model_cls=TruncatingModel, block_cls=Truncating)[:2]
        )

    def test_in_place_on_an_input(self):
        """What FullAC refuses is refused, and not answered with wrong gradients."""

        class InPlace(Block):
            in_place = False

            def forward(self, x):
                return super().forward(x.mul_(2) if self.in_place else x)

        # Block 0 stays on the device at a half, and is on the host at 1.
        for fraction in (0.5, 1.0):
            reference, model, _ = self.build(block_cls=InPlace, fraction=fraction)
            for m in (reference, model):
                m.layers["0"]._checkpoint_wrapped_module.in_place = True
                with self.assertRaisesRegex(RuntimeError, "modified by an in-?place"):
                    self.step(m)

    def test_in_place_after_the_block(self):
        """By then the bytes are safe on the host; FullAC would refuse."""

        class LaterModel(Model):
            def call(self, block, h):
                out = block(h)
                if self.in_place:
                    h.detach().zero_()
                return out

        reference, model, _ = self.build(model_cls=LaterModel)
        reference.in_place, model.in_place = False, True
        # The last block's input stays on the device, where it would be overwritten.
        model.layers["4"].register_forward_hook(
            lambda *_: setattr(model, "in_place", False)
        )
        self.assert_same_step(reference, model)

    # What it is put together with

    def test_fraction_0_is_full_ac(self):
        reference, model, offload = self.build(fraction=0.0)
        self.assertIsNone(offload.engine)
        for p, q in zip(reference.layers.values(), model.layers.values(), strict=True):
            self.assertIs(type(q), CheckpointWrapper)
            self.assertEqual(q.checkpoint_fn.keywords, p.checkpoint_fn.keywords)

    def test_same_names_and_checkpoint_settings_as_full_ac(self):
        reference, model, _ = self.build()
        self.assertEqual(list(model.state_dict()), list(reference.state_dict()))
        self.assertEqual(
            [n for n, _ in model.named_parameters()],
            [n for n, _ in reference.named_parameters()],
        )
        for p, q in zip(reference.layers.values(), model.layers.values(), strict=True):
            self.assertEqual(q.checkpoint_fn.keywords, p.checkpoint_fn.keywords)
            self.assertEqual(q.up.in_features, DIM)  # attributes of the block show

    def test_compile_per_block(self):
        reference, model, offload = self.build()
        for m in (reference, model):
            m.eval()  # dropout of compiled blocks has an RNG of its own
            for block in m.layers.values():
                block.compile(backend="aot_eager", fullgraph=True)
        for _ in range(3):
            self.assert_same_step(reference, model)
        # The hooks around a compiled block see its weights, which are left alone.
        self.assert_all_returned(offload)
        self.assertEqual(offload.pool.allocated_bytes, 4 * INPUT_BYTES)

    def test_compile_of_the_whole_model(self):
        """Hooks cannot be opened in there: it is FullAC, and says nothing wrong."""
        reference, model, offload = self.build(num_blocks=2)
        for m in (reference, model):
            m.eval()
            m.compile(backend="aot_eager", fullgraph=True)
        self.assert_same_step(reference, model)
        self.assertEqual(offload.pool.num_buffers, 0)

    def test_own_policy_and_engine(self):
        class FirstBlockOnly:
            def select_blocks(self, num_blocks):
                return frozenset({0})

            def select_tensor(self, tensor):
                return tensor.requires_grad

        class CloningEngine:
            def __init__(self):
                self.calls = []

            def begin_block(self, block_index):
                return block_index

            def pack(self, tensor, block, *, offload):
                self.calls.append((block, offload))
                return tensor.detach().clone()

            def unpack(self, packed):
                return packed

            def end_block(self, block):
                self.calls.append((block, "end"))

        engine = CloningEngine()

        class Own(FullACOffload):
            def get_policy(self):
                return FirstBlockOnly()

            def get_engine(self):
                return engine

        reference, model, _ = self.build(fraction=0.0)
        Own(FullACOffload.Config()).apply(model_cp := self.unwrapped(model))
        self.assert_same_step(reference, model_cp)
        self.assertEqual(
            engine.calls,
            [c for i in range(NUM_BLOCKS) for c in ((i, i == 0), (i, "end"))],
        )

    @staticmethod
    def unwrapped(model):
        for name, block in model.layers.items():
            model.layers[name] = block._checkpoint_wrapped_module
        return model


class DeferredCopies(BlockingCopies):
    """A side stream that does nothing before someone waits for it.

    Copies run in the order in which they were launched, at the latest possible time:
    when the compute stream waits for one of them. What is read or freed without a wait
    is therefore wrong here on every run, as on a GPU it is now and then.
    """

    def __init__(self):
        self.queue, self.log, self.num_done, self.num_launched = [], [], 0, 0

    def current(self):
        return "compute"

    def use(self, stream):
        assert stream == "compute"
        return nullcontext()

    def copy(self, target, source, *, after):
        assert after == "compute"
        target.fill_(0x7F)  # 0x7f7f7f7f is 3.4e38
        # Addresses, as of a GPU's copy: to hold a reference would hide a missing one.
        self.queue.append((target.data_ptr(), source.data_ptr(), source.numel()))
        self.num_launched += 1
        return self.num_launched

    def wait(self, stream, copied):
        assert stream == "compute"
        while self.num_done < copied:
            ctypes.memmove(*self.queue.pop(0))
            self.num_done += 1


class TestOrder(unittest.TestCase):
    """When copies run: the logic that a GPU needs, without one."""

    def build(self, copies, num_blocks=NUM_BLOCKS):
        torch.manual_seed(1)
        reference = Model([Block() for _ in range(num_blocks)])
        model = copy.deepcopy(reference)
        FullAC.Config().build().apply(reference)
        offload = Offload("cpu")
        offload.apply(model)
        offload.engine._copy_streams[torch.device("cpu")] = copies
        return reference, model, offload

    def test_nothing_is_used_before_its_copy_is_done(self):
        reference, model, offload = self.build(copies := DeferredCopies())
        x_TD = torch.randn(TOKENS, DIM)
        for schedule in (
            "F0 B0",
            "F0 F1 B0 F2 B1 B2",
            "F0 F1 B1 F2 B0 B2",
            "F0 D0 F1 B1",
        ):
            for m in (reference, model):
                m.zero_grad()
                losses = {}
                for action, i in schedule.split():
                    torch.manual_seed(int(i))
                    if action == "F":
                        losses[i] = m(x_TD * (int(i) + 1))
                    elif action == "B":
                        losses.pop(i).backward()
                    else:  # dropped
                        losses.pop(i)
            for p, q in zip(reference.parameters(), model.parameters(), strict=True):
                self.assertTrue(torch.equal(p.grad, q.grad), schedule)
            # All copies were waited for: none writes into memory that was given up.
            self.assertEqual(copies.num_done, copies.num_launched)

    def test_fetched_one_block_ahead(self):
        log = []

        class LoggingCopies(BlockingCopies):
            def copy(self, target, source, *, after):
                super().copy(target, source, after=after)
                host = {b.data_ptr() for b in buffers}
                log.append("out" if target.data_ptr() in host else "in")

        reference, model, offload = self.build(LoggingCopies())
        buffers = []
        take = offload.pool.take

        def recording_take(num_bytes):
            buffers.append(take(num_bytes))
            return buffers[-1]

        offload.pool.take = recording_take
        for name, block in model.layers.items():
            block.up.register_forward_pre_hook(lambda *_, name=name: log.append(name))

        loss = model(torch.randn(TOKENS, DIM))
        self.assertEqual(log, "out 0 out 1 out 2 out 3 4".split())
        log.clear()
        loss.backward()
        # The input of block i comes in before block i + 1 is recomputed.
        self.assertEqual(log, "in 4 in 3 in 2 in 1 0".split())

    def test_fetches_within_the_micro_batch(self):
        """The next backward is of another micro-batch: its inputs are not touched."""
        # The last block as well: it is the one before the next micro-batch's first.
        with mock.patch.object(
            BlockInputPolicy, "select_blocks", lambda _, n: frozenset(range(n))
        ):
            _, model, _ = self.build(BlockingCopies())
        losses = [model(torch.randn(TOKENS, DIM)) for _ in range(3)]
        fetched = []
        fetch = engine_module.HostCopy.fetch

        def recording_fetch(self):
            if self._restored is None:
                fetched.append(weakref.ref(self))
            fetch(self)

        with mock.patch.object(engine_module.HostCopy, "fetch", recording_fetch):
            for i in (0, 2, 1):
                fetched.clear()
                losses[i].backward()
                losses[i] = None
                self.assertEqual(len(fetched), NUM_BLOCKS)
                self.assertTrue(all(copy() is None for copy in fetched))


@unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
class TestFullACOffloadCUDA(TestFullACOffload):
    """All of the above on a GPU, and what only a GPU shows."""

    device = "cuda"

    def test_bytes_freed_after_forward(self):
        """9 blocks, 8,192 tokens, 1,024 wide, bfloat16: 8 x 16 MiB = 128 MiB."""
        held = {}
        for name in ("full", "offload"):
            torch.manual_seed(0)
            model = Model([Block(1024) for _ in range(9)], 1024).cuda().bfloat16()
            if name == "full":
                FullAC.Config().build().apply(model)
            else:
                offload = Offload("cuda")
                offload.apply(model)
            x_TD = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)
            model(x_TD).backward()  # cuBLAS workspaces, gradients
            gc.collect()
            before = torch.cuda.memory_allocated()
            loss = model(x_TD)
            held[name] = torch.cuda.memory_allocated() - before
            del loss
        self.assertEqual(held["full"] - held["offload"], 128 * 2**20)
        self.assertEqual(offload.pool.allocated_bytes, 128 * 2**20)
        self.assertEqual(offload.num_free, 8)

    def test_buffers_are_pinned_and_unpinned(self):
        _, model, offload = self.build()
        self.step(model)
        memory = next(iter(offload.pool._free.values()))[0]
        source = torch.ones_like(memory, device="cuda")

        def copy_waits() -> bool:
            """Whether a copy to ``memory`` waits for the device, as to pageable memory."""
            torch.cuda.synchronize()
            torch.cuda._sleep(500_000_000)  # a quarter of a second or more
            start = time.perf_counter()
            memory.copy_(source, non_blocking=True)
            waited = time.perf_counter() - start
            torch.cuda.synchronize()
            return waited > 0.1

        self.assertFalse(copy_waits())
        del model, offload
        gc.collect()
        self.assertTrue(copy_waits())

    def test_no_synchronization_after_the_first_step(self):
        _, model, _ = self.build()
        self.step(model)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(self.input_TD).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_slow_copies(self):
        """Copies that take far longer than the compute are waited for."""
        reference, model, offload = self.build()
        self.step(model)
        (copies,) = offload.engine._copy_streams.values()
        copy_, slow = copies.copy, 20_000_000  # cycles, some 10 ms

        def slow_copy(target, source, *, after):
            with torch.cuda.stream(copies._stream):
                torch.cuda._sleep(slow)
            return copy_(target, source, after=after)

        copies.copy = slow_copy
        for seed in range(3):
            self.assert_same_step(reference, model, seed)

    def test_slow_compute(self):
        """A copy does not begin before its source has been computed."""
        reference, model, _ = self.build()
        model.proj.register_forward_hook(lambda *_: torch.cuda._sleep(50_000_000))
        for seed in range(3):
            self.assert_same_step(reference, model, seed)

    def test_refuses_cuda_graphs(self):
        _, model, _ = self.build()
        self.step(model)
        graph = torch.cuda.CUDAGraph()
        with self.assertRaisesRegex(RuntimeError, "does not work in a CUDA graph"):
            with torch.cuda.graph(graph):
                model(self.input_TD)


if __name__ == "__main__":
    unittest.main()
