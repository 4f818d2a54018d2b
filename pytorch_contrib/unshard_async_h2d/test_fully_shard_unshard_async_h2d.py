# Owner(s): ["oncall: distributed"]

import contextlib
import gc
import unittest
import unittest.mock
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    fully_shard,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_param_group,
    _fsdp_state,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_distributed import (
    MultiThreadedTestCase,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_fsdp import FSDPTestContinuous
from torch.testing._internal.common_utils import (
    DeterministicGuard,
    HardwareClassification,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TEST_CUDA,
    TestCase,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


DIM = 8
NUM_LAYERS = 4
EMPTY_OPS = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
MP_POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class SimulatedStream:
    """
    A stream of the simulated device. ``clock[s]`` is the number of ops of the
    stream ``s`` that are ordered before the next op of this stream.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[str, int] = defaultdict(int)

    def wait_stream(self, stream: "SimulatedStream") -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: "SimulatedEvent") -> None:
        for name, tick in event.clock.items():
            self.clock[name] = max(self.clock[name], tick)

    def record_event(self) -> "SimulatedEvent":
        return SimulatedEvent(self)


class SimulatedEvent:
    def __init__(self, stream: SimulatedStream) -> None:
        self.stream = stream
        self.record()

    def record(self, stream: SimulatedStream | None = None) -> None:
        self.clock = dict((stream or self.stream).clock)

    def synchronize(self) -> None:
        pass


class Memory:
    """What is known of one storage: who allocated it and who last used it."""

    def __init__(self, stream: SimulatedStream | None) -> None:
        self.alloc_stream = stream  # whose pool it came from, `None` if not new
        self.reads: dict[str, int] = {}  # stream name -> its last reading op
        self.writes: dict[str, int] = {}


class SimulatedDevice(TorchDispatchMode):
    """
    Stand-in for a device module, such as ``torch.cuda``, whose tensors live on
    the CPU. Ops run eagerly, but each is attributed to the stream that is
    current when it is issued, and two kinds of error are collected:

    - A race: an op uses memory that an op of another stream writes (or writes
      what that op uses), and no event orders the two.
    - An early free: memory goes back to the pool of the stream that allocated
      it while another stream may still be using it. The CUDA caching allocator
      then hands it out again to that stream at once, as nobody called
      ``record_stream``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams = [SimulatedStream("compute")]
        self.current = self.streams[0]
        self.memory: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.errors: list[str] = []
        # Called with the op, its current stream, and the storages it allocates
        self.on_op: Callable[[Any, SimulatedStream, list[Memory]], None] | None = None

    # The parts of a device module that FSDP uses
    def Stream(self, priority: int = 0) -> SimulatedStream:
        # The order of construction in `FSDPCommContext.lazy_init`, then NCCL's
        names = ("copy_in", "all_gather", "reduce_scatter", "all_reduce", "nccl")
        self.streams.append(SimulatedStream(names[len(self.streams) - 1]))
        return self.streams[-1]

    def Event(self) -> SimulatedEvent:
        return SimulatedEvent(self.current)

    def current_stream(self) -> SimulatedStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream | None):
        prev, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = prev

    # Race detection
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # see the ops on local tensors instead
        kwargs = kwargs or {}
        writes, reads = [], []
        for i, arg in enumerate(func._schema.arguments):
            value = kwargs.get(arg.name, args[i] if i < len(args) else None)
            tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
            is_write = arg.alias_info is not None and arg.alias_info.is_write
            # These schemas do not annotate the output
            is_write |= func.namespace == "c10d" and i == 0
            is_write |= func.namespace == "fsdp" and arg.name == "all_gather_output"
            (writes if is_write else reads).extend(tensors)
        if func in EMPTY_OPS:
            reads = []
        out = func(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in writes + reads}
        new = [
            t
            for t in tree_leaves(out)
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in known
        ]
        allocated = [
            self._add_memory(storage, self.current)
            for storage in {t.untyped_storage() for t in new}
            if storage not in self.memory
        ]
        fills = torch.are_deterministic_algorithms_enabled()
        is_kernel = func.namespace != "profiler" and not func.is_view
        if is_kernel and (func not in EMPTY_OPS or fills):
            self.current.clock[self.current.name] += 1
            for t in reads:
                self._access(func, t.untyped_storage(), is_write=False)
            for t in writes + new:
                self._access(func, t.untyped_storage(), is_write=True)
        if self.on_op is not None:
            self.on_op(func, self.current, allocated)
        return out

    def _add_memory(self, storage: Any, stream: SimulatedStream | None) -> Memory:
        memory = self.memory[storage] = Memory(stream)
        if stream is not None:
            # Its pool may hand out memory that its last op still uses
            memory.writes[stream.name] = stream.clock[stream.name]
            weakref.finalize(storage, self._check_free, memory, stream)
        return memory

    def _access(self, func: Any, storage: Any, is_write: bool) -> None:
        memory = self.memory.get(storage) or self._add_memory(storage, None)
        conflicts = [memory.writes] + ([memory.reads] if is_write else [])
        stream = self.current
        for other, tick in (item for c in conflicts for item in c.items()):
            if stream.clock[other] < tick and other != stream.name:
                self.errors.append(f"race: {func} in {stream.name} with {other}")
        accesses = memory.writes if is_write else memory.reads
        accesses[stream.name] = stream.clock[stream.name]

    def _check_free(self, memory: Memory, stream: SimulatedStream) -> None:
        for accesses in (memory.reads, memory.writes):
            for other, tick in accesses.items():
                if stream.clock[other] < tick and other != stream.name:
                    self.errors.append(f"early free: {stream.name} before {other}")


class SimulatedWork(dist._Work):
    """The collective's end, which `wait` orders the current stream after."""

    def __init__(self, device: SimulatedDevice, event: SimulatedEvent) -> None:
        super().__init__()
        self.device, self.event = device, event

    def wait(self, timeout: Any = None) -> bool:
        self.device.current.wait_event(self.event)
        return True


class SimulatedAllGather(DefaultAllGather):
    """Runs in a stream of its own like NCCL, which the caller waits for if sync."""

    def __init__(self, device: SimulatedDevice, stream: SimulatedStream) -> None:
        self.device, self.stream = device, stream

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.stream.wait_stream(self.device.current)
        with self.device.stream(self.stream):
            super().__call__(output_tensor, input_tensor, group)
        work = SimulatedWork(self.device, self.stream.record_event())
        if async_op:
            return work
        work.wait()
        return None


@contextlib.contextmanager
def simulated_device():
    device = SimulatedDevice()
    to = torch.Tensor.to

    def copy_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Host and device are the same here, so the copies between them must be made
        copy = kwargs.get("non_blocking", False)
        copy &= not hasattr(tensor, "fsdp_pre_all_gather")  # which would be lost
        return to(tensor, *args, **kwargs, copy=copy)

    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.object(torch.Tensor, "to", copy_to))
        for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
            stack.enter_context(
                unittest.mock.patch.object(
                    module, "_get_device_handle", lambda *_: device
                )
            )
        stack.enter_context(device)
        yield device


def build_model(
    world_size: int = 2, device_type: str = "cpu", **kwargs: Any
) -> nn.Sequential:
    """MLP of FSDP layers with uneven shards, offloaded to the CPU."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential()
    for _ in range(NUM_LAYERS):
        model.append(nn.Sequential(nn.Linear(DIM, 9), nn.ReLU(), nn.Linear(9, DIM)))
    with torch.no_grad():
        for param in model.parameters():
            value = torch.randn(param.shape, generator=generator) / DIM**0.5
            param.copy_(value)
    model.to(device_type)
    if world_size == dist.get_world_size():
        mesh = init_device_mesh(device_type, (world_size,))
    else:
        shape = (dist.get_world_size() // world_size, world_size)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("dp", "shard"))
        mesh = mesh["shard"]
    offload_policy = CPUOffloadPolicy(pin_memory=device_type != "cpu")
    for module in (*model, model):
        fully_shard(module, mesh=mesh, offload_policy=offload_policy, **kwargs)
        if device_type == "cpu":  # gloo has no average reduction
            module.set_force_sum_reduction_for_comms(True)
    for layer, next_layer in zip(model, list(model)[1:]):
        layer.set_modules_to_forward_prefetch([next_layer])
    return model


def set_unshard_async_op(model: nn.Module, async_op: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group.unshard_async_op = async_op


def add_extension(
    fsdp_param: FSDPParam, device: SimulatedDevice, streams: list[str]
) -> None:
    """All-gather extension that casts to bf16 and logs the stream it runs in."""
    shard = fsdp_param._sharded_local_tensor

    def fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy):
        streams.append(device.current.name)
        return (fsdp_param._sharded_param_data.to(torch.bfloat16),), outer_size

    def fsdp_post_all_gather(all_gather_outputs, outer_size, param_dtype, out=None):
        (tensor,) = all_gather_outputs
        if out is None:
            return tensor, (tensor,)

    shard.fsdp_pre_all_gather = fsdp_pre_all_gather
    shard.fsdp_post_all_gather = fsdp_post_all_gather


class TestFullyShardUnshardAsyncH2DStreams(TestCase):
    """Uses the fake process group: what is gathered does not matter here."""

    hw_classification = HardwareClassification.CPU

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        self.addCleanup(dist.destroy_process_group)

    def _train(
        self, device: SimulatedDevice, async_op: bool, world_size: int = 2, **kwargs
    ) -> FSDPModule:
        model = build_model(world_size, **kwargs)
        set_unshard_async_op(model, async_op)
        self._run(device, model)  # lazy init, so all streams exist after it
        nccl_stream = device.Stream()
        for layer in model:
            layer.set_custom_all_gather(SimulatedAllGather(device, nccl_stream))
        for _ in range(2):
            self._run(device, model)
        return model

    def _run(self, device: SimulatedDevice, model: nn.Module) -> None:
        model(torch.randn(2, DIM)).sum().backward()

    @parametrize("async_op", (False, True))
    @parametrize("mp_policy", (MixedPrecisionPolicy(), MP_POLICY))
    @parametrize("world_size", (1, 2))
    def test_ordered(self, async_op, mp_policy, world_size):
        with simulated_device() as device:
            self._train(device, async_op, world_size, mp_policy=mp_policy)
        self.assertEqual(device.errors, [])

    def test_ordered_with_deterministic_algorithms(self):
        """Here `torch.empty` fills its memory, in the stream that allocates."""
        with DeterministicGuard(True):
            for world_size in (1, 2):
                with simulated_device() as device:
                    self._train(device, True, world_size, mp_policy=MP_POLICY)
                self.assertEqual(device.errors, [])

    def test_custom_allocate_that_issues_work(self):
        class FillAllGather(SimulatedAllGather):
            def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                return super().allocate(*args, **kwargs).fill_(0)

        with simulated_device() as device:
            model = self._train(device, True)
            nccl_stream = device.streams[-1]
            for layer in model:
                layer.set_custom_all_gather(FillAllGather(device, nccl_stream))
            self._run(device, model)
        self.assertEqual(device.errors, [])

    def test_discarded_unshard_is_ordered(self):
        for world_size in (1, 2):
            with simulated_device() as device:
                model = self._train(device, True, world_size)
                for _ in range(2):
                    for layer in model:
                        layer.unshard(async_op=True)
                    # As if the parameters were changed
                    torch.autograd.graph.increment_version(list(model.parameters()))
                    for layer in model:
                        layer.unshard(async_op=True)
                self._run(device, model)
            self.assertEqual(device.errors, [])

    def test_failed_unshard_is_ordered(self):
        """The all-gather output is freed while the copy-in may still write to it."""

        class FailingAllGather(SimulatedAllGather):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                raise RuntimeError("all-gather failed")

        with simulated_device() as device:
            model = self._train(device, True)
            nccl_stream = device.streams[-1]
            model[0].set_custom_all_gather(FailingAllGather(device, nccl_stream))
            for _ in range(2):
                with self.assertRaisesRegex(RuntimeError, "all-gather failed"):
                    model[0].unshard(async_op=True)
            model[0].set_custom_all_gather(SimulatedAllGather(device, nccl_stream))
            self._run(device, model)
        self.assertEqual(device.errors, [])

    @parametrize("world_size", (1, 2))
    def test_copies_overlap_with_compute(self, world_size):
        """
        While a layer's matmuls run in forward, the next layer's copies are in
        flight: the compute stream is not ordered after them.
        """
        with simulated_device() as device:
            model = self._train(device, True, world_size, mp_policy=MP_POLICY)
            compute, copy_in = device.streams[:2]
            copies, overlaps = [], []

            def on_op(func, stream, allocated):
                if func is torch.ops.aten._to_copy.default and stream is copy_in:
                    copies.append(stream.clock["copy_in"])
                if func is torch.ops.aten.addmm.default:
                    in_flight = [c for c in copies if c > compute.clock["copy_in"]]
                    overlaps.append(len(in_flight))

            device.on_op = on_op
            with torch.no_grad():
                model(torch.randn(2, DIM))
        num_ops = 2 * 4  # copy and cast of each parameter
        self.assertEqual(len(copies), NUM_LAYERS * num_ops)
        # Two matmuls a layer, and the last layer prefetches nothing
        expected = [num_ops] * 2 * (NUM_LAYERS - 1) + [0, 0]
        self.assertEqual(overlaps, expected)

    def test_copies_do_not_wait_for_previous_all_gather(self):
        """
        The copies of a layer are ordered neither after the all-gather of the layer
        before it nor after its copy-out, so the host-to-device link need not idle.
        """
        with simulated_device() as device:
            model = self._train(device, True, mp_policy=MP_POLICY)
            compute, copy_in = device.streams[:2]
            all_gathers, copy_outs, copies = [], [], []

            def on_op(func, stream, allocated):
                if func.namespace == "c10d":
                    all_gathers.append(stream.clock["nccl"])
                if func is torch.ops.fsdp.split_with_sizes_copy.default:
                    copy_outs.append(compute.clock["compute"])
                if func is torch.ops.aten._to_copy.default and stream is copy_in:
                    clock = (copy_in.clock["nccl"], copy_in.clock["compute"])
                    copies.append((len(all_gathers), len(copy_outs), clock))

            device.on_op = on_op
            with torch.no_grad():
                model(torch.randn(2, DIM))
        # For each parameter of the second to last layer, copy and cast
        num_ops = 2 * 4
        self.assertEqual(len(copies), NUM_LAYERS * num_ops)
        for layer in range(1, NUM_LAYERS):
            num_all_gathers, num_copy_outs, clock = copies[layer * num_ops]
            # At its prefetch, these had been issued
            self.assertEqual((num_all_gathers, num_copy_outs), (layer, layer))
            self.assertLess(clock[0], all_gathers[layer - 1])
            self.assertLess(clock[1], copy_outs[layer - 1])

    @parametrize("world_size", (1, 2))
    @parametrize("mp_policy", (MixedPrecisionPolicy(), MP_POLICY))
    def test_copy_in_stream_holds_no_memory(self, mp_policy, world_size):
        """While compute runs, all memory that is held is from its own pool."""
        with simulated_device() as device:
            model = self._train(device, True, world_size, mp_policy=mp_policy)
            pools: list[set[str]] = []

            def on_op(func, stream, allocated):
                if func is torch.ops.aten.addmm.default:
                    streams = (m.alloc_stream for m in device.memory.values())
                    names = {stream.name for stream in streams if stream}
                    pools.append(names & {"compute", "copy_in", "all_gather"})

            device.on_op = on_op
            with torch.no_grad():
                model(torch.randn(2, DIM))
        self.assertEqual(pools, [{"compute"}] * 2 * NUM_LAYERS)

    def test_all_gather_extension(self):
        """`fsdp_pre_all_gather` and its copy run in the copy stream as a whole."""

        with simulated_device() as device:
            streams: list[str] = []
            model = build_model(mp_policy=MP_POLICY)
            set_unshard_async_op(model, True)
            for layer in model:
                (group,) = layer._get_fsdp_state()._fsdp_param_groups
                for fsdp_param in group.fsdp_params:
                    add_extension(fsdp_param, device, streams)
            self._run(device, model)
            self._run(device, model)
        self.assertEqual(device.errors, [])
        self.assertEqual(set(streams[-4:]), {"copy_in"})

    def test_unshard_outside_of_forward(self):
        """It is ordered after the current stream, which may write to the parameters."""
        with simulated_device() as device:
            model = self._train(device, True)
            compute, copy_in = device.streams[:2]
            with torch.no_grad():
                model[0][0].weight.to_local().zero_()
            written = compute.clock["compute"]
            model[0].unshard(async_op=True)
            self.assertGreaterEqual(copy_in.clock["compute"], written)
        self.assertEqual(device.errors, [])

    def test_sync_unshard_is_unchanged(self):
        with simulated_device() as device:
            model = build_model()
            with unittest.mock.patch.object(
                _fsdp_param_group.FSDPParamGroup, "_unshard_offloaded"
            ) as unshard_offloaded:
                self._run(device, model)
            unshard_offloaded.assert_not_called()


instantiate_parametrized_tests(TestFullyShardUnshardAsyncH2DStreams)


class UnshardAsyncH2DParityTests:
    """Mixed into one class per device."""

    def _train(self, async_op: bool, **kwargs: Any):
        model = build_model(device_type=self.device_type(), **kwargs)
        set_unshard_async_op(model, async_op)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1 + self.rank)
        losses = []
        for _ in range(10):
            x = torch.randn(4, DIM, generator=generator).to(self.device_type())
            loss = model(x).sum()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        return losses, [p.to_local().detach() for p in model.parameters()]

    def _check_parity(self, **kwargs: Any) -> None:
        actual, expected = self._train(True, **kwargs), self._train(False, **kwargs)
        self.assertEqual(actual, expected, rtol=0, atol=0)
        losses, _ = actual
        self.assertNotEqual(losses[0], losses[-1])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity(self):
        for mp_policy in (MixedPrecisionPolicy(), MP_POLICY):
            for world_size in (1, self.world_size):
                self._check_parity(world_size=world_size, mp_policy=mp_policy)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_step_after_failed_unshard(self):
        """A copy from before the step must not serve a forward after it."""

        class FailingAllGather(DefaultAllGather):
            def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                raise RuntimeError("out of memory")

        for async_op in (False, True):
            model = build_model(device_type=self.device_type())
            set_unshard_async_op(model, async_op)
            optim = torch.optim.SGD(model.parameters(), lr=1)
            x = torch.ones(2, DIM, device=self.device_type())
            model(x).sum().backward()
            model[0].set_custom_all_gather(FailingAllGather())
            with self.assertRaisesRegex(RuntimeError, "out of memory"):
                model[0].unshard(async_op=True)
            model[0].set_custom_all_gather(DefaultAllGather())
            optim.step()
            ref_model = nn.Sequential(
                *(
                    nn.Sequential(nn.Linear(DIM, 9), nn.ReLU(), nn.Linear(9, DIM))
                    for _ in range(NUM_LAYERS)
                )
            )
            state_dict = {k: p.full_tensor() for k, p in model.state_dict().items()}
            ref_model.load_state_dict(state_dict)
            self.assertEqual(model(x).cpu(), ref_model(x.cpu()))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_step_after_unshard(self):
        """Also with world size 1, whose copies start at the unshard."""
        for world_size in (1, self.world_size):
            model = build_model(world_size, self.device_type())
            optim = torch.optim.SGD(model.parameters(), lr=1)
            x = torch.ones(2, DIM, device=self.device_type())
            model(x).sum().backward()
            for layer in model:
                layer.unshard(async_op=True)
            optim.step()
            out = model(x)
            for layer in model:
                layer.reshard()
            self.assertEqual(model(x), out)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_reshard_to_smaller_world_size(self):
        self._check_parity(reshard_after_forward=self.world_size // 2 or 1)


class TestFullyShardUnshardAsyncH2DParityCPU(
    UnshardAsyncH2DParityTests, MultiThreadedTestCase
):
    hw_classification = HardwareClassification.CPU

    @property
    def world_size(self) -> int:
        return 4

    def device_type(self) -> str:
        return "cpu"

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()


@unittest.skipIf(not TEST_CUDA, "CUDA not available")
class TestFullyShardUnshardAsyncH2DParityCUDA(
    UnshardAsyncH2DParityTests, FSDPTestContinuous
):
    hw_classification = HardwareClassification.CUDA


@unittest.skipIf(not TEST_CUDA, "CUDA not available")
class TestFullyShardUnshardAsyncH2DCUDA(FSDPTestContinuous):
    hw_classification = HardwareClassification.CUDA
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_compute_does_not_wait_for_copies(self):
        """
        Stalls the copy stream. A prefetched unshard must leave the compute
        stream free to finish what is issued after it.
        """
        model = build_model(device_type="cuda")
        x = torch.randn(2, DIM, device="cuda")
        with torch.no_grad():
            model(x)  # lazy init
        copy_stream = model._get_fsdp_state()._comm_ctx.all_gather_copy_in_stream
        # The first time warms up, since loading a kernel may synchronize
        for sleep_cycles in (1, 10**9):  # about 0.5 s
            torch.cuda.synchronize()
            with torch.cuda.stream(copy_stream):
                torch.cuda._sleep(sleep_cycles)
            handle = model[0].unshard(async_op=True)
            copied = copy_stream.record_event()
            x.square().sum()
            computed = torch.cuda.current_stream().record_event()
            computed.synchronize()
            is_copied = copied.query()
            handle.wait()
            weight = model[0][0].weight.detach().clone()
            model[0].reshard()
            shard = weight.chunk(self.world_size)[self.rank].cpu()
            self.assertEqual(shard, model[0][0].weight.to_local())
        self.assertFalse(is_copied)

    @skip_if_lt_x_gpu(2)
    def test_copy_in_pool_holds_one_group(self):
        """
        The all-gather outputs are in the compute stream's pool, and the shards of
        one layer after the other in the same memory of the copy-in stream's.
        """
        dim, num_layers = 2048, 8
        model = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(num_layers)))
        for module in (*model, model):
            fully_shard(module, mp_policy=MP_POLICY, offload_policy=CPUOffloadPolicy())
        for layer, next_layer in zip(model, list(model)[1:]):
            layer.set_modules_to_forward_prefetch([next_layer])
        set_unshard_async_op(model, True)
        gc.collect()
        torch.cuda.empty_cache()
        for _ in range(3):
            model(torch.randn(2, dim, device="cuda")).sum().backward()
        torch.cuda.synchronize()
        comm_ctx = model._get_fsdp_state()._comm_ctx
        held: dict[int, int] = defaultdict(int)
        for segment in torch.cuda.memory_snapshot():
            held[segment["stream"]] += segment["total_size"]
        shard_bytes = 4 * dim * dim // self.world_size
        self.assertEqual(held[comm_ctx.all_gather_stream.cuda_stream], 0)
        # Shard and cast, in segments of the allocator
        self.assertLess(
            held[comm_ctx.all_gather_copy_in_stream.cuda_stream], 3 * shard_bytes
        )


if __name__ == "__main__":
    run_tests()
