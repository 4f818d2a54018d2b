# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""FullACOffload ends as FullAC does: in the same bits, or in the same kind of error.

Copies run at the latest possible time, so that whatever may still change the bytes of
an input after it was saved does so before they are copied.
"""

import copy
import ctypes
import random
import unittest
import weakref
from contextlib import nullcontext
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F

from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.activation_offload import FullACOffload, HostOffloadEngine
from torchtitan.distributed.activation_offload.host_copy import HostCopy
from torchtitan.distributed.activation_offload.streams import BlockingCopies

TOKENS, DIM, NUM_BLOCKS, GIB = 4, 8, 4, 2**30


class LateCopies(BlockingCopies):
    """A side stream that does nothing before someone waits for it.

    Copies run in the order in which they were launched, at the latest possible time:
    when the compute stream waits for one of them. What is read or freed without a wait
    is therefore wrong here on every run, as on a GPU it is now and then.
    """

    def __init__(self):
        self.queue, self.num_done, self.num_launched = [], 0, 0

    def current(self):
        return "compute"

    def use(self, stream):
        assert stream == "compute"
        return nullcontext()

    def copy(self, pairs, *, after):
        assert after == "compute"
        for target, source in pairs:
            target.fill_(0x7F)  # 0x7f7f7f7f is 3.4e38
            # Addresses, as of a GPU's copy: a reference would hide a missing one.
            self.queue.append((target.data_ptr(), source.data_ptr(), source.numel()))
            self.num_launched += 1
        return self.num_launched

    def wait(self, stream, copied):
        assert stream == "compute"
        while self.num_done < copied:
            ctypes.memmove(*self.queue.pop(0))
            self.num_done += 1


class Offload(FullACOffload):
    def __init__(self, config, copies):
        super().__init__(config)
        self.copies = copies

    def get_engine(self):
        engine = HostOffloadEngine(GIB, device_type="cpu")
        engine._copy_streams[torch.device("cpu")] = self.copies
        return engine


def engine_of(model):
    return model.layers["0"]._block_hooks.engine


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + F.dropout(self.linear(x).tanh(), 0.1)


class Model(nn.Module):
    """Calls ``after_block`` with the input and the output of each block."""

    def __init__(self, block_cls=Block):
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleDict({str(i): block_cls() for i in range(NUM_BLOCKS)})
        self.held = None
        """A list, to hold the inputs of the blocks."""

    def forward(self, x_TD):
        h_TD = self.proj(x_TD)
        for i, block in enumerate(self.layers.values()):
            if self.held is not None:
                self.held.append(h_TD)
            out = self.call(i, block, h_TD)
            self.after_block(i, h_TD, out)
            h_TD = out
        return h_TD.square().mean()

    def call(self, i, block, h_TD):
        return block(h_TD)

    def after_block(self, i, h_TD, out):
        pass


def build(model_cls=Model, block_cls=Block, fraction=1.0, copies=None, **config):
    """Return a model under FullAC and its copy under FullACOffload."""
    torch.manual_seed(1)
    reference = model_cls(block_cls)
    model = copy.deepcopy(reference)
    FullAC.Config(**config).build().apply(reference)
    ours = FullACOffload.Config(min_bytes=0, fraction=fraction, **config)
    Offload(ours, copies or LateCopies()).apply(model)
    return reference, model


def one_step(model):
    torch.manual_seed(2)
    x_TD = torch.randn(TOKENS, DIM)
    loss = model(x_TD)
    del x_TD
    loss.backward()
    return loss.detach()


def outcome(model, step):
    """Return the type of the error, or the result and the gradients as plain numbers."""
    try:
        result = step(model)
    except Exception as error:
        return type(error)
    grads = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
    return result.tolist(), grads


class TestLikeFullAC(unittest.TestCase):
    def check(self, step=one_step, expected=None, **kwargs):
        for fraction in (0.5, 1.0):
            reference, model = build(fraction=fraction, **kwargs)
            first, second = outcome(reference, step), outcome(model, step)
            self.assertEqual(first, second)
            if expected is None:
                self.assertIsInstance(first, tuple)
            else:
                self.assertIs(first, expected)

    # Refused by both

    def test_in_place_on_the_input(self):
        class InPlace(Block):
            def forward(self, x):
                return super().forward(x.mul_(2))

        self.check(block_cls=InPlace, expected=RuntimeError)

    def test_in_place_on_a_view_of_the_input(self):
        class InPlace(Block):
            def forward(self, x):
                x[1:, ::2].add_(1)
                return super().forward(x)

        self.check(block_cls=InPlace, expected=RuntimeError)

    def test_in_place_on_a_detached_input(self):
        class InPlace(Block):
            def forward(self, x):
                out = super().forward(x)
                with torch.no_grad():
                    x.detach().view(-1).zero_()
                return out

        self.check(block_cls=InPlace, expected=RuntimeError)

    def test_in_place_after_the_block(self):
        for block_index in range(NUM_BLOCKS):

            class Later(Model):
                def after_block(self, i, h_TD, out, block_index=block_index):
                    if i == block_index:
                        h_TD.detach().mul_(2)

            with self.subTest(block=block_index):
                self.check(model_cls=Later, expected=RuntimeError)

    def test_in_place_after_the_next_blocks(self):
        def step(model, index):
            model.held = []
            torch.manual_seed(2)
            loss = model(torch.randn(TOKENS, DIM))
            with torch.no_grad():
                model.held[index].add_(1)
            model.held = None
            loss.backward()
            return loss.detach()

        for index in range(NUM_BLOCKS):
            with self.subTest(block=index):
                self.check(lambda m: step(m, index), expected=RuntimeError)

    def test_in_place_between_two_backwards(self):
        def step(model):
            model.held = []
            torch.manual_seed(2)
            loss = model(torch.randn(TOKENS, DIM))
            loss.backward(retain_graph=True)
            with torch.no_grad():
                model.held[1].add_(1)
            loss.backward()

        self.check(step, expected=RuntimeError)

    def test_a_recomputation_that_differs(self):
        class Growing(Block):
            calls = 0

            def forward(self, x):
                self.calls += 1
                return super().forward(x if self.calls == 1 else x.exp().log())

        self.check(
            block_cls=Growing, expected=torch.utils.checkpoint.CheckpointError
        )

    def test_backward_twice(self):
        def step(model):
            loss = model(torch.randn(TOKENS, DIM))
            loss.backward()
            loss.backward()

        self.check(step, expected=RuntimeError)

    # The same bits in both

    def test_in_place_on_the_output(self):
        class Output(Model):
            def after_block(self, i, h_TD, out):
                out.mul_(2)

        self.check(model_cls=Output)

    def test_changed_without_a_new_version(self):
        """The backward of FullAC sees the new bytes, as no one can tell."""

        class Refilled(Model):
            def after_block(self, i, h_TD, out):
                h_TD.data.mul_(1.5)

        self.check(model_cls=Refilled)

        def step(model):
            model.held = []
            torch.manual_seed(2)
            loss = model(torch.randn(TOKENS, DIM))
            for h_TD in model.held:
                h_TD.data.mul_(1.5)
            model.held = None
            loss.backward()
            return loss.detach()

        self.check(step)

    def test_a_buffer_that_is_refilled_for_the_next_microbatch(self):
        """Without a new version, as by a receive, while the older graph lives."""

        def step(model):
            buffer, losses = torch.empty(TOKENS, DIM, requires_grad=True), []
            for i in range(3):
                torch.manual_seed(i)
                buffer.data.copy_(torch.randn(TOKENS, DIM))
                h_TD = buffer
                for block in model.layers.values():
                    h_TD = block(h_TD)
                losses.append(h_TD.square().mean())
            for loss in losses:
                loss.backward()
            return buffer.grad

        self.check(step)

    def test_random_state(self):
        for preserve_rng_state in (True, False):
            self.check(preserve_rng_state=preserve_rng_state)

    def test_outputs_that_are_no_tensors(self):
        class Named(Block):
            def forward(self, x):
                return {"out": super().forward(x), "name": "block", "count": [3, None]}

        class NamedModel(Model):
            def call(self, i, block, h_TD):
                result = block(h_TD)
                assert (result["name"], result["count"]) == ("block", [3, None])
                return result["out"]

        self.check(model_cls=NamedModel, block_cls=Named)

    def test_an_input_that_needs_no_grad(self):
        class Detached(Model):
            def call(self, i, block, h_TD):
                return block(h_TD.detach() if i == 2 else h_TD)

        self.check(model_cls=Detached)

    def test_a_part_without_grad(self):
        class Partly(Block):
            def forward(self, x):
                with torch.no_grad():
                    gate = self.linear(x).sigmoid()
                return super().forward(x) * gate + x.detach().cos()

        self.check(block_cls=Partly)

    def test_a_forward_without_grad_between(self):
        def step(model):
            torch.manual_seed(2)
            loss = model(torch.randn(TOKENS, DIM))
            with torch.no_grad():
                model(torch.randn(TOKENS, DIM))
            loss.backward()
            return loss.detach()

        self.check(step)

    def test_double_backward(self):
        def step(model):
            torch.manual_seed(2)
            x_TD = torch.randn(TOKENS, DIM, requires_grad=True)
            (grad,) = torch.autograd.grad(model(x_TD), x_TD, create_graph=True)
            grad.square().sum().backward()
            return grad.detach()

        self.check(step)

    def test_weights_that_change_before_backward(self):
        def step(model):
            torch.manual_seed(2)
            loss = model(torch.randn(TOKENS, DIM))
            with torch.no_grad():
                for block in model.layers.values():
                    block.linear.weight.mul_(2)
            loss.backward()
            return loss.detach()

        self.check(step)

    # Where they differ

    def test_in_place_on_keyword_and_tuple_inputs(self):
        """FullAC does not check the versions of these, and recomputes with new values."""

        class InPlace(Block):
            def forward(self, x, *, gate=None, pair=None):
                change = gate if pair is None else pair[0]
                out = super().forward(x) * change
                change.detach().mul_(2)
                return out

        class Keyword(Model):
            def call(self, i, block, h_TD):
                return block(h_TD, gate=h_TD * 0.5)

        class Tuple(Model):
            def call(self, i, block, h_TD):
                return block(h_TD, pair=(h_TD * 0.5,))

        for model_cls in (Keyword, Tuple):
            reference, model = build(model_cls, InPlace)
            self.assertIsInstance(outcome(reference, one_step), tuple)
            self.assertIs(outcome(model, one_step), RuntimeError)

    # Any order of all of it

    def test_random_programs(self):
        """Forwards, backwards, changes and drops in random order, over 150 programs."""
        ends = set()
        for seed in range(150):
            reference, model = build(fraction=random.Random(seed).choice((0.5, 1.0)))
            first, second = (list(run_program(m, seed)) for m in (reference, model))
            for i, (expected, result) in enumerate(zip(first, second, strict=True)):
                self.assertEqual(expected, result, f"seed {seed}, operation {i}")
                ends.add(expected if isinstance(expected, type) else type(expected))
        self.assertEqual(ends, {str, tuple, RuntimeError})


def run_program(model, seed):
    """Yield what comes of each operation of a random program."""
    choose, losses, held = random.Random(seed), [], []
    for number in range(14):
        operation = choose.choice("FFFFBBBRCCUDX")
        torch.manual_seed(number)
        if operation == "F" or not losses:
            model.held = [] if choose.random() < 0.5 else None
            losses.append(model(torch.randn(TOKENS, DIM)))
            held.extend(model.held or [])
            model.held = None
            yield "forward"
        elif operation in "BR":
            retain = operation == "R"
            index = choose.randrange(len(losses))
            loss = losses[index] if retain else losses.pop(index)
            model.zero_grad()

            def step(_, loss=loss, retain=retain):
                loss.backward(retain_graph=retain)
                return loss.detach()

            yield outcome(model, step)
        elif operation in "CU" and held:
            tensor = choose.choice(held).detach()
            (tensor if operation == "C" else tensor.data).mul_(1.25)
            yield "changed"
        elif operation == "D":
            held.clear()
            yield "dropped"
        elif operation == "X":
            losses.pop(choose.randrange(len(losses)))
            yield "abandoned"


class TestOrder(unittest.TestCase):
    """When copies run: the logic that a GPU needs, without one."""

    def test_nothing_is_used_before_its_copy_is_done(self):
        reference, model = build()
        (copies,) = engine_of(model)._copy_streams.values()
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
            def copy(self, pairs, *, after):
                super().copy(pairs, after=after)
                host = {b.data_ptr() for buffer in buffers for b in buffer.pieces}
                (target, _), *_ = pairs
                log.append("out" if target.data_ptr() in host else "in")

        _, model = build(copies=LoggingCopies())
        buffers = []
        pool = engine_of(model).pool
        take = pool.take

        def recording_take(num_bytes):
            buffers.append(take(num_bytes))
            return buffers[-1]

        pool.take = recording_take
        for name, block in model.layers.items():
            block.linear.register_forward_pre_hook(lambda *_, name=name: log.append(name))

        loss = model(torch.randn(TOKENS, DIM))
        # The input of block i goes out while block i + 1 computes.
        self.assertEqual(log, "0 out 1 out 2 out 3".split())
        log.clear()
        loss.backward()
        # The input of block i comes in before block i + 1 is recomputed.
        self.assertEqual(log, "in 3 in 2 in 1 0".split())

    def test_fetches_within_the_micro_batch(self):
        """The next backward is of another micro-batch: its inputs are not touched."""
        _, model = build(copies=BlockingCopies())
        losses = [model(torch.randn(TOKENS, DIM)) for _ in range(3)]
        fetched = []
        fetch = HostCopy.fetch

        def recording_fetch(self):
            if self._source is None and self._restored is None:
                fetched.append(weakref.ref(self))
            fetch(self)

        with mock.patch.object(HostCopy, "fetch", recording_fetch):
            for i in (0, 2, 1):
                fetched.clear()
                losses[i].backward()
                losses[i] = None
                self.assertEqual(len(fetched), NUM_BLOCKS)
                self.assertTrue(all(copy() is None for copy in fetched))


if __name__ == "__main__":
    unittest.main()
