# Owner(s): ["oncall: distributed"]

import itertools
import math
import unittest
import weakref

import torch
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    distribute_tensor,
    DTensor,
    Partial,
    Replicate,
    Shard,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.init import trunc_normal_
from torch.testing._internal.common_cuda import TEST_MULTIGPU
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import (
    HardwareClassification,
    run_tests,
    TestCase,
)
from torch.testing._internal.distributed._tensor.common_dtensor import (
    LocalDTensorTestBase,
    with_comms,
)
from torch.utils._python_dispatch import TorchDispatchMode


# (mean, std, a, b): acceptance above 0.3 resamples a normal, below it a uniform.
NORMAL_BRANCH = (0.0, 1.0, -1.0, 1.5)
UNIFORM_BRANCH = (0.0, 1.0, 1.0, 1.5)


def reference_trunc_normal_(tensor, mean, std, a, b, generator=None):
    """Rejection sampling out of place; returns the number of exit decisions.

    Draws as trunc_normal_ draws, and decides on the whole mask, which it gathers.
    """

    def rejected(mask):
        full_mask = mask.full_tensor() if isinstance(mask, DTensor) else mask
        return full_mask.sum().item() > 0

    def cdf(x):
        return (1 + math.erf(x / math.sqrt(2))) / 2

    decisions = 1
    if cdf((b - mean) / std) - cdf((a - mean) / std) > 0.3:
        lo, hi = torch.tensor([a, b]).to(tensor.dtype).tolist()
        result = tensor.normal_(mean, std, generator=generator)
        while rejected(mask := (result < lo).logical_or(result > hi)):
            fresh = torch.empty_like(result).normal_(mean, std, generator=generator)
            result = torch.where(mask, fresh, result)
            decisions += 1
    else:
        mode = max(a, min(mean, b))
        log_peak = -0.5 * ((mode - mean) / std) ** 2

        def accept(candidates):
            log_u = torch.empty_like(tensor).uniform_(generator=generator).log_()
            log_pdf = candidates.sub(mean).div_(std).pow_(2).mul_(-0.5)
            return log_u.gt(log_pdf.sub_(log_peak)).logical_not_()

        result = tensor.uniform_(a, b, generator=generator)
        pending = accept(result).logical_not_()
        while rejected(pending):
            candidates = torch.empty_like(tensor).uniform_(a, b, generator=generator)
            result = torch.where(pending, candidates, result)
            pending = pending.logical_and(accept(candidates).logical_not_())
            decisions += 1
    tensor.copy_(result)
    return decisions


class CollectiveRecorder(TorchDispatchMode):
    """Records the (name, elements of the input) of each functional collective."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # the collectives are below the DTensor
        namespace, name = func._schema.name.split("::")
        not_collectives = ("wait_tensor", "_wrap_tensor_autograd")
        if namespace == "_c10d_functional" and name not in not_collectives:
            self.calls.append((name, args[0].numel()))
        return func(*args, **(kwargs or {}))


class PeakStorage(TorchDispatchMode):
    """Bytes of the new storages alive at a time, at most."""

    def __init__(self, *known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.alive = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if not isinstance(t, torch.Tensor) or t.device.type == "meta":
                continue
            storage = t.untyped_storage()
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, cdata, nbytes):
        self.known.remove(cdata)
        self.alive -= nbytes


def num_sharded_mesh_dims(placements):
    return sum(isinstance(p, Shard | _StridedShard) for p in placements)


class TestTruncNormalPlain(TestCase):
    hw_classification = HardwareClassification.CPU

    def test_values_and_stream(self):
        """Bitwise the out-of-place algorithm, whatever the memory layout."""
        layouts = {
            "contiguous": lambda: torch.empty(37, 50),
            "transposed": lambda: torch.empty(50, 37).t(),
            "strided": lambda: torch.empty(37, 100)[:, ::2],
            "permuted": lambda: torch.empty(6, 7, 8).permute(2, 0, 1)[:, ::2],
            "scalar": lambda: torch.empty(()),
            "empty": lambda: torch.empty(0, 4),
            "parameter": lambda: torch.nn.Parameter(torch.empty(20, 30)),
            "bfloat16": lambda: torch.empty(30, 40, dtype=torch.bfloat16),
        }
        for name, make in layouts.items():
            for bounds in (NORMAL_BRANCH, UNIFORM_BRANCH):
                for explicit in (False, True):
                    with self.subTest(layout=name, bounds=bounds, explicit=explicit):
                        generator = torch.Generator() if explicit else None
                        rng = generator or torch.default_generator
                        rng.manual_seed(5)
                        expected = make()
                        with torch.no_grad():
                            reference_trunc_normal_(expected, *bounds, generator)
                        expected_state = rng.get_state()

                        rng.manual_seed(5)
                        actual = make()
                        result = trunc_normal_(actual, *bounds, generator=generator)
                        self.assertIs(result, actual)
                        self.assertEqual(actual, expected, rtol=0, atol=0)
                        self.assertEqual(rng.get_state(), expected_state)

    def test_memory(self):
        """One mask and two buffers beside the tensor, over many iterations."""
        for dtype in (torch.float32, torch.bfloat16):
            for bounds in (NORMAL_BRANCH, (0.0, 1.0, -0.5, 0.4), UNIFORM_BRANCH):
                tensor = torch.empty(100, 100, dtype=dtype)
                with PeakStorage(tensor) as storage:
                    trunc_normal_(tensor, *bounds)
                allowed = tensor.numel() * (1 + 2 * tensor.itemsize)
                # the result of any() is one more byte
                self.assertLessEqual(storage.peak, allowed + 1)


class TestTruncNormalDTensor(LocalDTensorTestBase):
    hw_classification = HardwareClassification.CPU

    world_size = 4
    device_type = "cpu"

    def _cases(self):
        """(mesh shape, placements, shape): uneven and empty shards among them."""
        yield (4,), [Replicate()], (6, 5)
        for shape in ((8, 12), (5, 7), (2, 3), (1, 1)):
            for dim in (0, 1):
                yield (4,), [Shard(dim)], shape
            for placements in (
                [Shard(0), Shard(1)],
                [Shard(1), Shard(1)],
                [Replicate(), Shard(0)],
                [Shard(1), Replicate()],
            ):
                yield (2, 2), placements, shape
        # FSDP over an expert-parallel dim: the stack of experts is split in two
        # orders at once.
        experts = [_StridedShard(0, split_factor=2), Shard(0)]
        yield (2, 2), experts, (8, 3, 5)
        yield (2, 2), [_StridedShard(1, split_factor=2), Shard(1)], (3, 8, 5)

    @with_comms
    def test_values_and_collectives(self):
        for mesh_shape, placements, shape in self._cases():
            mesh = init_device_mesh("cpu", mesh_shape)
            for bounds in (NORMAL_BRANCH, UNIFORM_BRANCH):
                with (
                    self.subTest(placements=placements, shape=shape, bounds=bounds),
                    self._get_local_tensor_mode(),
                ):
                    torch.manual_seed(3)
                    expected = distribute_tensor(torch.empty(shape), mesh, placements)
                    decisions = reference_trunc_normal_(expected, *bounds)

                    torch.manual_seed(3)
                    actual = distribute_tensor(torch.empty(shape), mesh, placements)
                    with CollectiveRecorder() as recorder:
                        self.assertIs(trunc_normal_(actual, *bounds), actual)

                    limit = decisions * num_sharded_mesh_dims(placements)
                    self.assertEqual(recorder.calls, [("all_reduce", 1)] * limit)
                    self.assertEqual(actual.placements, tuple(placements))
                    full = actual.full_tensor()
                    self.assertEqual(full, expected.full_tensor(), rtol=0, atol=0)

    @with_comms
    def test_dtype_bounds(self):
        # 0.3 is not a bfloat16: its neighbours are 0.298828125 and 0.30078125, and
        # the bound is the nearer of them, above 0.3.
        mesh = init_device_mesh("cpu", (4,))
        with self._get_local_tensor_mode():
            tensor = torch.empty(64, 64, dtype=torch.bfloat16)
            dtensor = distribute_tensor(tensor, mesh, [Shard(0)])
            trunc_normal_(dtensor, 0.0, 0.3, -0.3, 0.3)
            bound = torch.tensor(0.3, dtype=torch.bfloat16)
            full = dtensor.full_tensor()
            self.assertTrue(((full >= -bound) & (full <= bound)).all())
            self.assertTrue((full > 0.2).any() and (full < -0.2).any())

    @with_comms
    def test_any_all(self):
        """any() and all() of the whole tensor: replicated, without a gather."""
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in (
            [Replicate(), Replicate()],
            [Shard(0), Shard(1)],
            [Shard(0), Shard(0)],
            [Replicate(), Shard(1)],
            [_StridedShard(0, split_factor=2), Shard(0)],
        ):
            for tensor in (
                torch.zeros(4, 8, dtype=torch.bool),
                torch.ones(4, 8, dtype=torch.bool),
                torch.eye(8)[:4],
                torch.eye(8, dtype=torch.uint8)[:4] * 3,
                -torch.eye(8)[:4],
                torch.ones(4, 1),
            ):
                for op in (torch.any, torch.all):
                    with (
                        self.subTest(placements=placements, tensor=tensor, op=op),
                        self._get_local_tensor_mode(),
                    ):
                        dtensor = distribute_tensor(tensor, mesh, placements)
                        with CollectiveRecorder() as recorder:
                            result = op(dtensor)
                        self.assertEqual(
                            recorder.calls,
                            [("all_reduce", 1)] * num_sharded_mesh_dims(placements),
                        )
                        self.assertEqual(result.placements, (Replicate(),) * 2)
                        expected = op(tensor)
                        self.assertEqual(result.dtype, expected.dtype)
                        self.assertEqual(result.shape, expected.shape)
                        self.assertEqual(bool(result), bool(expected))

    @with_comms
    def test_any_all_partial(self):
        # 1 and -1 on two ranks: there is something on each, but nothing in the sum.
        mesh = init_device_mesh("cpu", (2, 2))
        with self._get_local_tensor_mode() as mode:
            local = mode.rank_map(lambda r: torch.full((2, 2), 1.0 - 2 * (r % 2)))
            for first in (Replicate(), Shard(0)):
                dtensor = DTensor.from_local(local, mesh, [first, Partial()])
                self.assertEqual(dtensor.full_tensor().abs().max(), 0)
                for op in (torch.any, torch.all):
                    result = op(dtensor)
                    self.assertEqual(result.placements, (Replicate(),) * 2)
                    self.assertFalse(bool(result))


class TestTruncNormalMultiProcess(MultiProcContinuousTest):
    hw_classification = HardwareClassification.CPU

    world_size = 2
    device_type = "cpu"

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # A fork would inherit an OpenMP pool without its threads, and hang, where
        # tests before this one have used the pool.
        torch.multiprocessing.set_start_method("spawn", force=True)

    @classmethod
    def backend_str(cls):
        return "gloo"

    @property
    def device(self):
        return torch.device(self.device_type)

    def _make(self, mesh, placement, shape):
        torch.manual_seed(11)
        tensor = torch.empty(shape, device=self.device)
        return distribute_tensor(tensor, mesh, [placement])

    def test_all_ranks_leave_together(self):
        """Equal values, equal generator states, and collectives that match up."""
        mesh = init_device_mesh(self.device_type, (self.world_size,))
        for shape, placement, bounds in itertools.product(
            ((64, 33), (3, 5), (1, 7)),
            (Shard(0), Shard(1), Replicate()),
            (NORMAL_BRANCH, UNIFORM_BRANCH),
        ):
            expected = self._make(mesh, placement, shape)
            decisions = reference_trunc_normal_(expected, *bounds)
            expected_next = torch.rand(3, device=self.device)

            actual = self._make(mesh, placement, shape)
            with CollectiveRecorder() as recorder:
                trunc_normal_(actual, *bounds)
            limit = decisions if placement.is_shard() else 0
            self.assertEqual(recorder.calls, [("all_reduce", 1)] * limit)
            full, expected_full = actual.full_tensor(), expected.full_tensor()
            self.assertEqual(full, expected_full, rtol=0, atol=0)

            next_draw = torch.rand(3, device=self.device)
            self.assertEqual(next_draw, expected_next, rtol=0, atol=0)
            even = placement.is_replicate() or shape[placement.dim] % 2 == 0
            # A CPU generator advances by what its rank drew: shards of one size.
            if even or self.device_type != "cpu":
                draws = DTensor.from_local(next_draw, mesh, [Shard(0)]).full_tensor()
                self.assertEqual(draws[:3], draws[3:], rtol=0, atol=0)

    def test_memory_is_of_local_size(self):
        mesh = init_device_mesh(self.device_type, (self.world_size,))
        for bounds in (NORMAL_BRANCH, UNIFORM_BRANCH):
            dtensor = self._make(mesh, Shard(0), (512, 256))
            local = dtensor.to_local()
            trunc_normal_(dtensor, *bounds)  # fill the caches
            with PeakStorage(local) as storage:
                trunc_normal_(dtensor, *bounds)
            allowed = local.numel() * (1 + 2 * local.itemsize)
            # beside them, scalars and the states of generators (5 KiB on the CPU)
            self.assertLessEqual(storage.peak, allowed + 16384)


@unittest.skipIf(not TEST_MULTIGPU, "needs 2 GPUs")
class TestTruncNormalMultiProcessCUDA(TestTruncNormalMultiProcess):
    hw_classification = HardwareClassification.CUDA

    device_type = "cuda"

    @classmethod
    def backend_str(cls):
        return "nccl"

    @property
    def device(self):
        torch.cuda.set_device(self.rank)
        return torch.device("cuda", self.rank)


if __name__ == "__main__":
    run_tests()
