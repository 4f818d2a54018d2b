# Owner(s): ["oncall: distributed"]

import contextlib
import functools
import gc
import unittest.mock
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._composable import checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    fully_shard,
    MixedPrecisionPolicy,
    share_comm_ctx,
)
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_param_group,
    _fsdp_state,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.tensor import Shard
from torch.testing._internal.common_distributed import (
    MultiThreadedTestCase,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_fsdp import FSDPTestContinuous
from torch.testing._internal.common_utils import (
    HardwareClassification,
    run_tests,
    TEST_CUDA,
    TestCase,
)
from torch.testing._internal.distributed.fake_pg import FakeStore


DIM = 8
NUM_STEPS = 10


class Block(nn.Module):
    """
    Residual block with a dense and an "expert" weight. Its 9-wide hidden dim
    does not divide by the world sizes here, so the shards are uneven.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 9)
        self.down = nn.Linear(9, DIM)
        self.expert = nn.Parameter(torch.randn(DIM, DIM) / DIM**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        return x + torch.tanh(x @ self.expert)


class Model(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return x


def init_params(model: nn.Module, seed: int) -> None:
    # Does not use the default generator since it is shared by ranks as threads
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            value = torch.randn(param.shape, generator=generator) / DIM**0.5
            param.copy_(value)


def set_forward_prefetch(layers: list[FSDPModule]) -> None:
    for layer, next_layer in zip(layers, layers[1:]):
        layer.set_modules_to_forward_prefetch([next_layer])


def param_groups(module: nn.Module) -> list[Any]:
    return [
        group
        for m in module.modules()
        if isinstance(m, FSDPModule)
        for group in m._get_fsdp_state()._fsdp_param_groups
    ]


class RecordingStream:
    """Stand-in for a device stream that logs what is ordered by it."""

    def __init__(self, log: list[tuple], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, stream: "RecordingStream") -> None:
        self.log.append(("wait_stream", self.name, stream.name))

    def wait_event(self, event: "RecordingEvent") -> None:
        self.log.append(("wait_event", self.name, event))

    def record_event(self) -> "RecordingEvent":
        event = RecordingEvent(self.log)
        event.stream = self
        return event


class RecordingEvent:
    stream: RecordingStream | None = None

    def __init__(self, handle_log: list[tuple]) -> None:
        self.log = handle_log

    def record(self, stream: RecordingStream | None = None) -> None:
        self.stream = stream


class RecordingDevice:
    """
    Stand-in for a device module, such as `torch.cuda`, whose tensors live on
    the CPU. Only the order of calls is of interest, so kernels run eagerly.
    """

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.current = RecordingStream(self.log, "compute")
        self.num_streams = 0

    def Stream(self, priority: int = 0) -> RecordingStream:
        # The order of construction in `FSDPCommContext.lazy_init`
        names = ("copy_in", "all_gather", "reduce_scatter", "all_reduce")
        self.num_streams += 1
        return RecordingStream(self.log, names[self.num_streams - 1])

    def Event(self) -> RecordingEvent:
        return RecordingEvent(self.log)

    def current_stream(self) -> RecordingStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: RecordingStream | None):
        prev, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = prev


@contextlib.contextmanager
def use_recording_device():
    device = RecordingDevice()
    with contextlib.ExitStack() as stack:
        for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
            stack.enter_context(
                unittest.mock.patch.object(
                    module, "_get_device_handle", lambda *_: device
                )
            )
        yield device


class RecordedWork(dist._Work):
    def __init__(self, device: RecordingDevice, work: dist.Work, name: str) -> None:
        super().__init__()
        self.device, self.work, self.name = device, work, name

    def wait(self, timeout: Any = None) -> bool:
        self.device.log.append(("work_wait", self.device.current.name, self.name))
        return self.work.wait()


class RecordingAllGather(DefaultAllGather):
    """Custom all-gather that returns a ``Work`` and logs streams."""

    def __init__(self, device: RecordingDevice, name: str) -> None:
        self.device, self.name = device, name

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.device.log.append(("allocate", self.device.current.name, self.name))
        return super().allocate(*args, **kwargs)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.device.log.append(("launch", self.device.current.name, self.name))
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        return RecordedWork(self.device, work, self.name) if async_op else None


class UnshardAsyncOpParityTests:
    """
    Trains for `NUM_STEPS` with the flag off and on and expects bitwise equal
    losses and parameters. Mixed into one class per device.
    """

    def _mesh(self, *shape: int, names: tuple[str, ...]) -> DeviceMesh:
        return init_device_mesh(self.device_type(), shape, mesh_dim_names=names)

    def _build(self, async_op: bool, apply: Callable[[Model], None]) -> Model:
        model = Model().to(self.device_type())
        init_params(model, seed=0)
        apply(model)
        if self.device_type() == "cpu":  # gloo has no average reduction
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        if async_op:
            model.set_unshard_async_op(True)
            set_forward_prefetch([model, *model.layers])
        for group in param_groups(model):
            self.assertEqual(group.unshard_async_op, async_op)
        return model

    def _train(self, async_op: bool, apply: Callable[[Model], None]):
        model = self._build(async_op, apply)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1 + self.rank)
        history = []
        for step in range(NUM_STEPS):
            for microbatch in range(2):
                model.set_requires_gradient_sync(microbatch == 1)
                model.set_is_last_backward(microbatch == 1)
                x = torch.randn(4, DIM, generator=generator)
                loss = model(x.to(self.device_type())).sum()
                loss.backward()
                history.append(loss.detach())
            optim.step()
            optim.zero_grad()
            if step % 3 == 2:  # evaluate between steps
                with torch.no_grad():
                    history.append(model(torch.ones(2, DIM, device=loss.device)))
        return history, [p.to_local().detach() for p in model.parameters()]

    def _check_parity(self, apply: Callable[[Model], None]) -> None:
        expected_history, expected_params = self._train(False, apply)
        history, params = self._train(True, apply)
        self.assertEqual(history, expected_history, rtol=0, atol=0)
        self.assertEqual(params, expected_params, rtol=0, atol=0)
        self.assertFalse(history[0].equal(history[-2]))  # it did train

    @staticmethod
    def _fully_shard(model: Model, **kwargs: Any) -> None:
        for layer in model.layers:
            fully_shard(layer, **kwargs)
        fully_shard(model, **kwargs)

    def _fsdp_mesh(self) -> DeviceMesh:
        return self._mesh(self.world_size, names=("dp",))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_fsdp(self):
        for reshard_after_forward in (True, False):
            self._check_parity(
                functools.partial(
                    self._fully_shard,
                    mesh=self._fsdp_mesh(),
                    reshard_after_forward=reshard_after_forward,
                )
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_reshard_after_forward_to_smaller_world_size(self):
        model_kwargs = {"mesh": self._fsdp_mesh(), "reshard_after_forward": 2}

        def apply(model: Model) -> None:
            # An even hidden dim, which this resharding requires
            for i in range(len(model.layers)):
                model.layers[i] = nn.Linear(DIM, DIM).to(self.device_type())
            init_params(model, seed=0)
            self._fully_shard(model, **model_kwargs)

        self._check_parity(apply)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_hsdp(self):
        mesh = self._mesh(self.world_size // 2, 2, names=("replicate", "shard"))
        self._check_parity(functools.partial(self._fully_shard, mesh=mesh))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_mixed_precision(self):
        mp_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        self._check_parity(
            functools.partial(
                self._fully_shard, mesh=self._fsdp_mesh(), mp_policy=mp_policy
            )
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_cpu_offload(self):
        offload_policy = CPUOffloadPolicy(pin_memory=self.device_type() != "cpu")
        for mp_policy in (
            MixedPrecisionPolicy(),
            MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        ):
            self._check_parity(
                functools.partial(
                    self._fully_shard,
                    mesh=self._fsdp_mesh(),
                    mp_policy=mp_policy,
                    offload_policy=offload_policy,
                )
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_per_param_mesh(self):
        """Experts on a smaller mesh than the dense weights, as for EP."""
        mesh = self._mesh(self.world_size // 2, 2, names=("edp", "ep"))
        dense = FSDPMeshInfo(mesh=self._fsdp_mesh(), shard_mesh_dim=0)
        expert = FSDPMeshInfo(mesh=mesh["edp"], shard_mesh_dim=0)

        def apply(model: Model) -> None:
            experts = [layer.expert for layer in model.layers]
            init_params(nn.ParameterList(experts), seed=mesh["ep"].get_local_rank())

            def shard_placement_fn(param: nn.Parameter) -> ShardPlacementResult:
                is_expert = any(param is p for p in experts)
                mesh_info = expert if is_expert else dense
                return ShardPlacementResult(placement=Shard(0), mesh_info=mesh_info)

            for layer in model.layers:
                fully_shard(
                    layer, mesh=dense.mesh, shard_placement_fn=shard_placement_fn
                )
                self.assertEqual(len(param_groups(layer)), 2)
            fully_shard(model, mesh=dense.mesh)

        self._check_parity(apply)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_activation_checkpointing(self):
        def apply(model: Model) -> None:
            for layer in model.layers:
                checkpoint(layer)
            self._fully_shard(model, mesh=self._fsdp_mesh())

        self._check_parity(apply)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_world_size_1(self):
        mesh = self._mesh(self.world_size, 1, names=("dp", "one"))["one"]
        self._check_parity(functools.partial(self._fully_shard, mesh=mesh))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_replicate(self):
        def apply(model: Model) -> None:
            for layer in model.layers:
                replicate(layer, mesh=self._fsdp_mesh())
            replicate(model, mesh=self._fsdp_mesh())

        self._check_parity(apply)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parity_several_roots(self):
        """Pipeline stages, with prefetches that cross from one to the other."""

        def train(async_op: bool):
            stages = [
                self._build(
                    async_op,
                    functools.partial(self._fully_shard, mesh=self._fsdp_mesh()),
                )
                for _ in range(2)
            ]
            share_comm_ctx(stages)
            params = [p for stage in stages for p in stage.parameters()]
            optim = torch.optim.SGD(params, lr=1e-2, momentum=0.9)
            generator = torch.Generator().manual_seed(1 + self.rank)
            losses = []
            for _ in range(NUM_STEPS):
                out = []
                for _ in range(2):  # all forwards, then all backwards
                    x = torch.randn(4, DIM, generator=generator)
                    x = x.to(self.device_type())
                    for stage in stages:
                        x = stage(x)
                    out.append(x.sum())
                if async_op:  # across roots only after their lazy init
                    layers = [m for st in stages for m in (st, *st.layers)]
                    set_forward_prefetch(layers)
                    for layer, prev_layer in zip(layers[1:], layers):
                        layer.set_modules_to_backward_prefetch([prev_layer])
                for i, loss in enumerate(out):
                    for stage in stages:
                        stage.set_is_last_backward(i == 1)
                        stage.set_requires_gradient_sync(i == 1)
                    loss.backward()
                losses.extend(loss.detach() for loss in out)
                optim.step()
                optim.zero_grad()
            return losses, [p.to_local().detach() for p in params]

        self.assertEqual(train(True), train(False), rtol=0, atol=0)


class TestFullyShardUnshardAsyncOpParityCPU(
    UnshardAsyncOpParityTests, MultiThreadedTestCase
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
class TestFullyShardUnshardAsyncOpParityCUDA(
    UnshardAsyncOpParityTests, FSDPTestContinuous
):
    hw_classification = HardwareClassification.CUDA


def fsdp_model(num_layers: int = 4, mesh: DeviceMesh | None = None) -> Model:
    model = Model(num_layers)
    init_params(model, seed=0)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)
    return model


class TestFullyShardUnshardAsyncOp(TestCase):
    """Uses the fake process group: what is gathered does not matter here."""

    hw_classification = HardwareClassification.CPU

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        self.addCleanup(dist.destroy_process_group)

    # API #
    def test_recurse(self):
        model = fsdp_model()
        model.set_unshard_async_op(True)
        self.assertTrue(all(g.unshard_async_op for g in param_groups(model)))
        model.set_unshard_async_op(False, recurse=False)
        self.assertFalse(model._get_fsdp_state()._fsdp_param_group.unshard_async_op)
        for layer in model.layers:
            self.assertTrue(all(g.unshard_async_op for g in param_groups(layer)))

    def test_private_name_is_deprecated(self):
        """It accepts any truth value, and the warning points at the caller."""
        model = fsdp_model()
        for value in (True, False, 1, 0, None):
            with self.assertWarnsRegex(FutureWarning, "set_unshard_async_op") as caught:
                model._set_unshard_async_op(value)
            self.assertEqual(caught.filename, __file__)
            self.assertEqual(
                [g.unshard_async_op for g in param_groups(model)], [bool(value)] * 5
            )

    def test_public_name_does_not_warn(self):
        model = fsdp_model()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.set_unshard_async_op(True)

    def test_replicate(self):
        model = Model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            replicate(layer, mesh=mesh)
        replicate(model, mesh=mesh)
        model.set_unshard_async_op(True)
        groups = param_groups(model)
        self.assertEqual(len(groups), 5)
        self.assertTrue(all(g.unshard_async_op for g in groups))

    def test_non_bool(self):
        model = fsdp_model()
        for value, type_name in ((1, "int"), (None, "NoneType"), ("True", "str")):
            with self.assertRaisesRegex(
                TypeError, f"async_op must be a bool, got {type_name}"
            ):
                model.set_unshard_async_op(value)
        self.assertFalse(any(g.unshard_async_op for g in param_groups(model)))

    # Number of all-gathers #
    def _count_all_gathers(self, fn: Callable[[], Any]) -> int:
        foreach_all_gather = _fsdp_param_group.foreach_all_gather
        with unittest.mock.patch.object(
            _fsdp_param_group, "foreach_all_gather", side_effect=foreach_all_gather
        ) as all_gather:
            fn()
        return all_gather.call_count

    def test_number_of_all_gathers(self):
        """The flag does not change it."""
        for async_op in (False, True):
            model = fsdp_model()
            model.set_unshard_async_op(async_op)
            set_forward_prefetch([model, *model.layers])
            num_all_gathers = self._count_all_gathers(
                lambda: model(torch.randn(2, DIM)).sum().backward()
            )
            # The root does not reshard after forward, and the layers are gathered
            # once in forward and once in backward
            self.assertEqual(num_all_gathers, 1 + 2 * len(model.layers))

    # Stream semantics, on a stand-in device #
    def _recorded_model(self, device: RecordingDevice) -> Model:
        model = fsdp_model()
        for i, layer in enumerate(model.layers):
            layer.set_custom_all_gather(RecordingAllGather(device, f"layers.{i}"))
            layer.register_forward_hook(
                lambda *_, i=i: device.log.append(("forward", f"layers.{i}"))
            )
        return model

    def test_buffers_and_wait_are_in_compute_stream(self):
        with use_recording_device() as device:
            model = self._recorded_model(device)
            model.set_unshard_async_op(True)
            set_forward_prefetch([model, *model.layers])
            model(torch.randn(2, DIM)).sum().backward()
        events = [e for e in device.log if e[0] in ("allocate", "launch", "work_wait")]
        self.assertEqual(len(events), 3 * 2 * len(model.layers))
        self.assertEqual({stream for _, stream, _ in events}, {"compute"})

    def test_custom_work_is_awaited_where_weights_are_first_used(self):
        with use_recording_device() as device:
            model = self._recorded_model(device)
            model.set_unshard_async_op(True)
            set_forward_prefetch([model, *model.layers])
            with torch.no_grad():
                model(torch.randn(2, DIM))
        order = [
            (e[0], e[-1])
            for e in device.log
            if e[0] in ("launch", "work_wait", "forward")
        ]
        expected = [("launch", "layers.0")]
        for i in range(len(model.layers)):
            expected.append(("work_wait", f"layers.{i}"))
            if i + 1 < len(model.layers):
                expected.append(("launch", f"layers.{i + 1}"))
            expected.append(("forward", f"layers.{i}"))
        self.assertEqual(order, expected)


@unittest.skipIf(not TEST_CUDA, "CUDA not available")
class TestFullyShardUnshardAsyncOpMemory(FSDPTestContinuous):
    hw_classification = HardwareClassification.CUDA
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_all_gather_streams_hold_no_memory(self):
        """No memory segment belongs to the all-gather streams with the flag on."""
        dim, device = 1024, torch.device("cuda", self.rank)
        for async_op in (False, True):
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            model = nn.Sequential(
                *(nn.Linear(dim, dim, device=device) for _ in range(4))
            )
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            model.set_unshard_async_op(async_op)
            set_forward_prefetch(list(model))
            for _ in range(3):
                model(torch.randn(8, dim, device=device)).sum().backward()
            torch.cuda.synchronize()
            comm_ctx = model._get_fsdp_state()._comm_ctx
            streams = {
                comm_ctx.all_gather_copy_in_stream.cuda_stream,
                comm_ctx.all_gather_stream.cuda_stream,
            }
            held = sum(
                segment["total_size"]
                for segment in torch.cuda.memory_snapshot()
                if segment["stream"] in streams
            )
            self.assertEqual(held == 0, async_op, msg=f"{held} bytes")
            del model, comm_ctx


if __name__ == "__main__":
    run_tests()
