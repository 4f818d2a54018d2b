# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""The pipeline that streams host-resident matrices through a compute device.

The reference is the same update written out for one matrix at a time.
"""

import dataclasses
import os
import subprocess
import sys
import unittest
import weakref
from unittest import mock

import torch
from hypothesis import given, settings, strategies as st
from torch._inductor.utils import run_and_get_cpp_code

from torchtitan.distributed.flex_shard import (
    _host_memory,
    _host_offload_choice,
    _host_passes,
)
from torchtitan.distributed.flex_shard._host_memory import (
    parse_cpu_list,
    pinned_nbytes,
    use_own_cores,
)
from torchtitan.distributed.flex_shard._host_offload import (
    _fit_to_slots,
    _HostOffloadPipeline,
    _HostStack,
    _largest_batch_numel,
    _UpdateSplit,
)
from torchtitan.distributed.flex_shard._host_offload_choice import time_splits
from torchtitan.distributed.flex_shard._host_passes import (
    compile_host_passes,
    HostPasses,
)
from torchtitan.distributed.flex_shard._matrix_batches import (
    _batch_stacks,
    _MatrixStack,
    _NewtonSchulzSettings,
)
from torchtitan.distributed.flex_shard._offload_ring import (
    _nbytes,
    _NUM_SLOTS,
    _OffloadRing,
)

# A stack larger than a batch, stacks that share one, an empty one, tall and wide
# matrices, and a matrix of one row.
SHAPES = [(1, 5, 7), (3, 5, 7), (0, 5, 7), (2, 7, 5), (9, 5, 7), (1, 1, 4)]
MATRICES = 2  # a batch at least, so that there are more batches than slots
FACTOR, DECAY, STEP_SIZE = 0.95, 0.99, 0.02
SETTINGS = _NewtonSchulzSettings((3.4445, -4.7750, 2.0315), 5, 1e-7)


def normalize(settings, matrices):
    """Stands in for Newton-Schulz: it mixes a matrix, but not the matrices."""
    norm = matrices.norm(dim=(-2, -1), keepdim=True).clamp_min(settings.eps)
    matrices.copy_(matrices / norm)


def make_stacks(momentum_dtype=torch.float32, pin=False, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)

    def host(shape, dtype):
        value = torch.randn(shape, generator=generator).to(dtype)
        return value.pin_memory() if pin else value

    return [
        _HostStack(
            weight=host(shape, torch.float32),
            gradient=host(shape, torch.float32),
            momentum=host(shape, momentum_dtype),
            momentum_factor=FACTOR,
            nesterov=index % 2 == 0,
            decay=DECAY,
            step_size=STEP_SIZE * (1 + index),
        )
        for index, shape in enumerate(shapes)
    ]


def plan(shapes=SHAPES, matrices=MATRICES, max_numel=1 << 40):
    stacks = [
        _MatrixStack(
            item=index,
            num_matrices=count,
            rows=rows,
            columns=columns,
            dtype=torch.float32,
            settings=SETTINGS,
            stored_as=(),
        )
        for index, (count, rows, columns) in enumerate(shapes)
    ]
    return _fit_to_slots(
        _batch_stacks(stacks, matrices_per_batch=matrices, whole_stacks=False),
        max_numel,
    )


def make_pipeline(split, momentum_dtype=torch.float32, device="cpu", batches=None):
    batches = plan() if batches is None else batches
    return _HostOffloadPipeline(
        _OffloadRing.shared(torch.device(device)),
        max((batch.numel for batch in batches), default=0),
        split,
        momentum_dtype=momentum_dtype,
        compute=normalize,
        passes=HostPasses(),
    )


def step(pipeline, stacks, scale=1.0, batches=None):
    scaled = [dataclasses.replace(stack, gradient_scale=scale) for stack in stacks]
    pipeline.begin(dict(enumerate(scaled)))
    pipeline.run(plan() if batches is None else batches)
    pipeline.finish()


def reference_step(stack, gradient_scale):
    """One step of ``stack``, matrix by matrix, in the order of torch.optim.Muon."""
    for weight, grad, momentum in zip(stack.weight, stack.gradient, stack.momentum):
        grad = grad * gradient_scale
        state = momentum.float().lerp(grad, 1 - FACTOR)
        momentum.copy_(state)
        update = grad.lerp(state, FACTOR) if stack.nesterov else state
        update = update.bfloat16()
        normalize(SETTINGS, update)
        weight.mul_(stack.decay).add_(update.float(), alpha=-stack.step_size)


class TestFitToSlots(unittest.TestCase):
    @settings(max_examples=200, deadline=None)
    @given(
        shapes=st.lists(
            st.tuples(st.integers(0, 9), st.integers(1, 2), st.integers(1, 2)),
            max_size=8,
        ),
        matrices=st.integers(1, 5),
        max_numel=st.integers(1, 20),
    )
    def test_every_matrix_is_in_one_batch_that_fits(self, shapes, matrices, max_numel):
        seen = []
        for batch in plan(shapes, matrices, max_numel):
            self.assertTrue(batch.numel <= max_numel or batch.num_matrices == 1)
            filled = 0
            for member in batch.members:
                stack = member.stack
                self.assertEqual((stack.rows, stack.columns), (batch.rows, batch.columns))
                self.assertEqual(member.offset, filled)
                filled += member.num_matrices
                first = member.first
                seen += [(stack.item, first + i) for i in range(member.num_matrices)]
            self.assertEqual(batch.num_matrices, filled)
        self.assertEqual(
            sorted(seen),
            [(i, m) for i, (count, _, _) in enumerate(shapes) for m in range(count)],
        )

    def test_parts_of_a_batch_differ_by_one_matrix_at_most(self):
        for count in range(1, 30):
            sizes = [b.num_matrices for b in plan([(count, 2, 2)], 100, max_numel=4 * 7)]
            self.assertEqual(len(sizes), -(-count // 7))
            self.assertLessEqual(max(sizes) - min(sizes), 1)

    def test_buffers_of_wide_matrices(self):
        # One rank's four layers of a mixture of experts: query, key and value in one
        # weight; the output; 16 experts and a shared one, each of three matrices.
        layer = [(1, 10240, 6144), (1, 6144, 6144)]
        layer += 2 * [(16, 1792, 6144), (1, 1792, 6144)] + [(16, 6144, 1792)]
        layer += [(1, 6144, 1792)]
        dtypes = _UpdateSplit.ON_DEVICE.device_dtypes(torch.float32)

        def gib(batches):
            largest = max(batch.numel for batch in batches)
            return _NUM_SLOTS * _nbytes(largest, dtypes) / 2**30

        # Four of the widest matrices are one batch.
        self.assertAlmostEqual(gib(plan(4 * layer, 8)), 9.84, places=2)
        for max_gib, expected in ((3.0, 2.95), (8.0, 5.91), (100.0, 9.84)):
            limit = _largest_batch_numel(max_gib * 2**30, torch.float32)
            batches = plan(4 * layer, 8, limit)
            self.assertLessEqual(gib(batches), max_gib)
            self.assertAlmostEqual(gib(batches), expected, places=2)
            count = sum(batch.num_matrices for batch in batches)
            self.assertEqual(count, 4 * (2 + 3 * 17))

    def test_a_matrix_that_does_not_fit_is_alone(self):
        sizes = [batch.num_matrices for batch in plan([(3, 8, 8)], 8, max_numel=63)]
        self.assertEqual(sizes, [1, 1, 1])


class TestPipeline(unittest.TestCase):
    def _assert_matches_reference(self, pipeline, momentum_dtype, scale, pin=False):
        stacks = make_stacks(momentum_dtype, pin=pin)
        expected = make_stacks(momentum_dtype)
        for _ in range(3):
            step(pipeline, stacks, scale)
            for stack in expected:
                reference_step(stack, scale)
        for stack, reference in zip(stacks, expected):
            torch.testing.assert_close(
                stack.momentum, reference.momentum, rtol=0, atol=0
            )
            torch.testing.assert_close(stack.weight, reference.weight, rtol=0, atol=0)

    def test_each_split_matches_the_reference(self):
        for split in _UpdateSplit:
            for momentum_dtype in (torch.float32, torch.bfloat16):
                for scale in (1.0, 0.3):
                    with self.subTest(split=split, dtype=momentum_dtype, scale=scale):
                        pipeline = make_pipeline(split, momentum_dtype)
                        self._assert_matches_reference(pipeline, momentum_dtype, scale)

    def test_host_passes_cross_chunks(self):
        # 35 elements a matrix: chunks begin and end inside matrices.
        with mock.patch.object(_host_passes, "CHUNK", 16):
            pipeline = make_pipeline(_UpdateSplit.MOMENTUM_AND_WEIGHT_ON_HOST)
            self._assert_matches_reference(pipeline, torch.float32, 0.3)

    def test_gradients_are_left_as_they_are(self):
        for split in _UpdateSplit:
            stacks, untouched = make_stacks(), make_stacks()
            pipeline = make_pipeline(split)
            step(pipeline, stacks, 0.3)
            for stack, before in zip(stacks, untouched):
                self.assertTrue(torch.equal(stack.gradient, before.gradient))

    def test_nan_stays_in_its_matrix(self):
        for split in _UpdateSplit:
            stacks = make_stacks()
            stacks[1].gradient[1, 2, 3] = float("nan")
            pipeline = make_pipeline(split)
            step(pipeline, stacks)
            for index, stack in enumerate(stacks):
                bad = stack.weight.isnan().any(dim=2).any(dim=1)
                expected = torch.zeros(len(stack.weight), dtype=torch.bool)
                if index == 1:
                    expected[1] = True
                self.assertTrue(torch.equal(bad, expected))

    def test_buffers(self):
        numel = max(batch.numel for batch in plan())
        for split, device_bytes, staged in (
            (_UpdateSplit.MOMENTUM_AND_WEIGHT_ON_HOST, 2, 2),
            (_UpdateSplit.WEIGHT_ON_HOST, 2 + 4 + 4, 1),
            (_UpdateSplit.ON_DEVICE, 2 + 4 + 4 + 4, 0),
        ):
            pipeline = make_pipeline(split)
            ring = pipeline._ring
            least = _NUM_SLOTS * numel * device_bytes
            self.assertGreaterEqual(ring.device_bytes, least)
            self.assertLess(ring.device_bytes, least + _NUM_SLOTS * 4 * 512)
            block = 1 << (staged * 512 * -(-2 * numel // 512) - 1).bit_length()
            self.assertEqual(ring.pinned_bytes, _NUM_SLOTS * block if staged else 0)
            del pipeline, ring

    def _addresses(self, ring):
        return [t.data_ptr() for t in (*ring._on_device, *ring._on_host)]

    def test_buffers_are_made_once(self):
        pipeline = make_pipeline(_UpdateSplit.WEIGHT_ON_HOST)
        before = self._addresses(pipeline._ring)
        for _ in range(2):
            step(pipeline, make_stacks())
        self.assertEqual(before, self._addresses(pipeline._ring))

    def test_pipelines_share_the_buffers_of_the_largest(self):
        # As the optimizers of several pipeline stages on one rank do.
        large = make_pipeline(_UpdateSplit.ON_DEVICE)
        alone = large._ring.device_bytes
        others = [
            make_pipeline(split, momentum_dtype, batches=plan(SHAPES[:1]))
            for split in _UpdateSplit
            for momentum_dtype in (torch.float32, torch.bfloat16)
        ]
        self.assertEqual(large._ring.device_bytes, alone)
        for other in others:
            self.assertIs(other._ring, large._ring)
        # One that comes later and is larger: the first uses its memory from then on.
        huge = make_pipeline(_UpdateSplit.WEIGHT_ON_HOST, batches=plan([(99, 5, 7)], 99))
        self.assertGreater(huge._ring.device_bytes, alone)
        self._assert_matches_reference(large, torch.float32, 0.3)
        memory = weakref.ref(huge._ring)
        del large, other, others, huge
        self.assertIsNone(memory())

    def test_each_stack_has_its_own_gradient_scale(self):
        for split in _UpdateSplit:
            stacks, expected = make_stacks(), make_stacks()
            scales = [0.5, 1.0, 1.0, 0.1, 0.25, float("nan")]
            pipeline = make_pipeline(split)
            pipeline.begin(
                {
                    index: dataclasses.replace(stack, gradient_scale=scales[index])
                    for index, stack in enumerate(stacks)
                }
            )
            pipeline.run(plan())
            pipeline.finish()
            for stack, reference, scale in zip(stacks, expected, scales):
                reference_step(reference, scale)
                torch.testing.assert_close(
                    stack.momentum, reference.momentum, rtol=0, atol=0, equal_nan=True
                )

    def test_nothing_to_do(self):
        pipeline = make_pipeline(_UpdateSplit.ON_DEVICE, batches=())
        step(pipeline, [], batches=())


class TestHostPasses(unittest.TestCase):
    def test_compiled_passes_match_the_stock_ones(self):
        threads = torch.get_num_threads()
        self.addCleanup(torch.set_num_threads, threads)
        torch.set_num_threads(2)
        compiled = compile_host_passes(torch.float32)
        if compiled is None:
            self.skipTest("torch.compile has no C++ compiler here")
        # What was compiled serves a step: no size, no mode and no place in a larger
        # tensor compiles again. Offsets of zero and one, and equal to a size, are
        # those that torch.compile takes for constants.
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            for size in (5, 1124, 1 << 16):
                for offsets in (
                    (0, 0, 0),
                    (size, 0, 0),
                    (0, size, 0),
                    (0, 2 * size, size),
                    (1, 1, 1),
                    (1124, 1024, 3),
                ):
                    gradient, momentum, update = (
                        torch.ones(size + offset, dtype=dtype)[offset:]
                        for offset, dtype in zip(
                            offsets, (torch.float32, torch.float32, torch.bfloat16)
                        )
                    )
                    for nesterov in (False, True):
                        compiled.update_momentum(
                            gradient,
                            momentum,
                            update,
                            factor=0.5,
                            nesterov=nesterov,
                            gradient_scale=0.5,
                        )
                    self.assertEqual(momentum.unique().tolist(), [0.625])
                    self.assertEqual(update.unique().tolist(), [0.5625])
                    compiled.apply_direction(
                        momentum, update, decay=1.0, step_size=1.0
                    )
                    self.assertEqual(momentum.unique().tolist(), [0.0625])
        # Parallel, though two elements are not worth it: kernels outlive the tensors
        # that they were compiled for, also on disk.
        torch._dynamo.reset()
        _, code = run_and_get_cpp_code(
            compiled.apply_direction,
            torch.ones(2),
            torch.ones(2, dtype=torch.bfloat16),
            decay=1.0,
            step_size=0.5,
        )
        self.assertIn("omp parallel", code)
        generator = torch.Generator().manual_seed(0)
        # Sizes that the check at construction has not seen, and one below a vector.
        for size in (1, 7, 4099):
            weight, gradient, momentum = torch.randn(3, size, generator=generator)
            results = []
            for passes in (HostPasses(), compiled):
                w, m = weight.clone(), momentum.clone()
                update = torch.empty(size, dtype=torch.bfloat16)
                passes.update_momentum(
                    gradient, m, update, factor=0.95, nesterov=True, gradient_scale=0.7
                )
                direction = gradient.bfloat16()
                passes.apply_direction(w, direction, decay=0.9, step_size=0.1)
                results.append((w, m, update))
            (w, m, update), (w2, m2, update2) = results
            # Two roundings of the larger operand: a compiler may fuse the product and
            # the sum.
            ulp = 2**-23 * torch.maximum(gradient.abs(), momentum.abs())
            self.assertTrue(((m - m2).abs() <= 2 * ulp).all())
            ulp = 2**-23 * torch.maximum(weight.abs(), gradient.abs())
            self.assertTrue(((w - w2).abs() <= 2 * ulp).all())
            torch.testing.assert_close(update, update2, rtol=2**-7, atol=1e-6)

    def test_without_a_compiler(self):
        with mock.patch.object(
            _host_passes.CompiledHostPasses,
            "apply_direction",
            side_effect=RuntimeError("no g++"),
        ), self.assertLogs(_host_passes.logger, "WARNING") as logs:
            self.assertIsNone(compile_host_passes(torch.float32))
        self.assertIn("not compiled, which slows them: no g++", logs.output[0])


class TestCores(unittest.TestCase):
    def test_cpu_list(self):
        self.assertEqual(parse_cpu_list("0-2,8,10-11\n"), {0, 1, 2, 8, 10, 11})
        self.assertEqual(parse_cpu_list("\n"), set())

    def _threads(self, own, parent, environment, by_torchrun=True):
        affinity = {0: own, os.getppid(): parent}
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.object(
                _host_memory, "_torchrun_set_threads", return_value=by_torchrun
            ),
            mock.patch.object(os, "sched_getaffinity", affinity.__getitem__),
            mock.patch.object(torch, "set_num_threads") as threads,
        ):
            use_own_cores()
        return threads.call_args.args[0] if threads.called else None

    def test_share_of_the_cores_under_torchrun(self):
        environment = {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "4"}
        cores = set(range(72))
        self.assertEqual(self._threads(cores, cores, environment), 18)
        # Bound one by one: all of them are the rank's own.
        self.assertEqual(self._threads(set(range(18)), cores, environment), 18)
        # Never none.
        self.assertEqual(self._threads({0}, {0}, environment), 1)

    def test_a_user_s_number_is_kept(self):
        cores = set(range(8))
        for number, by_torchrun in (("5", True), ("1", False)):
            environment = {"OMP_NUM_THREADS": number, "LOCAL_WORLD_SIZE": "2"}
            self.assertIsNone(self._threads(cores, cores, environment, by_torchrun))

    def test_who_set_the_number_under_torchrun(self):
        # Real processes: a launcher, a worker of it, and perhaps a shell in between.
        ask = (
            "from torchtitan.distributed.flex_shard import _host_memory as m; "
            "print(m._torchrun_set_threads())"
        )
        worker = [sys.executable, "-c", ask]
        through_a_shell = ["sh", "-c", '"$@"; exit 0', "sh", *worker]
        launch = (
            "import os, subprocess, sys; "
            "os.environ.setdefault('OMP_NUM_THREADS', '1'); "
            "os.environ |= {'LOCAL_WORLD_SIZE': '2', 'TORCHELASTIC_RUN_ID': 'none'}; "
            "subprocess.run(sys.argv[1:], check=True)"
        )
        for command in (worker, through_a_shell):
            for of_the_user, expected in (({}, True), ({"OMP_NUM_THREADS": "1"}, False)):
                environment = dict(os.environ)
                for name in (
                    "OMP_NUM_THREADS",
                    "LOCAL_WORLD_SIZE",
                    "TORCHELASTIC_RUN_ID",
                ):
                    environment.pop(name, None)
                done = subprocess.run(
                    [sys.executable, "-c", launch, *command],
                    env=environment | of_the_user,
                    check=True,
                    capture_output=True,
                    text=True,
                )
                self.assertEqual(done.stdout.strip(), str(expected))

    def test_an_environment_that_cannot_be_read_is_left_alone(self):
        with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
            for error in (PermissionError(), FileNotFoundError()):
                with mock.patch.object(_host_memory, "_environment", side_effect=error):
                    self.assertFalse(_host_memory._torchrun_set_threads())

    def test_pinned_blocks_are_rounded_up(self):
        for elements, expected in ((1, 4), (4, 16), (5, 32), (1 << 10, 1 << 12)):
            self.assertEqual(pinned_nbytes(torch.empty(elements)), expected)


class TestTiming(unittest.TestCase):
    def test_the_sample_is_gone_when_its_memory_is_given_back(self):
        sample = []

        def empty_host(numel, dtype, device):
            tensor = torch.empty(numel, dtype=dtype)
            sample.append(weakref.ref(tensor))
            return tensor

        alive = []
        with (
            mock.patch.object(_host_offload_choice, "empty_host", empty_host),
            mock.patch.object(_host_offload_choice, "_SAMPLE_ELEMENTS", 1 << 10),
            mock.patch.object(
                _host_offload_choice,
                "release_pinned_cache",
                lambda device: alive.append([ref() for ref in sample]),
            ),
        ):
            seconds = time_splits(
                torch.device("cpu"),
                (8, 16),
                SETTINGS,
                momentum_dtype=torch.bfloat16,
                compute=normalize,
                passes=HostPasses(),
            )
        self.assertEqual(set(seconds), set(_UpdateSplit))
        self.assertEqual(alive, [[None] * 6])

    def test_pinned_cache_is_emptied_on_an_accelerator_only(self):
        calls = mock.Mock()
        with (
            mock.patch.object(torch.accelerator, "synchronize", calls.synchronize),
            mock.patch.object(torch.accelerator, "empty_host_cache", calls.empty),
        ):
            _host_memory.release_pinned_cache(torch.device("cpu"))
            self.assertEqual(calls.mock_calls, [])
            device = torch.device("cuda", 0)
            _host_memory.release_pinned_cache(device)
        self.assertEqual(
            calls.mock_calls, [mock.call.synchronize(device), mock.call.empty()]
        )


@unittest.skipUnless(torch.cuda.is_available(), "requires CUDA")
class TestPipelineOnCUDA(unittest.TestCase):
    # Copies and kernels of some 100 us, so that a missing wait shows.
    SHAPES = [(5, 512, 1024), (3, 512, 1024), (2, 1024, 512), (8, 512, 1024)]

    def _run(self, split, steps=3, device="cuda", scale=0.3):
        stacks = make_stacks(pin=True, shapes=self.SHAPES)
        batches = plan(self.SHAPES)
        pipeline = make_pipeline(split, device=device, batches=batches)
        for _ in range(steps):
            step(pipeline, stacks, scale, batches)
        return [tensor for s in stacks for tensor in (s.weight, s.momentum)]

    def test_splits_agree_with_the_cpu(self):
        expected = self._run(_UpdateSplit.ON_DEVICE, device="cpu", steps=1)
        for split in _UpdateSplit:
            got = self._run(split, steps=1)
            for index, (tensor, reference) in enumerate(zip(got, expected)):
                if index % 2:  # momentum: two roundings of operands below 6
                    self.assertLessEqual((tensor - reference).abs().max(), 2 * 6 * 2**-23)
                else:
                    torch.testing.assert_close(tensor, reference, rtol=1e-2, atol=1e-2)

    def test_repeats_are_bitwise_equal(self):
        # A race between streams would be an error that moves.
        for split in _UpdateSplit:
            first = self._run(split)
            for _ in range(50):
                for got, expected in zip(self._run(split), first):
                    self.assertTrue(torch.equal(got, expected))

    def test_memory_is_bounded_and_steps_allocate_nothing(self):
        for split in _UpdateSplit:
            stacks = make_stacks(pin=True, shapes=self.SHAPES)
            batches = plan(self.SHAPES)
            before = torch.cuda.memory_allocated()
            pipeline = make_pipeline(split, device="cuda", batches=batches)
            grown = torch.cuda.memory_allocated() - before
            self.assertGreaterEqual(grown, pipeline._ring.device_bytes)
            self.assertLessEqual(grown, pipeline._ring.device_bytes + 512 * 16)
            step(pipeline, stacks, batches=batches)
            pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
            after = torch.cuda.memory_allocated()
            for _ in range(3):
                step(pipeline, stacks, batches=batches)
            self.assertEqual(torch.cuda.memory_allocated(), after)
            self.assertEqual(
                torch.cuda.host_memory_stats()["allocated_bytes.current"], pinned
            )
            del pipeline, stacks  # before the next split is measured

    def test_timing_of_splits(self):
        before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        seconds = time_splits(
            torch.device("cuda", torch.cuda.current_device()),
            (512, 1024),
            SETTINGS,
            momentum_dtype=torch.float32,
            compute=normalize,
            passes=HostPasses(),
        )
        after = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        self.assertLessEqual(after, before)
        self.assertEqual(set(seconds), set(_UpdateSplit))
        self.assertTrue(all(0 < value < 1e-6 for value in seconds.values()))

    @unittest.skipUnless(torch.cuda.device_count() >= 2, "requires two CUDA devices")
    def test_device_that_is_not_current(self):
        torch.cuda.set_device(0)
        side = [torch.cuda.Stream(device=index) for index in range(2)]
        before = [torch.cuda.current_stream(index) for index in range(2)]
        self.addCleanup(lambda: [torch.cuda.set_stream(s) for s in before[::-1]])
        for stream in side[::-1]:
            torch.cuda.set_stream(stream)
        for split in _UpdateSplit:
            got = self._run(split, device="cuda:1")
            self.assertEqual(torch.cuda.current_device(), 0)
            self.assertEqual([torch.cuda.current_stream(i) for i in range(2)], side)
            for tensor, expected in zip(got, self._run(split, device="cuda:0")):
                self.assertTrue(torch.equal(tensor, expected))


class TestMemoryPlacement(unittest.TestCase):
    def test_pages_are_touched_from_the_device_s_node(self):
        moves = []
        with (
            mock.patch.object(_host_memory, "_cores_near", return_value={2, 3}),
            mock.patch.object(os, "sched_getaffinity", return_value={0, 1, 2}),
            mock.patch.object(os, "sched_setaffinity", lambda _, c: moves.append(c)),
        ):
            with _host_memory.near(torch.device("cpu")):
                self.assertEqual(moves, [{2}])
        self.assertEqual(moves, [{2}, {0, 1, 2}])

    def test_unknown_topology(self):
        with mock.patch.object(os, "sched_setaffinity") as move:
            with _host_memory.near(torch.device("cpu")):
                pass
        move.assert_not_called()


if __name__ == "__main__":
    unittest.main()
