# Owner(s): ["oncall: distributed"]

import copy
import random
import tempfile
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_param_group,
)
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_utils import (
    HardwareClassification,
    run_tests,
    TestCase,
)
from torch.testing._internal.distributed.fake_pg import FakeStore


DIM = 8
NUM_LAYERS = 3
OPTIMIZERS = (
    ("adam_for_loop", lambda params: torch.optim.Adam(params, lr=0.1, foreach=False)),
    ("adam_foreach", lambda params: torch.optim.Adam(params, lr=0.1, foreach=True)),
    ("adam_fused", lambda params: torch.optim.Adam(params, lr=0.1, fused=True)),
    ("local", lambda params: LocalSGD(params)),
    ("data", lambda params: DataSGD(params)),
)


class LocalSGD(torch.optim.Optimizer):
    """Writes to the local tensors, and skips empty ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if isinstance(param, DTensor):
                    if param._local_tensor.numel() > 0:
                        param._local_tensor.sub_(0.1 * param.grad._local_tensor)
                else:
                    param.sub_(0.1 * param.grad)


class DataSGD(LocalSGD):
    """Writes to ``param.data``, which has a version counter of its own."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(0.1 * param.grad)


class Model(nn.Module):
    """
    A root with parameters, layers whose 9-wide hidden dim does not divide by the
    world sizes here, and a head with fewer rows than ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 9), nn.Tanh(), nn.Linear(9, DIM))
            for _ in range(NUM_LAYERS)
        )
        self.head = nn.Linear(DIM, 1)
        self.skip: set[nn.Module] = set()
        # Does not use the default generator since it is shared by ranks as threads
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                value = torch.randn(param.shape, generator=generator)
                param.copy_(value / DIM**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            if layer not in self.skip:
                x = x + layer(x)
        return self.head(x) if self.head not in self.skip else x


def fsdp_units(model: Model) -> list[Any]:
    return [*model.layers, model.head, model]


def fsdp_model(
    mesh: DeviceMesh | None = None, async_op: bool = False, **kwargs: Any
) -> Model:
    model = Model()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for module in fsdp_units(model):
        fully_shard(module, mesh=mesh, **kwargs)
    prepare(model, async_op)
    return model


def prepare(model: Model, async_op: bool) -> None:
    for module in fsdp_units(model):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no average
        for group in module._get_fsdp_state()._fsdp_param_groups:
            group.unshard_async_op = async_op


def set_forward_prefetch(modules: list[FSDPModule]) -> None:
    for module, next_module in zip(modules, modules[1:]):
        module.set_modules_to_forward_prefetch([next_module])


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * DIM).view(2, DIM)


class StaleUnshardTests:
    """Expects each forward to use the current weights."""

    def _check_forward(self, model: Model, **kwargs: Any) -> None:
        out = model(inputs(), **kwargs)
        ref_model = Model()
        ref_model.load_state_dict(
            {name: p.full_tensor() for name, p in model.state_dict().items()}
        )
        self.assertEqual(out, ref_model(inputs()))

    def _check_step(
        self,
        before_step: Callable[[Model], Any],
        optim_fn: Callable[[Any], Any] = OPTIMIZERS[0][1],
        build_fn: Callable[..., Model] = fsdp_model,
        after_step: Callable[[Model, Any], Any] = lambda model, result: None,
    ) -> None:
        for async_op in (False, True):
            model = build_fn(async_op=async_op)
            optim = optim_fn(model.parameters())
            model(inputs()).sum().backward()  # gradients for all parameters
            result = before_step(model)
            optim.step()
            after_step(model, result)
            self._check_forward(model)


def _eval(model: Model) -> None:
    with torch.no_grad():
        model(inputs())


def _forward_without_backward(model: Model) -> None:
    model(inputs())


def _unshard_all(model: Model) -> list[Any]:
    return [module.unshard(async_op=True) for module in fsdp_units(model)]


def _mistargeted_prefetch(model: Model) -> None:
    set_forward_prefetch(fsdp_units(model))
    model.skip = {model.head}
    _eval(model)
    model.skip = set()


BEFORE_STEP = (
    _eval,
    _forward_without_backward,
    _unshard_all,
    _mistargeted_prefetch,
)


class TestFullyShardUnshardStaleWeights(StaleUnshardTests, MultiThreadedTestCase):
    hw_classification = HardwareClassification.CPU

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_eval_then_step(self):
        """The root does not reshard after forward."""
        self._check_step(_eval)

    def test_forward_without_backward_then_step(self):
        self._check_step(_forward_without_backward)

    def test_unshard_then_step(self):
        self._check_step(_unshard_all)

    def test_mistargeted_prefetch_then_step(self):
        self._check_step(_mistargeted_prefetch)

    def test_unsharded_then_step(self):
        def unshard(model: Model) -> None:
            for module in fsdp_units(model):
                module.unshard()

        self._check_step(unshard)

    def test_wait_after_step(self):
        """A handle gives the current weights even if it is from before the step."""

        def wait(model: Model, handles: list[Any]) -> None:
            for handle in handles:
                handle.wait()
            weight = model.head.weight.detach().clone()
            self.assertNotIsInstance(weight, DTensor)
            model.head.reshard()
            self.assertEqual(weight, model.head.weight.full_tensor())

        self._check_step(_unshard_all, after_step=wait)

    def test_optimizers(self):
        """Also those whose step the version counters do not show."""
        for name, optim_fn in OPTIMIZERS:
            for before_step in BEFORE_STEP:
                with self.subTest(optimizer=name, before_step=before_step.__name__):
                    self._check_step(before_step, optim_fn)

    def test_no_reshard_after_forward(self):
        def build(async_op: bool) -> Model:
            return fsdp_model(async_op=async_op, reshard_after_forward=False)

        for before_step in BEFORE_STEP:
            self._check_step(before_step, build_fn=build)

    def test_no_reshard_after_backward(self):
        def build(async_op: bool) -> Model:
            model = fsdp_model(async_op=async_op)
            model.set_reshard_after_backward(False)
            return model

        self._check_step(lambda model: None, build_fn=build)

    def test_cpu_offload(self):
        def build(async_op: bool) -> Model:
            policy = CPUOffloadPolicy(pin_memory=False)
            return fsdp_model(async_op=async_op, offload_policy=policy)

        for before_step in BEFORE_STEP:
            self._check_step(before_step, build_fn=build)

    def test_world_size_1(self):
        def build(async_op: bool) -> Model:
            mesh = init_device_mesh("cpu", (self.world_size, 1), mesh_dim_names="ab")
            return fsdp_model(mesh["b"], async_op=async_op)

        for before_step in BEFORE_STEP:
            self._check_step(before_step, build_fn=build)

    def test_replicate(self):
        def build(async_op: bool) -> Model:
            model = Model()
            mesh = init_device_mesh("cpu", (self.world_size,))
            for module in fsdp_units(model):
                replicate(module, mesh=mesh)
            prepare(model, async_op)
            return model

        for before_step in BEFORE_STEP:
            self._check_step(before_step, build_fn=build)

    def test_prefetch_from_another_root(self):
        """The target's root has finished its backward when it is prefetched."""
        models = [fsdp_model(async_op=True) for _ in range(2)]
        models[1].head.set_modules_to_backward_prefetch([models[0].layers[0]])
        params = [p for model in models for p in model.parameters()]
        optim = torch.optim.SGD(params, lr=0.5)
        for model in models:
            model(inputs()).sum().backward()
        optim.step()
        self._check_forward(models[0])

    def test_load_state_dict(self):
        for keep in (_eval, _unshard_all):
            model = fsdp_model()
            _eval(model)
            state_dict = {name: 2 * p for name, p in model.state_dict().items()}
            keep(model)
            model.load_state_dict(state_dict)
            self._check_forward(model)

    def test_writes_to_state_dict(self):
        """
        To the tensors or to their local tensors. No rank may have an empty shard
        for the latter to be seen.
        """

        def write(model: Model, state_dict: dict[str, Any]) -> None:
            for tensor in state_dict.values():
                tensor.mul_(2)

        def write_local(model: Model, state_dict: dict[str, Any]) -> None:
            for name, tensor in state_dict.items():
                if not name.startswith("head"):
                    tensor.to_local().mul_(2)

        for write_fn in (write, write_local):
            for keep in (_eval, _unshard_all):
                model = fsdp_model()
                _eval(model)
                state_dict = model.state_dict()
                keep(model)
                with torch.no_grad():
                    write_fn(model, state_dict)
                self._check_forward(model)

    def test_state_dict_of_user_hook_is_kept(self):
        """What a state dict hook puts in place of a parameter stays there."""
        model = fsdp_model()

        def to_double(module: nn.Module, state_dict: dict, prefix: str, _: Any) -> None:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].double()

        model.head._register_state_dict_hook(to_double)
        _eval(model)
        weight = model.state_dict()["head.weight"]
        self.assertEqual(weight.dtype, torch.float64)
        self.assertEqual(weight._local_tensor.dtype, torch.float64)
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name != "head.weight":
                self.assertIs(tensor, model.get_parameter(name))

    def test_handle_is_kept(self):
        """A forward that does not run the module leaves its unshard pending."""
        for grad in (False, True):
            model = fsdp_model()
            _eval(model)
            handle = model.head.unshard(async_op=True)
            model.skip = {model.head}
            with torch.set_grad_enabled(grad):
                model(inputs())
            handle.wait()
            self.assertNotIsInstance(model.head.weight, DTensor)

    def test_backward_of_forward_before_step_raises(self):
        """As without FSDP, where the unsharded weights are needed."""
        model = fsdp_model(reshard_after_forward=False)
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        model(inputs()).sum().backward()
        loss = model(inputs()).sum()
        optim.step()
        new_loss = model(inputs()).sum()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()
        model.reset_iter_state()
        del new_loss
        model(inputs()).sum().backward()

    def test_two_backwards_without_step(self):
        """No error if nothing changes between a forward and its backward."""
        model = fsdp_model(reshard_after_forward=False)
        losses = [model(inputs()).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()

    def test_random_sequences(self):
        """
        Any order of what reads, gathers and changes the weights, against a model
        without FSDP.
        """
        for seed in range(10):
            rng = random.Random(seed)
            model = fsdp_model(
                async_op=rng.random() < 0.5,
                reshard_after_forward=rng.choice([True, False]),
            )
            ref_model = Model()
            _, optim_fn = rng.choice(OPTIMIZERS)
            optims = [optim_fn(m.parameters()) for m in (model, ref_model)]
            if rng.random() < 0.5:
                set_forward_prefetch(fsdp_units(model))
            for m in (model, ref_model):
                m(inputs()).sum().backward()
            state_dict, handles, log = model.state_dict(), [], []
            for _ in range(12):
                op = rng.choice(
                    ("eval", "forward", "train", "step", "unshard", "wait")
                    + ("reshard", "state_dict", "load", "write")
                )
                log.append(op)
                index = rng.randrange(NUM_LAYERS + 2)
                if op in ("eval", "forward", "train"):
                    skip = rng.random() < 0.3
                    for m in (model, ref_model):
                        m.skip = {m.head} if skip else set()
                    with torch.set_grad_enabled(op != "eval"):
                        out, ref_out = model(inputs()), ref_model(inputs())
                    self.assertEqual(out, ref_out, msg=lambda m: f"{m}\n{seed} {log}")
                    if op == "train":
                        out.sum().backward()
                        ref_out.sum().backward()
                elif op == "step":
                    for optim in optims:
                        optim.step()
                elif op == "unshard":
                    handles.append(fsdp_units(model)[index].unshard(async_op=True))
                elif op == "wait" and handles:
                    handles.pop().wait()
                elif op == "reshard":
                    fsdp_units(model)[index].reshard()
                elif op == "state_dict":
                    state_dict = model.state_dict()
                elif op == "load":
                    for m in (model, ref_model):
                        m.load_state_dict(
                            {k: 0.9 * p for k, p in m.state_dict().items()}
                        )
                elif op == "write":
                    with torch.no_grad():
                        for tensor in state_dict.values():
                            tensor.mul_(0.9)
                        for param in ref_model.parameters():
                            param.mul_(0.9)


class TestFullyShardUnshardStaleWeightsGathers(TestCase):
    """
    Counts all-gathers, on the fake process group. Where nothing changes the
    weights, there are as many as without the check of their version.
    """

    hw_classification = HardwareClassification.CPU

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        self.addCleanup(dist.destroy_process_group)

    def _count(self, fn: Callable[[], Any]) -> int:
        with unittest.mock.patch.object(
            _fsdp_param_group,
            "foreach_all_gather",
            side_effect=_fsdp_collectives.foreach_all_gather,
        ) as all_gather:
            fn()
        return all_gather.call_count

    def _check_count(
        self,
        expected: int,
        fn: Callable[[Model, torch.optim.Optimizer], Any],
        prefetch: bool = True,
        **kwargs: Any,
    ) -> None:
        for async_op in (False, True):
            model = fsdp_model(async_op=async_op, **kwargs)
            optim = torch.optim.Adam(model.parameters(), foreach=True)
            if prefetch:
                set_forward_prefetch([model, *model.layers, model.head])
            self.assertEqual(self._count(lambda: fn(model, optim)), expected)

    def test_training(self):
        """The root stays unsharded until its backward, the rest is gathered twice."""

        def train(model: Model, optim: torch.optim.Optimizer) -> None:
            for _ in range(3):
                model(inputs()).sum().backward()
                optim.step()
                optim.zero_grad()

        self._check_count(3 * (1 + 2 * (NUM_LAYERS + 1)), train)
        self._check_count(3 * (1 + 2 * (NUM_LAYERS + 1)), train, prefetch=False)
        self._check_count(3 * (NUM_LAYERS + 2), train, reshard_after_forward=False)

    def test_accumulation(self):
        def train(model: Model, optim: torch.optim.Optimizer) -> None:
            for _ in range(2):
                for microbatch in range(3):
                    is_last = microbatch == 2
                    model.set_requires_gradient_sync(is_last)
                    model.set_is_last_backward(is_last)
                    model.set_reshard_after_backward(is_last)
                    model(inputs()).sum().backward()
                optim.step()
                optim.zero_grad()

        # The backward of a microbatch keeps what the forward of the next one needs
        expected = 2 * (1 + (NUM_LAYERS + 1) + 3 * (NUM_LAYERS + 1))
        self._check_count(expected, train)

    def test_1f1b(self):
        """Schedule of the first of two pipeline stages with six microbatches."""

        def train(model: Model, optim: torch.optim.Optimizer) -> None:
            losses, num_backwards = [], 0
            for action in "FF" + "BF" * 4 + "BB":
                if action == "F":
                    losses.append(model(inputs()).sum())
                    continue
                num_backwards += 1
                is_last = num_backwards == 6
                model.set_is_last_backward(is_last)
                model.set_requires_gradient_sync(is_last)
                losses.pop(0).backward()
            optim.step()

        # The layers and the head, each time; the root in the first forward, in those
        # that follow a backward, and in the last backward
        self._check_count(6 * 2 * (NUM_LAYERS + 1) + 6, train)

    def test_decoding(self):
        """Forwards in a row, whose last layer prefetches the first."""

        def decode(model: Model, optim: torch.optim.Optimizer) -> None:
            model.head.set_modules_to_forward_prefetch([model.layers[0]])
            with torch.no_grad():
                for _ in range(4):
                    model(inputs())

        self._check_count(1 + 4 * (NUM_LAYERS + 1) + 1, decode)

    def test_evaluation_between_steps(self):
        """One more gather of the root, which the evaluation leaves unsharded."""

        def train(model: Model, optim: torch.optim.Optimizer) -> None:
            model(inputs()).sum().backward()
            _eval(model)
            optim.step()
            _eval(model)

        eval_count = 1 + NUM_LAYERS + 1
        train_count = 1 + 2 * (NUM_LAYERS + 1)
        self._check_count(train_count + 2 * eval_count, train)

    def test_step_of_other_parameters(self):
        """A step without gradients, or of another model, changes nothing."""

        def step(model: Model, optim: torch.optim.Optimizer) -> None:
            other = fsdp_model()
            other_optim = torch.optim.Adam(other.parameters())
            other(inputs()).sum().backward()
            before = self._count(lambda: _eval(model))
            other_optim.step()
            optim.step()
            after = self._count(lambda: _eval(model))
            self.assertEqual(before - after, 1)  # the root is still unsharded

        step(fsdp_model(), torch.optim.Adam(fsdp_model().parameters()))

    def test_compiled_step(self):
        """One more gather of the root, as for the same step without compile."""
        model = fsdp_model()
        optim = torch.optim.Adam(model.parameters(), fused=True)
        step = torch.compile(optim.step, backend="eager")
        model(inputs()).sum().backward()
        for _ in range(2):  # compiles in the first
            _eval(model)
            step()
            self.assertEqual(self._count(lambda: _eval(model)), 1 + NUM_LAYERS + 1)

    def test_random_sequences_without_changes(self):
        """As many as if the version of the weights were not looked at."""

        def run(seed: int) -> None:
            rng = random.Random(seed)
            model = fsdp_model(
                async_op=rng.random() < 0.5,
                reshard_after_forward=rng.choice([True, False]),
            )
            if rng.random() < 0.5:
                set_forward_prefetch(fsdp_units(model))
            losses, handles = [], []
            for _ in range(15):
                op = rng.choice(("eval", "forward", "backward", "unshard", "wait"))
                model.skip = {model.head} if rng.random() < 0.3 else set()
                unit = fsdp_units(model)[rng.randrange(NUM_LAYERS + 2)]
                if op == "eval":
                    _eval(model)
                elif op == "forward":
                    losses.append(model(inputs()).sum())
                elif op == "backward" and losses:
                    losses.pop(0).backward()
                elif op == "unshard":
                    handles.append(unit.unshard(async_op=True))
                elif op == "wait" and handles:
                    handles.pop().wait()
                else:
                    model.state_dict()

        for seed in range(30):
            count = self._count(lambda: run(seed))
            with unittest.mock.patch.object(
                _fsdp_param_group, "get_version", return_value=0, create=True
            ):
                self.assertEqual(count, self._count(lambda: run(seed)), msg=str(seed))
            self.assertGreater(count, 0)

    def test_post_optim_event(self):
        """Async unshards read the parameters in the current stream."""
        for async_op in (False, True):
            model = fsdp_model(async_op=async_op)
            _eval(model)
            event = unittest.mock.Mock()
            stream = unittest.mock.Mock()
            state = model._get_fsdp_state()
            model.set_post_optim_event(event)
            with unittest.mock.patch.object(
                state, "_device_handle", current_stream=lambda: stream
            ):
                _eval(model)
            waits = [call.args for call in stream.wait_event.call_args_list]
            self.assertEqual(waits, [(event,)] if async_op else [])


class TestFullyShardUnshardStaleWeightsCheckpoint(StaleUnshardTests, TestCase):
    hw_classification = HardwareClassification.CPU

    def setUp(self) -> None:
        super().setUp()
        self.store = dist.HashStore()
        dist.init_process_group("gloo", rank=0, world_size=1, store=self.store)
        self.addCleanup(dist.destroy_process_group)

    def test_distributed_checkpoint(self):
        """It loads into the local tensors of the state dict."""
        model = fsdp_model()
        with tempfile.TemporaryDirectory() as path:
            _eval(model)
            state_dict = model.state_dict()
            dcp.save({k: 2 * v for k, v in state_dict.items()}, checkpoint_id=path)
            _eval(model)
            expected = copy.deepcopy(state_dict["head.weight"].full_tensor())
            dcp.load(state_dict, checkpoint_id=path)
            self.assertEqual(model.head.weight.full_tensor(), 2 * expected)
            self._check_forward(model)


if __name__ == "__main__":
    run_tests()
