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
import gc
import time
import unittest
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
    FullACOffload,
    HostOffloadEngine,
    HostPool,
)
from torchtitan.distributed.activation_offload.pool import round_up

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


class CountingPool(HostPool):
    """Counts the buffers that are taken, and those that are in use at once."""

    num_taken = most_in_use = 0

    def take(self, num_bytes: int):
        buffer = super().take(num_bytes)
        self.num_taken += buffer is not None
        self.most_in_use = max(self.most_in_use, self.num_in_use)
        return buffer


class Offload(FullACOffload):
    """FullACOffload with the engine of a given device, which the test can look into."""

    def __init__(self, device: str, **config) -> None:
        super().__init__(FullACOffload.Config(**({"min_bytes": 0} | config)))
        self.device = device
        self.engine: HostOffloadEngine | None = None

    def get_engine(self) -> HostOffloadEngine:
        max_bytes = int(self.config.max_host_gib * GIB)
        self.engine = HostOffloadEngine(max_bytes, device_type=self.device)
        self.engine.pool = CountingPool(max_bytes, self.device)
        return self.engine

    @property
    def pool(self) -> CountingPool:
        return self.engine.pool


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

    def assert_all_returned(self, offload, most_in_use=NUM_BLOCKS - 1):
        """Nothing is left of any graph, and so many inputs were on the host at once."""
        self.assertEqual(offload.pool.num_in_use, 0)
        self.assertEqual(offload.pool.most_in_use, most_in_use)
        self.assertFalse([ref for ref, _ in offload.engine._waiting if ref()])

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
                    self.assertEqual(offload.pool.num_in_use, freed)
                    self.assertEqual(
                        offload.pool.allocated_bytes, freed * round_up(INPUT_BYTES)
                    )
                loss.backward()
                self.assertTrue(all(s.expired() for s in model.storages))

    def test_no_allocation_after_the_first_step(self):
        _, model, offload = self.build()
        self.step(model)
        with mock.patch.object(
            offload.pool, "_allocate", side_effect=AssertionError("allocated again")
        ):
            for _ in range(3):
                self.step(model)
        self.assert_all_returned(offload)
        self.assertEqual(offload.pool.num_taken, 4 * (NUM_BLOCKS - 1))

    def test_growing_sequences(self):
        """The bound of the longest is enough for all, one after another."""
        lengths = [n * TOKENS for n in (8, 16, 32, 64)]
        bound = (NUM_BLOCKS - 1) * round_up(lengths[-1] * DIM * 4)
        reference, model, offload = self.build(max_host_gib=bound / GIB)
        for length in (*lengths, *lengths[::-1]):
            self.input_TD = torch.randn(length, DIM, device=self.device)
            self.assert_same_step(reference, model)
        self.assertEqual(offload.engine.num_over_bound, 0)
        self.assertEqual(offload.pool.num_taken, 8 * (NUM_BLOCKS - 1))
        self.assertEqual(offload.pool.allocated_bytes, bound)

    def test_at_the_bound_inputs_stay_on_the_device_and_are_counted(self):
        reference, model, offload = self.build(max_host_gib=2.5 * round_up(INPUT_BYTES) / GIB)
        with self.assertLogs(level="WARNING") as logs:
            self.assert_same_step(reference, model)
            self.assert_same_step(reference, model)
        self.assert_all_returned(offload, most_in_use=2)
        self.assertEqual(offload.engine.num_over_bound, 2 * 2)
        self.assertEqual(len(logs.output), 1)
        self.assertIn("max_host_gib", logs.output[0])

    def test_reports_its_size(self):
        with self.assertLogs(level="INFO") as logs:
            _, model, _ = self.build(max_host_gib=2)
        self.assertIn("of 5 blocks (fraction 1.0)", str(logs.output))
        self.assertIn("at most 2.00 GiB in this process", str(logs.output))
        with self.assertLogs(level="INFO") as logs:
            self.step(model)
            self.step(model)
        (message,) = logs.output
        self.assertIn("0.0 MiB for 4 inputs (at most 2.00 GiB)", message)

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
        self.assertEqual(offload.pool.num_taken, 0)
        self.assert_same_step(reference.train(), model.train())
        self.assert_all_returned(offload)

    def test_forward_without_backward(self):
        reference, model, offload = self.build()
        loss = model(self.input_TD)
        self.assertEqual(offload.pool.num_in_use, NUM_BLOCKS - 1)
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
        # The inputs of blocks 0 and 1; block 2 failed.
        self.assert_all_returned(offload, most_in_use=2)
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
        self.assertEqual(offload.pool.num_in_use, 0)
        self.assertLessEqual(offload.pool.most_in_use, NUM_BLOCKS - 1 + 2)

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
        # Three forwards at once; the last input of F2 goes out when B0 begins.
        self.assert_all_returned(offload, most_in_use=3 * NUM_BLOCKS)

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
        # ``first``, which the model holds to its end, stays, and is no one's copy.
        self.assert_all_returned(offload, most_in_use=NUM_BLOCKS - 2)

    def test_part_of_a_larger_storage_stays(self):
        class SliceModel(Model):
            def call(self, block, h):
                return block(torch.cat([h, h])[: len(h)])

        reference, model, offload = self.build(model_cls=SliceModel)
        self.assert_same_step(reference, model)
        self.assertEqual(offload.pool.num_taken, 0)

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
                # Operations of which autograd saves nothing.
                gate, extra = h * 0.5, [h * 0.1]
                return block(
                    (h, (h * 0.2,)), positions, gate=gate, extra=extra, flag="on"
                )

        reference, model, offload = self.build(model_cls=NestedModel, block_cls=Nested)
        self.assert_same_step(reference, model)
        # Of each block but the last: h, y and the gate; not what is in a list.
        self.assert_all_returned(offload, most_in_use=3 * (NUM_BLOCKS - 1))

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
                z = torch.complex(h * 1, h * 2)  # saves both of its inputs
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
        self.assert_all_returned(offload, most_in_use=5 * (NUM_BLOCKS - 1))

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

    # What it is put together with

    def test_fraction_0_is_full_ac(self):
        reference, model, offload = self.build(fraction=0.0)
        self.assertIsNone(offload.engine)
        for p, q in zip(reference.layers.values(), model.layers.values(), strict=True):
            self.assertIs(type(q), CheckpointWrapper)
            self.assertEqual(q.checkpoint_fn.keywords, p.checkpoint_fn.keywords)

    def test_a_copied_model_shares_the_engine(self):
        reference, model, offload = self.build()
        self.step(model)
        model = copy.deepcopy(model)
        for block in model.layers.values():
            self.assertIs(block._block_hooks.engine, offload.engine)
        self.assert_same_step(reference, model)
        self.assert_all_returned(offload)

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
        self.assertEqual(offload.pool.num_taken, 0)

    def test_own_policy_and_engine(self):
        class FirstBlockOnly:
            def select_block(self, position):
                return position == 0

            def select_tensor(self, tensor):
                return tensor.requires_grad

        class CloningEngine:
            def __init__(self):
                self.calls = []

            def begin_block(self, part, block_index):
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
            # Whether a block is selected is for the engine to ask.
            [c for i in range(NUM_BLOCKS) for c in ((i, True), (i, "end"))],
        )

    @staticmethod
    def unwrapped(model):
        for name, block in model.layers.items():
            model.layers[name] = block._checkpoint_wrapped_module
        return model


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
        self.assertEqual(offload.pool.num_in_use, 0)

    def test_buffers_are_pinned_and_unpinned(self):
        _, model, offload = self.build()
        self.step(model)
        memory = offload.pool._extents[0][1]
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

        def slow_copy(pairs, *, after):
            with torch.cuda.stream(copies._stream):
                torch.cuda._sleep(slow)
            return copy_(pairs, after=after)

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
