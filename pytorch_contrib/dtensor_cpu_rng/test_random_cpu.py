# Owner(s): ["oncall: distributed"]

import hashlib
import itertools
import random as py_random
import unittest
import warnings
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
import torch.distributed.tensor._random as random
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache, CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
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
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


aten = torch.ops.aten

RANDOM_OPS = {
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(),
    "bernoulli_": lambda t: t.bernoulli_(0.5),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda t: torch.randint_like(t, 1 << 20),
    "dropout": lambda t: F.dropout(t.fill_(1.0)),
    "alpha_dropout": lambda t: F.alpha_dropout(t.fill_(1.0), training=True),
    "exponential_": lambda t: t.exponential_(),
    "geometric_": lambda t: t.geometric_(0.01),
    "log_normal_": lambda t: t.log_normal_(),
    "cauchy_": lambda t: t.cauchy_(),
    "feature_dropout": lambda t: torch.feature_dropout(t.fill_(1.0), 0.5, True),
    "feature_alpha_dropout": lambda t: F.feature_alpha_dropout(
        t.fill_(1.0), training=True
    ),
    "rrelu": lambda t: F.rrelu(t.fill_(-1.0), training=True),
}


def all_aten_names():
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in names if name.startswith("aten::"))


def sample_arguments(op, make_tensor):
    """Arguments for a random op; None for a factory, which no DTensor reaches."""
    values = {
        # a range, of which the first number is below the second
        "from": 0.0,
        "to": 1.0,
        "lower": 0.1,
        "upper": 0.9,
        "low": 0,
        "high": 1 << 20,
        "num_samples": 4,
        "lambd": 1.0,
        "mean": 0.0,
        "std": 1.0,
        "median": 0.0,
        "sigma": 1.0,
        "p": 0.5,
        "dropout_p": 0.5,
        "train": True,
        "training": True,
        "size": [16, 8],
        "n": 16,
    }
    args, kwargs, has_tensor = [], {}, False
    for argument in op._schema.arguments:
        name, kind = argument.name, str(argument.type)
        if kind in ("Tensor", "List[Tensor]"):
            has_tensor = True
            if "multinomial" in str(op) and argument.is_out:
                value = make_tensor(torch.int64, (4,))
            elif name == "out1":  # of native_dropout
                value = make_tensor(torch.bool, (8,))
            else:
                value = make_tensor(torch.float32, (8,))
                # rrelu draws a slope where its input is negative
                value = value.neg_() if "rrelu" in str(op) else value
            value = value if kind == "Tensor" else [value]
        elif name in values:
            value = values[name]
        elif argument.has_default_value() or kind.startswith("Optional"):
            value = argument.default_value
        else:
            value = {"int": 1, "SymInt": 1, "float": 0.5, "bool": False}.get(kind)
        if argument.kwarg_only:
            kwargs[name] = value
        else:
            args.append(value)
    return (args, kwargs) if has_tensor else None


def is_sharded(placement):
    return isinstance(placement, Shard | _StridedShard)


class StandInGenerator:
    """What the tracker uses of torch.cuda, with one Philox generator and no memory."""

    def __init__(self):
        self.initial_state = torch.arange(16, dtype=torch.uint8)
        self.state = self.initial_state

    def get_rng_state(self, device=None):
        return self.state.clone()

    def set_rng_state(self, state, device=None):
        self.state = state.clone()


class StandInTracker(random.OffsetBasedRNGTracker):
    """The default tracker, on a stand-in for CUDA whose states stay on the CPU."""

    def __init__(self, generator):
        self._device = torch.device("cuda", 0)
        self._device_handle = generator
        self._use_distribute_region = True

    def _get_device_state(self):
        return self._device_handle.get_rng_state()


class TestRandomCPUSingleProcess(TestCase):
    """One rank after the other, on the fake process group, without LocalTensor."""

    hw_classification = HardwareClassification.CPU

    def _on_each_rank(self, ranks, fn, seed=0, device_type="cpu"):
        """fn(mesh) on each rank in turn, with the same seed; the results by coordinate.

        With a mesh of device type "cuda", a stand-in has the place of CUDA's generator.
        """
        if isinstance(ranks, int):
            ranks = range(ranks)
        world_size = len(ranks)
        results = []
        for rank in ranks:
            # Equal meshes have equal keys there, but each knows only its own rank.
            _clear_sharding_prop_cache()
            dist.init_process_group(
                "fake", rank=rank, world_size=world_size, store=FakeStore()
            )
            generator = StandInGenerator()
            try:
                mesh = DeviceMesh(
                    device_type,
                    list(ranks),
                    _init_backend=device_type == "cpu",
                    _rank=rank,
                )
                torch.manual_seed(seed)
                if device_type == "cpu":
                    results.append(fn(mesh))
                    continue
                random._rng_tracker = StandInTracker(generator)
                with mock.patch.multiple(
                    torch.cuda,
                    get_rng_state=generator.get_rng_state,
                    set_rng_state=generator.set_rng_state,
                ):
                    results.append(fn(mesh))
                self.assertEqual(generator.state, generator.initial_state)
            finally:
                random._rng_tracker = None
                dist.destroy_process_group()
        return results

    @staticmethod
    def _empty(mesh, placements, shape):
        # As nn.Module.to_empty(device="cpu") makes it, whatever the mesh's device.
        meta = distribute_tensor(torch.empty(shape, device="meta"), mesh, placements)
        return torch.empty_like(meta, device="cpu")

    def test_cpu_tensor_on_accelerator_mesh(self):
        for name, op in RANDOM_OPS.items():
            for world_size in (1, 2):
                with self.subTest(op=name, world_size=world_size):

                    def draw_twice(mesh, op=op):
                        t = self._empty(mesh, [Shard(0)], (64, 8))
                        draws = [op(t).to_local().clone() for _ in range(2)]
                        return *draws, torch.get_rng_state()

                    results = self._on_each_rank(
                        world_size, draw_twice, device_type="cuda"
                    )
                    for first, second, state in results:
                        self.assertEqual(first.device.type, "cpu")
                        self.assertNotEqual(first, second)
                        self.assertEqual(state, results[0][2])
                    if world_size == 2:
                        self.assertNotEqual(results[0][0], results[1][0])
                    # the mesh's device makes no difference
                    self.assertEqual(
                        self._on_each_rank(world_size, draw_twice), results
                    )

    def test_every_random_op(self):
        """Each op that aten tags as random draws right, or raises."""
        names = [name.split("::")[1].split(".") for name in all_aten_names()]
        ops = [getattr(getattr(aten, n), *(o or ["default"])) for n, *o in names]
        ops_by_tag = [op for op in ops if torch.Tag.nondeterministic_seeded in op.tags]
        # without the tag
        untagged = ("random", "random_", "binomial", "_sample_dirichlet")
        others = [getattr(aten, n).default for n in untagged]
        others += [aten.random_.to, getattr(aten.random_, "from")]
        self.assertGreater(len(ops_by_tag), 100)
        drawn = set()
        for op in (*ops_by_tag, *others):

            def draw(mesh, placement, op=op):
                rows = 8 if placement.is_shard() else 16

                def make_tensor(dtype, columns):
                    local = torch.full((rows, *columns), 0.5).to(dtype)
                    return DTensor.from_local(local, mesh, [placement], run_check=False)

                sample = sample_arguments(op, make_tensor)
                if sample is None:
                    return None
                args, kwargs = sample
                before = torch.get_rng_state()
                try:
                    out = op(*args, **kwargs)
                except (NotImplementedError, RuntimeError):
                    # An op that was not run did not draw either.
                    self.assertEqual(torch.get_rng_state(), before)
                    return None
                leaves = tree_leaves((out, args, kwargs))
                return [
                    leaf.to_local().clone()
                    for leaf in leaves
                    if isinstance(leaf, DTensor)
                ]

            with self.subTest(op=op):
                first, second = self._on_each_rank(2, lambda m: draw(m, Shard(0)))
                if first is None:
                    continue
                drawn.add(op)
                self.assertNotEqual(first, second)
                first, second = self._on_each_rank(2, lambda m: draw(m, Replicate()))
                self.assertEqual(first, second)
        # An op for which the arguments above are wrong would go unnoticed.
        dispatcher = DTensor._op_dispatcher
        random_ops = dispatcher._random_ops | dispatcher._cpu_random_ops
        factories = {aten.rand.default, aten.randn.default}
        self.assertEqual(random_ops - factories - drawn, set())

    def test_trunc_normal_ends(self):
        # pytorch/pytorch#180088; where samples repeat, none is ever accepted. One
        # rank, so that no collective decides (those of a fake group do nothing).
        def init(mesh):
            t = self._empty(mesh, [Shard(0)], (256, 256))
            draws = 0

            class Limited(torch.utils._python_dispatch.TorchDispatchMode):
                def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                    nonlocal draws
                    draws += func is torch.ops.aten.normal_.default
                    if draws > 100:
                        raise RuntimeError("trunc_normal_ does not end")
                    return func(*args, **(kwargs or {}))

            with Limited():
                nn.init.trunc_normal_(t, 0.0, 1.0, -1.0, 1.0)
            return t.to_local()

        (local,) = self._on_each_rank(1, init, device_type="cuda")
        self.assertTrue((local.abs() <= 1).all())
        self.assertGreater(local.std(), 0.4)

    def test_generator_state(self):
        """All ranks, shapes and placements move the shared generator alike."""

        def states(mesh):
            result = []
            for placement, shape, generator in itertools.product(
                (Shard(0), Shard(1), Replicate()),
                ((64, 8), (3, 5), (1, 1)),
                (None, torch.Generator()),
            ):
                default_state = torch.manual_seed(3).get_state()
                if generator is not None:
                    generator.manual_seed(3)
                self._empty(mesh, [placement], shape).normal_(generator=generator)
                if generator is not None:
                    self.assertEqual(torch.get_rng_state(), default_state)
                result.append((generator or torch.default_generator).get_state())
            self.assertEqual(torch.initial_seed(), 3)
            return result

        first = self._on_each_rank(1, states)[0][0]
        for result in self._on_each_rank(4, states):
            for state in result:
                self.assertEqual(state, first)

    def test_explicit_generator(self):
        def draw(mesh, seeds):
            generator = torch.Generator()
            t = self._empty(mesh, [Shard(0)], (64, 8))
            draws = []
            for seed in seeds:
                if seed is not None:
                    generator.manual_seed(seed)
                draws.append(t.normal_(generator=generator).to_local().clone())
            return draws

        (one, two, other, again), _ = self._on_each_rank(
            2, lambda mesh: draw(mesh, (1, None, 2, 1))
        )
        self.assertNotEqual(one, two)
        self.assertNotEqual(one, other)
        self.assertEqual(one, again)

        def draw_default(mesh):
            return self._empty(mesh, [Shard(0)], (64, 8)).normal_().to_local()

        # the same stream as a default generator of the same state
        self.assertEqual(one, self._on_each_rank(2, draw_default, seed=1)[0])

    def test_wrong_generator(self):
        def draw(mesh):
            t = self._empty(mesh, [Shard(0)], (4, 4))
            with self.assertRaises(RuntimeError):
                t.normal_(generator=torch.Generator(device="meta"))
            return torch.get_rng_state()

        for state in self._on_each_rank(2, draw):
            self.assertEqual(state, torch.manual_seed(0).get_state())

    def test_exception_restores_the_generator(self):
        torch.manual_seed(0)
        torch.empty((), dtype=torch.int64).random_()
        after_draw = torch.get_rng_state()
        torch.manual_seed(0)
        # not there before: imported here, so that the file loads without it
        from torch.distributed.tensor._random_cpu import shard_rng

        with self.assertRaisesRegex(ValueError, "in the op"):
            with shard_rng(1):
                torch.rand(3)
                raise ValueError("in the op")
        self.assertEqual(torch.get_rng_state(), after_draw)

    def test_meta_and_fake_draw_nothing(self):
        def draw(mesh):
            before = torch.get_rng_state()
            meta = distribute_tensor(torch.empty(4, 4, device="meta"), mesh, [Shard(0)])
            self.assertTrue(meta.normal_().is_meta)
            self.assertTrue(meta.exponential_().is_meta)
            self.assertTrue(torch.multinomial(meta, 2).is_meta)
            self.assertTrue(torch.rand_like(meta).is_meta)
            with FakeTensorMode():
                dtensor.rand(4, 4, device_mesh=mesh, placements=[Shard(0)])
                local = torch.empty(4, 4)
                fake = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
                fake.normal_()
                torch.rand_like(fake)
                generator = torch.Generator()
                generator_before = generator.get_state()
                fake.normal_(generator=generator)
            self.assertEqual(torch.get_rng_state(), before)
            self.assertEqual(generator.get_state(), generator_before)

        # Nor do ranks communicate: those that hold real tensors are elsewhere.
        with mock.patch.multiple(
            "torch.distributed.tensor._random_cpu",
            _synced_meshes=set(),
            mesh_broadcast=self._do_not_communicate,
        ):
            self._on_each_rank(2, draw)

    @staticmethod
    def _do_not_communicate(*args):
        raise AssertionError("communicates")

    def test_default_device_and_modes(self):
        """Neither a default device nor a dispatch mode changes what is drawn."""

        def draw(mesh, context):
            t = self._empty(mesh, [Shard(0)], (8, 8))
            with context:
                made = dtensor.randn(8, 8, device_mesh=mesh, placements=[Shard(0)])
                return made.to_local(), t.normal_().to_local()

        plain, meta, counted = (
            self._on_each_rank(2, lambda mesh, c=context: draw(mesh, c()))
            for context in (
                torch.no_grad,
                lambda: torch.device("meta"),
                CommDebugMode,
            )
        )
        self.assertEqual(plain, meta)
        self.assertEqual(plain, counted)

    def test_order_of_ranks(self):
        def draw(mesh):
            return self._empty(mesh, [Shard(0)], (32, 16)).normal_().to_local()

        self.assertEqual(
            self._on_each_rank([2, 0, 3, 1], draw), self._on_each_rank(4, draw)
        )

    def test_fork_rng(self):
        def draw(mesh):
            t = self._empty(mesh, [Shard(0)], (64, 8))
            with torch.random.fork_rng(devices=[]):
                forked = t.normal_().to_local().clone()
            self.assertEqual(t.normal_().to_local(), forked)
            self.assertNotEqual(t.normal_().to_local(), forked)

        self._on_each_rank(2, draw)

    def test_activation_checkpoint(self):
        def draw(mesh):
            for use_reentrant in (False, True):
                x = self._empty(mesh, [Shard(0)], (64, 8)).fill_(1.0)
                x.requires_grad_()
                y = checkpoint(
                    lambda x: F.dropout(x) * x, x, use_reentrant=use_reentrant
                )
                torch.rand(7)  # moves the generator between forward and recompute
                y.sum().backward()
                # d(m x^2)/dx = 2 m x at x = 1: only if the mask m is the same
                self.assertEqual(x.grad.to_local(), 2 * y.detach().to_local())
                dropped = (y.to_local() == 0).float().mean()
                self.assertTrue(0.3 < dropped < 0.7)

        self._on_each_rank(2, draw)

    def test_compile(self):
        """Eager and compiled draws, and generator states, are the same."""

        def read_then_draw(t):
            doubled = t * 2
            t.normal_()
            return doubled + t

        def draw_through_a_view(t):
            view = t.t()
            t.normal_()
            return view * 2

        functions = [
            read_then_draw,
            draw_through_a_view,
            lambda t: torch.rand_like(t) - torch.rand_like(t),
            lambda t: F.dropout(t) * 2,
            lambda t: t.exponential_() * 2,
        ]
        cases = [(fn, "aot_eager") for fn in functions]
        if HAS_CPU:  # a compiler for Inductor
            cases.append((read_then_draw, "inductor"))

        def draw(mesh):
            results = []
            for fn, backend in cases:
                torch._dynamo.reset()
                compiled = torch.compile(fn, backend=backend, fullgraph=True)
                for f in (fn, compiled):
                    torch.manual_seed(5)
                    t = self._empty(mesh, [Shard(0)], (64, 8)).fill_(1.0)
                    local = f(t).to_local().clone()
                    results.append((local, t.to_local(), torch.get_rng_state()))
                self.assertEqual(results[-2], results[-1])
            return results

        for first, second in zip(*self._on_each_rank(2, draw)):
            self.assertNotEqual(first[0], second[0])
            self.assertEqual(first[2], second[2])

    def test_compile_does_not_communicate(self):
        """The graph of a mesh's first op is made, and run, without a collective."""

        def draw(mesh):
            t = self._empty(mesh, [Shard(0)], (64, 8))
            torch._dynamo.reset()
            compiled = torch.compile(
                lambda t: t.normal_() + 1, backend="aot_eager", fullgraph=True
            )
            return compiled(t).to_local().clone()

        with mock.patch.multiple(
            "torch.distributed.tensor._random_cpu",
            _synced_meshes=set(),
            mesh_broadcast=self._do_not_communicate,
        ):
            first, second = self._on_each_rank(2, draw)
        self.assertNotEqual(first, second)

    def test_compile_refuses(self):
        """What a graph cannot draw right raises: rrelu writes to its noise."""

        def draw(mesh):
            t = self._empty(mesh, [Shard(0)], (64, 8)).fill_(-1.0)
            torch._dynamo.reset()
            compiled = torch.compile(
                lambda t: F.rrelu(t, training=True), backend="aot_eager"
            )
            with self.assertRaisesRegex(Exception, "outside of torch.compile"):
                compiled(t)

        self._on_each_rank(2, draw)

    def test_stream_of_a_shard(self):
        """The words come from SHAKE128, and the draws from MT19937 on them."""

        def draw(mesh):
            t = self._empty(mesh, [Shard(0)], (30,)).to(torch.int64)
            return torch.randint_like(t, 1 << 20).to_local()

        locals_ = self._on_each_rank(3, draw, seed=9)
        torch.manual_seed(9)
        shared = torch.empty((), dtype=torch.int64).random_().item()
        for index, local in enumerate(locals_):
            key = shared.to_bytes(8, "little") + index.to_bytes(8, "little")
            digest = hashlib.shake_128(key).digest(4 * 624)
            words = (
                int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(624)
            )
            # Python's generator is an independent MT19937.
            oracle = py_random.Random()
            oracle.setstate((3, (*words, 624), None))
            expected = [oracle.getrandbits(32) % (1 << 20) for _ in local]
            self.assertEqual(local.tolist(), expected)

    def test_statistics(self):
        """Shards are independent normals, to 4 standard errors."""
        n = 1 << 17  # numbers a shard
        for world_size in (2, 4, 8):

            def draw(mesh, world_size=world_size):
                t = self._empty(mesh, [Shard(0)], (world_size * n,))
                return t.normal_().to_local().double().clone()

            shards = torch.stack(self._on_each_rank(world_size, draw, seed=1234))
            mean = shards.mean(1, keepdim=True)
            std = shards.std(1, keepdim=True)
            z = (shards - mean) / std
            self.assertLess(mean.abs().max(), 4 * n**-0.5)
            self.assertLess((std - 1).abs().max(), 4 * (2 * n) ** -0.5)
            kurtosis = (z**4).mean(1)
            self.assertLess((kurtosis - 3).abs().max(), 4 * (24 / n) ** 0.5)
            correlation = z @ z.T / n - torch.eye(world_size)
            self.assertLess(correlation.triu(1).abs().max(), 4 * n**-0.5)
            # nor is a shard another one that is shifted by a few numbers
            for shift in (1, 2, 624):
                shifted = z @ z.roll(shift, 1).T / n
                self.assertLess(shifted.abs().max(), 5 * n**-0.5)


class TestRandomCPULocalTensor(LocalDTensorTestBase):
    hw_classification = HardwareClassification.CPU

    world_size = 4
    device_type = "cpu"

    def _draw(self, mesh_shape, placements, op=RANDOM_OPS["normal_"], shape=(32, 16)):
        """Result of op, ranks' locals and states after a seeded draw."""
        mesh = init_device_mesh("cpu", mesh_shape)
        with self._get_local_tensor_mode() as mode:
            torch.manual_seed(3)
            t = distribute_tensor(torch.zeros(shape), mesh, placements)
            result = op(t)
            full = result.full_tensor().reconcile().clone()
            local = result.to_local()._local_tensors
            states = [mode._per_rank_rng_states[r][0] for r in range(self.world_size)]
        return full, local, states

    @with_comms
    def test_replicas_equal_shards_differ(self):
        cases = [((4,), [p]) for p in (Shard(0), Shard(1), Replicate())]
        for placements in (
            [Shard(0), Shard(1)],
            [Shard(0), Shard(0)],
            [Replicate(), Shard(0)],
            [Shard(1), Replicate()],
            [_StridedShard(0, split_factor=2), Shard(0)],
            [_StridedShard(1, split_factor=2), Shard(1)],
        ):
            cases.append(((2, 2), placements))
        for (mesh_shape, placements), op in itertools.product(
            cases, RANDOM_OPS.values()
        ):
            with self.subTest(placements=placements, op=op):
                _, local, states = self._draw(mesh_shape, placements, op)
                ranks = torch.arange(4).view(mesh_shape)
                for a, b in itertools.combinations(range(4), 2):
                    coordinates = zip(
                        (ranks == a).nonzero()[0], (ranks == b).nonzero()[0], placements
                    )
                    replicas = all(
                        i == j
                        for i, j, placement in coordinates
                        if is_sharded(placement)
                    )
                    self.assertEqual(torch.equal(local[a], local[b]), replicas)
                    self.assertEqual(states[a], states[b])

    @with_comms
    def test_does_not_communicate(self):
        """The ranks of a LocalTensorMode keep the states that it has for each."""
        with mock.patch.multiple(
            "torch.distributed.tensor._random_cpu",
            _synced_meshes=set(),
            mesh_broadcast=mock.Mock(side_effect=AssertionError("communicates")),
        ):
            self._draw((4,), [Shard(0)])

    @with_comms
    def test_multinomial(self):
        def draw(t):
            return torch.multinomial(t.fill_(1.0), 8)

        _, local, _ = self._draw((4,), [Shard(0)], draw)
        for a, b in itertools.combinations(range(4), 2):
            self.assertNotEqual(local[a], local[b])
        # The weights of a row are gathered: all ranks draw the same.
        for placement in (Shard(1), Replicate()):
            _, local, states = self._draw((4,), [placement], draw)
            for rank in range(4):
                self.assertEqual(local[rank], local[0])
                self.assertEqual(states[rank], states[0])

    @with_comms
    def test_global_tensor(self):
        """The same wherever the shards are, for the same grid of shards."""
        one_dim, _, states = self._draw((4,), [Shard(0)])
        two_dims, _, _ = self._draw((2, 2), [Shard(0), Shard(0)])
        self.assertEqual(two_dims, one_dim)
        for placements in ([Shard(0), Replicate()], [Replicate(), Shard(0)]):
            halves, _, hsdp_states = self._draw((2, 2), placements)
            self.assertNotEqual(halves, one_dim)
            self.assertEqual(hsdp_states, states)
            if placements[0].is_shard():
                expected = halves
        self.assertEqual(halves, expected)

    @with_comms
    def test_factories(self):
        mesh = init_device_mesh("cpu", (4,))
        with self._get_local_tensor_mode():
            torch.manual_seed(3)
            made = dtensor.randn(32, 16, device_mesh=mesh, placements=[Shard(0)])
            made = made.full_tensor().reconcile()
        self.assertEqual(made, self._draw((4,), [Shard(0)])[0])

    @with_comms
    def test_uneven_and_empty_shards(self):
        for shape in ((5, 3), (2, 3), (1, 1)):
            _, local, states = self._draw((4,), [Shard(0)], shape=shape)
            self.assertEqual(sum(t.size(0) for t in local.values()), shape[0])
            for state in states:
                self.assertEqual(state, states[0])


class TwoLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32, bias=False)
        self.second = nn.Linear(32, 32, bias=False)

    def init_weights(self):
        for linear in (self.first, self.second):
            nn.init.trunc_normal_(linear.weight, std=0.02, a=-0.03, b=0.03)


class TestRandomCPUMultiProcess(MultiProcContinuousTest):
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

    def _on_ranks(self, tensor):
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(tensors, tensor.contiguous())
        return tensors

    def _device_states(self):
        return ()

    def test_offloaded_init(self):
        """FSDP2 with CPU offload, two equal layers: four different shards."""
        mesh = init_device_mesh(self.device_type, (self.world_size,))
        with torch.device("meta"):
            model = TwoLinears()
        policy = CPUOffloadPolicy(pin_memory=False)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        model.to_empty(device="cpu")
        weights = []
        for _ in range(2):
            torch.manual_seed(7)
            device_states = self._device_states()
            model.init_weights()
            self.assertEqual(self._device_states(), device_states)
            locals_ = [p.to_local().detach() for p in model.parameters()]
            self.assertTrue(all(t.device.type == "cpu" for t in locals_))
            shards = [shard for t in locals_ for shard in self._on_ranks(t)]
            for a, b in itertools.combinations(shards, 2):
                self.assertNotEqual(a, b)
            for shard in shards:
                self.assertLessEqual(shard.abs().max(), 0.03)
                self.assertTrue(0.012 < shard.std() < 0.02)
            weights.append(shards)
            for state in self._on_ranks(torch.get_rng_state()):
                self.assertEqual(state, torch.get_rng_state())
        self.assertEqual(weights[0], weights[1])  # a seeded run repeats
        model.init_weights()
        self.assertNotEqual(model.first.weight.to_local(), weights[0][self.rank])

    def test_ranks_that_are_seeded_differently(self):
        """The first op on a mesh takes the generator of its first rank, and warns."""
        mesh = init_device_mesh(self.device_type, (self.world_size, 1))
        meta = distribute_tensor(
            torch.empty(16, 4, device="meta"), mesh, [Replicate(), Shard(0)]
        )
        torch.manual_seed(self.rank)
        with (
            mock.patch.object(random, "_cpu_run_state_sync", True),
            mock.patch("torch.distributed.tensor._random_cpu._synced_meshes", set()),
        ):
            t = torch.empty_like(meta, device="cpu")
            logger = "torch.distributed.tensor._random_cpu"
            if self.rank == 0:
                with self.assertNoLogs(logger):
                    t.normal_()
            else:
                with self.assertLogs(logger, "WARNING") as logs:
                    t.normal_()
                self.assertIn("torch.manual_seed", logs.output[0])
            first, second = self._on_ranks(t.to_local())
            self.assertEqual(first, second)
            # Once: what is seeded differently after that is the user's to know.
            with CommDebugMode() as comms:
                t.normal_()
            self.assertEqual(comms.get_total_counts(), 0)

    def test_manual_seed(self):
        mesh = init_device_mesh(self.device_type, (self.world_size,))
        self.assertTrue(random.is_rng_supported_mesh(mesh))
        with (
            warnings.catch_warnings(),
            mock.patch.object(random, "_cpu_run_state_sync", True),
            mock.patch.object(random, "_rng_tracker", None),
        ):
            warnings.simplefilter("error")
            random.manual_seed(7 + self.rank, mesh)
            self.assertEqual(torch.initial_seed(), 7 + self.rank)
            # As for accelerators: these seeds are meant to differ.
            meta = distribute_tensor(
                torch.empty(16, 4, device="meta"), mesh, [Replicate()]
            )
            t = torch.empty_like(meta, device="cpu").normal_()
            first, second = self._on_ranks(t.to_local())
            self.assertNotEqual(first, second)
            random.manual_seed(7, mesh)
            first, second = self._on_ranks(t.normal_().to_local())
            self.assertEqual(first, second)

    def test_ranks_outside_of_the_mesh(self):
        """They take no part, and their generators stay."""
        mesh = DeviceMesh(self.device_type, [0])
        torch.manual_seed(7)
        before = torch.get_rng_state()
        meta = distribute_tensor(torch.empty(4, device="meta"), mesh, [Shard(0)])
        torch.empty_like(meta, device="cpu").normal_()
        if self.device_type == "cpu":
            dtensor.randn(4, device_mesh=mesh, placements=[Shard(0)])
        moved = not torch.equal(torch.get_rng_state(), before)
        self.assertEqual(moved, self.rank == 0)

    def test_hsdp_replicas(self):
        mesh = init_device_mesh(self.device_type, (self.world_size, 1))
        meta = distribute_tensor(
            torch.empty(16, 4, device="meta"), mesh, [Replicate(), Shard(0)]
        )
        torch.manual_seed(7)
        t = torch.empty_like(meta, device="cpu")
        first, second = self._on_ranks(t.normal_().to_local())
        self.assertEqual(first, second)
        self.assertNotEqual(t.normal_().to_local(), first)


@unittest.skipIf(not TEST_MULTIGPU, "needs 2 GPUs")
class TestRandomCPUMultiProcessCUDA(TestRandomCPUMultiProcess):
    """CPU tensors, CUDA mesh."""

    hw_classification = HardwareClassification.CUDA

    device_type = "cuda"

    @classmethod
    def backend_str(cls):
        return "cpu:gloo,cuda:nccl"

    def _device_states(self):
        torch.cuda.set_device(self.rank)
        return (torch.cuda.get_rng_state(),)


if __name__ == "__main__":
    run_tests()
