# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""The parts of FullACOffload by themselves: what is offloaded, and the host memory."""

import gc
import mmap
import random
import unittest
from unittest import mock

import torch
import torch.nn as nn

from torchtitan.distributed.activation_offload import (
    BlockInputPolicy,
    FullACOffload,
    HostPool,
)
from torchtitan.distributed.activation_offload.layout import num_holders
from torchtitan.distributed.activation_offload.pool import NUM_ROUNDS_KEPT, round_up

PAGE = mmap.PAGESIZE


class TestPolicy(unittest.TestCase):
    def test_blocks_are_spread_evenly(self):
        for fraction, num_blocks, expected in (
            (0.0, 8, []),
            (1.0, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
            (0.5, 8, [0, 2, 4, 6]),
            (0.25, 8, [0, 4]),
            (0.75, 8, [0, 1, 2, 4, 5, 6]),
            (0.5, 1, [0]),  # rounded up
            (0.07, 100, [0, 14, 28, 42, 57, 71, 85]),  # 0.07 * 100 > 7
            (1.0, 0, []),
        ):
            with self.subTest(fraction=fraction, num_blocks=num_blocks):
                policy = BlockInputPolicy(fraction=fraction)
                selected = [i for i in range(num_blocks) if policy.select_block(i)]
                self.assertEqual(selected, expected)

    def test_the_number_is_the_fraction_rounded_up(self):
        for num_blocks in range(1, 80):
            for percent in range(0, 101):
                policy = BlockInputPolicy(fraction=percent / 100)
                selected = sum(policy.select_block(i) for i in range(num_blocks))
                self.assertEqual(selected, -(-percent * num_blocks // 100))

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
    def take_all(self, pool, num_pages):
        """Take buffers of so many pages each; fail where one does not fit."""
        buffers = [pool.take(n * PAGE) for n in num_pages]
        self.assertNotIn(None, buffers)
        return buffers

    def put_all(self, pool, buffers):
        for buffer in buffers:
            pool.put(buffer)

    def test_rounding_is_to_the_pages_of_the_system(self):
        # A kernel for Grace CPUs may have pages of 64 KiB.
        for page, num_bytes, expected in (
            (4096, 1, 4096),
            (4096, 4096, 4096),
            (4096, 4097, 8192),
            (65536, 1, 65536),
            (65536, 65537, 131072),
            (65536, 65_536 * 6_144 * 2, 65_536 * 6_144 * 2),  # 768 MiB
        ):
            with mock.patch.object(mmap, "PAGESIZE", page):
                self.assertEqual(round_up(num_bytes), expected)

    def test_bound_and_reuse(self):
        pool = HostPool(3 * PAGE, "cpu")
        first, second = pool.take(PAGE - 1), pool.take(PAGE)
        self.assertEqual([p.shape for p in first.pieces], [(PAGE,)])
        self.assertIsNone(pool.take(PAGE + 1), "two pages more would pass the bound")
        third = pool.take(1)
        self.assertEqual((pool.num_in_use, pool.allocated_bytes), (3, 3 * PAGE))
        self.assertIsNone(pool.take(1))
        pool.put(second)
        again = pool.take(17)
        self.assertEqual(again.pieces[0].data_ptr(), second.pieces[0].data_ptr())
        self.assertEqual(pool.allocated_bytes, 3 * PAGE)
        self.put_all(pool, (first, third, again))
        self.assertEqual(pool.num_in_use, 0)

    def test_growing_sequences(self):
        """73 inputs of 8k, 16k, 32k and 64k tokens need no more than those of 64k."""
        pool = HostPool(73 * 64 * PAGE, "cpu")
        for num_pages in (8, 16, 32, 64):
            self.put_all(pool, self.take_all(pool, [num_pages] * 73))
            self.assertEqual(pool.allocated_bytes, 73 * num_pages * PAGE)

    def test_any_order_of_lengths_needs_what_the_longest_needs(self):
        for seed in range(20):
            lengths = list(range(1, 30))
            random.Random(seed).shuffle(lengths)
            pool = HostPool(7 * 29 * PAGE, "cpu")
            for num_pages in lengths:
                self.put_all(pool, self.take_all(pool, [num_pages] * 7))

    def test_best_fit(self):
        pool = HostPool(20 * PAGE, "cpu")
        # Free parts of 4, 2 and 3 pages, with one page in use after each.
        buffers = self.take_all(pool, (4, 1, 2, 1, 3, 1))
        self.put_all(pool, buffers[::2])
        for num_pages, index in ((2, 2), (3, 4), (1, 0), (3, 0)):
            (buffer,) = self.take_all(pool, (num_pages,))
            self.assertGreaterEqual(buffer.start, buffers[index].start)
            self.assertLessEqual(buffer.end, buffers[index].end)
        self.assertEqual(pool.allocated_bytes, 12 * PAGE)

    def test_random_takes_and_puts(self):
        """Against a list of bytes: every buffer keeps what was written to it."""
        for seed in range(30):
            choose = random.Random(seed)
            pool = HostPool(40 * PAGE, "cpu")
            in_use = {}
            for number in range(1, 120):
                if in_use and choose.random() < 0.5:
                    value, buffer = in_use.popitem()
                    for piece in buffer.pieces:
                        self.assertTrue((piece == value).all())
                    pool.put(buffer)
                    continue
                num_bytes = choose.randrange(1, 9 * PAGE)
                buffer = pool.take(num_bytes)
                if buffer is None:
                    # No gap between those in use is wide enough, nor the end.
                    edges = sorted((b.start, b.end) for b in in_use.values())
                    starts = [s for s, _ in edges] + [pool.max_bytes]
                    ends = [0] + [e for _, e in edges]
                    for start, end in zip(starts, ends, strict=True):
                        self.assertLess(start - end, round_up(num_bytes))
                    continue
                size = sum(piece.numel() for piece in buffer.pieces)
                self.assertEqual(size, round_up(num_bytes))
                for piece in buffer.pieces:
                    piece.fill_(number)
                in_use[number] = buffer
                self.assertLessEqual(pool.allocated_bytes, pool.max_bytes)
            self.assertEqual(pool.num_in_use, len(in_use))

    def test_what_is_not_used_is_given_back(self):
        pool = HostPool(1000 * PAGE, "cpu")
        self.put_all(pool, self.take_all(pool, [8] * 5))
        for _ in range(NUM_ROUNDS_KEPT):
            self.assertEqual(pool.allocated_bytes, 40 * PAGE)
            self.put_all(pool, self.take_all(pool, [1] * 5))
        (buffer,) = self.take_all(pool, (1,))
        self.assertEqual(pool.allocated_bytes, 8 * PAGE)  # of the one extent in use
        pool.put(buffer)
        self.put_all(pool, self.take_all(pool, [8] * 5))
        self.assertEqual(pool.allocated_bytes, 40 * PAGE)

    def test_what_is_used_now_and_then_is_kept(self):
        pool = HostPool(1000 * PAGE, "cpu")
        with mock.patch.object(pool, "_allocate", wraps=pool._allocate) as allocate:
            for number in range(4 * NUM_ROUNDS_KEPT):
                num_pages = 8 if number % (NUM_ROUNDS_KEPT - 1) == 0 else 1
                self.put_all(pool, self.take_all(pool, [num_pages] * 5))
        self.assertEqual(allocate.call_count, 5)

    def test_put_in_the_middle_of_take(self):
        """As by garbage collection, which runs at any allocation."""
        pool = HostPool(4 * PAGE, "cpu")
        first, second = self.take_all(pool, (1, 1))
        allocate = pool._allocate

        def allocate_and_collect(num_bytes):
            pool.put(first)
            return allocate(num_bytes)

        with mock.patch.object(pool, "_allocate", allocate_and_collect):
            (third,) = self.take_all(pool, (1,))
        self.assertEqual((pool.num_in_use, third.start), (2, 2 * PAGE))
        self.put_all(pool, (second, third))
        self.assertEqual(pool.take(3 * PAGE).start, 0)

    def test_pages_are_registered_once_and_unregistered(self):
        """What CUDA is told, without CUDA."""
        registered = {}
        with (
            mock.patch("torch.cuda.synchronize") as synchronize,
            mock.patch.multiple(
                "torch.cuda._pin_memory_utils",
                pin_memory=registered.__setitem__,
                unpin_memory=registered.__delitem__,
            ),
        ):
            pool = HostPool(100 * PAGE, "cuda")
            self.put_all(pool, self.take_all(pool, (3, 1, 4)))
            self.assertEqual(sorted(registered.values()), [PAGE, 3 * PAGE, 4 * PAGE])
            self.assertEqual([a % PAGE for a in registered], [0] * 3)
            for _ in range(NUM_ROUNDS_KEPT + 1):
                self.put_all(pool, self.take_all(pool, (3,)))
            self.assertEqual(list(registered.values()), [3 * PAGE])
            self.assertEqual(synchronize.call_count, 1)
            del pool
            gc.collect()
            self.assertEqual(registered, {})


class TestHolders(unittest.TestCase):
    def test_num_holders(self):
        x = torch.randn(4, requires_grad=True) * 2
        self.assertEqual(num_holders(x), 1)
        alias, view = x.detach(), x[1:]
        self.assertEqual(num_holders(x), 3)
        squared = x.square()
        del x, view
        self.assertEqual(num_holders(alias), 2, "autograd has saved x")
        del squared
        self.assertEqual(num_holders(alias), 1)


class TestSharedEngine(unittest.TestCase):
    def tearDown(self):
        gc.collect()

    def offload(self, max_host_gib):
        policy = FullACOffload(
            FullACOffload.Config(min_bytes=0, max_host_gib=max_host_gib)
        )
        model = nn.Module()
        model.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(2)})
        policy.apply(model)
        return model.layers["0"]._block_hooks.engine

    def test_one_bound_in_a_process(self):
        """For a vision encoder and its decoder, and for the stages of a pipeline."""
        first, second = self.offload(1.0), self.offload(1.0)
        self.assertIs(first, second)
        self.assertEqual(first.pool.max_bytes, 2**30)

    def test_the_last_bound_holds(self):
        first = self.offload(1.0)
        with self.assertLogs(level="WARNING") as logs:
            self.offload(2.0)
        self.assertIn("was 1.00 GiB and becomes 2.00 GiB", logs.output[0])
        self.assertEqual(first.pool.max_bytes, 2**31)

    def test_an_engine_lives_as_long_as_its_blocks(self):
        self.offload(1.0)
        gc.collect()
        with self.assertNoLogs(level="WARNING"):
            self.assertEqual(self.offload(2.0).pool.max_bytes, 2**31)


if __name__ == "__main__":
    unittest.main()
