# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""One RoPE cache for the equal layers of a model; see share_rope_caches()."""

import contextlib
import copy
import dataclasses
import gc
import importlib.util
import sys
import threading
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import parallel_dims as parallel_dims_module
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE
from torchtitan.models.qwen3 import _build_qwen3_layers
from torchtitan.models.qwen3.model import Qwen3Model


def _load_qwen3_5_rope():
    """Load MRoPE's module alone: its package needs flash-linear-attention."""
    package = importlib.util.find_spec("torchtitan.models.qwen3_5")
    path = Path(package.submodule_search_locations[0]) / "rope.py"
    spec = importlib.util.spec_from_file_location("_qwen3_5_rope", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MRoPE = _load_qwen3_5_rope().MRoPE
NUM_LAYERS = 4
ROPE = CosSinRoPE.Config(dim=16, max_seq_len=32)


def _build_config(
    rope: RoPE.Config = ROPE, num_layers: int = NUM_LAYERS
) -> Qwen3Model.Config:
    dim, vocab_size = 8, 20
    init = {"weight": torch.nn.init.normal_}
    config = Qwen3Model.Config(
        vocab_size=vocab_size,
        dim=dim,
        norm=RMSNorm.Config(normalized_shape=dim),
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size, embedding_dim=dim, param_init=init
        ),
        lm_head=Linear.Config(
            in_features=dim, out_features=vocab_size, param_init=init
        ),
        layers=_build_qwen3_layers(
            fuse_qkv=False,
            n_layers=num_layers,
            dim=dim,
            n_heads=2,
            n_kv_heads=2,
            head_dim=rope.dim,
            hidden_dim=dim,
            attn_backend="flex",
            rope=rope,
        ),
    )
    for layer in config.layers:  # as update_from_config() does for the trainer
        layer.attention.rope = dataclasses.replace(rope)
    return config


def _ropes(model: Qwen3Model) -> list[RoPE]:
    return [layer.attention.rope for layer in model.layers.values()]


def _local(cache: torch.Tensor) -> torch.Tensor:
    return cache.to_local() if isinstance(cache, DTensor) else cache


def _storages(ropes: list[RoPE]) -> dict[int, int]:
    """Bytes of each distinct storage that the caches view."""
    storages = (_local(rope.cache).untyped_storage() for rope in ropes)
    return {storage._cdata: storage.nbytes() for storage in storages}


def _init(model: Qwen3Model, device: str = "cpu", buffer_device=None) -> Qwen3Model:
    """What the trainer does to a model that was built on meta."""
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=buffer_device)
    return model


def _build_on_meta(**kwargs) -> Qwen3Model:
    with torch.device("meta"):
        return _build_config(**kwargs).build()


class TestSharing(unittest.TestCase):
    def _assert_shared(self, model: Qwen3Model, num_caches: int = 1) -> None:
        ropes = _ropes(model)
        self.assertEqual(len(_storages(ropes)), num_caches)
        for objects in (ropes, [r.config for r in ropes], [r.cache for r in ropes]):
            self.assertEqual(len({id(obj) for obj in objects}), len(ropes))
        for rope in ropes:
            if not rope.cache.is_meta:
                self.assertTrue(torch.equal(rope.cache, rope._precompute_cache()))

    def test_built_on_cpu(self):
        self._assert_shared(_build_config().build())

    def test_initialized_from_meta(self):
        model = _build_on_meta()
        model.to_empty(device="cpu")
        self.assertEqual(len(_storages(_ropes(model))), 1)
        with torch.no_grad():
            model.init_states()
        self._assert_shared(model)
        # Again, e.g. by a trainer that is reset.
        self._assert_shared(_init(model))

    def test_computed_and_allocated_once(self):
        model = _build_on_meta()
        compute = mock.Mock(wraps=_ropes(model)[0]._precompute_cache)
        with mock.patch.object(CosSinRoPE, "_precompute_cache", compute):
            allocated = []

            def empty_like(tensor):
                if tensor.shape == (32, 2 * 16):
                    allocated.append(tensor)
                return torch.empty_like(tensor, device="cpu")

            model._apply(empty_like)  # to_empty() is this
            self.assertEqual((len(allocated), compute.call_count), (1, 0))
            with torch.no_grad():
                model.init_states()
            self.assertEqual(compute.call_count, 1)
            _build_config().build()
            self.assertEqual(compute.call_count, 2)

    def test_pipeline_stages(self):
        """Each stage is a deep copy of the whole model, cut to its layers."""
        whole = _build_on_meta()
        stages = []
        for kept in (("0", "1"), ("2", "3")):
            stage = copy.deepcopy(whole)
            for name in list(stage.layers):
                if name not in kept:
                    del stage.layers[name]
            stages.append(_init(stage))
        storages = [_storages(_ropes(stage)) for stage in stages]
        for stage, storage in zip(stages, storages, strict=True):
            self.assertEqual(len(storage), 1)
            self._assert_shared(stage)
        self.assertNotEqual(storages[0].keys(), storages[1].keys())

    def test_deepcopy_owns_its_cache(self):
        model = _build_config().build()
        clone = copy.deepcopy(model)
        self._assert_shared(clone)
        self.assertTrue(
            _storages(_ropes(clone)).keys().isdisjoint(_storages(_ropes(model)))
        )

    def test_moved(self):
        model = _build_config().build()
        before = [rope.cache for rope in _ropes(model)]
        model.to("cpu")  # nothing to do: the very same buffers
        for rope, cache in zip(_ropes(model), before, strict=True):
            self.assertIs(rope.cache, cache)
        model.to(torch.float64)
        self.assertEqual(len(_storages(_ropes(model))), 1)
        for rope in _ropes(model):
            self.assertEqual(rope.cache.dtype, torch.float64)
            self.assertTrue(torch.equal(rope.cache, rope._precompute_cache().double()))

    def test_moving_keeps_what_a_layer_changed(self):
        model = _build_config().build()
        changed = _ropes(model)[1]
        changed.cache = changed.cache + 1
        expected = [rope.cache.double() for rope in _ropes(model)]
        model.to(torch.float64)
        for rope, cache in zip(_ropes(model), expected, strict=True):
            self.assertTrue(torch.equal(rope.cache, cache))

    def test_other_buffers_of_a_subclass_are_not_shared(self):
        class TwoBuffers(CosSinRoPE):
            @dataclasses.dataclass(kw_only=True, slots=True)
            class Config(CosSinRoPE.Config):
                pass

            def __init__(self, config: Config):
                super().__init__(config)
                self.register_buffer("other", torch.empty_like(self.cache))

        model = _build_on_meta(rope=TwoBuffers.Config(dim=16, max_seq_len=32))
        _init(model)
        self._assert_shared(model)
        others = {rope.other.untyped_storage()._cdata for rope in _ropes(model)}
        self.assertEqual(len(others), NUM_LAYERS)
        self.assertTrue(others.isdisjoint(_storages(_ropes(model))))

    def test_buffer_device(self):
        """Under CPU offload parameters and buffers live on different devices."""
        model = _init(_build_on_meta(), "cpu", buffer_device=torch.device("meta"))
        self.assertEqual({rope.cache.device.type for rope in _ropes(model)}, {"meta"})
        self.assertEqual({p.device.type for p in model.parameters()}, {"cpu"})
        self._assert_shared(model)

    def test_state_dict_and_buffer_names(self):
        model = _build_config().build()
        self.assertFalse([name for name in model.state_dict() if "rope" in name])
        self.assertEqual(
            [name for name, _ in model.named_buffers() if "rope" in name],
            [f"layers.{i}.attention.rope.cache" for i in range(NUM_LAYERS)],
        )

    def test_freed_with_the_last_layer(self):
        model = _build_config().build()
        storage = StorageWeakRef(_ropes(model)[0].cache.untyped_storage())
        last = _ropes(model)[-1]
        del model
        gc.collect()
        self.assertFalse(storage.expired())
        del last
        gc.collect()
        self.assertTrue(storage.expired())

    def test_standalone_modules_do_not_share(self):
        self.assertEqual(len(_storages([ROPE.build(), ROPE.build()])), 2)


class TestNotMerged(unittest.TestCase):
    """A cache is shared only if all that it depends on is equal."""

    def _build_pair(self, first: RoPE.Config, second: RoPE.Config) -> list[RoPE]:
        config = _build_config(num_layers=3)
        config.layers[0].attention.rope = dataclasses.replace(first)
        config.layers[1].attention.rope = dataclasses.replace(second)
        config.layers[2].attention.rope = dataclasses.replace(first)
        ropes = _ropes(config.build())
        self.assertEqual(len(_storages([ropes[0], ropes[2]])), 1)
        for rope in ropes:
            self.assertTrue(torch.equal(rope.cache, rope._precompute_cache()))
        return ropes[:2]

    def test_every_config_field(self):
        base = MRoPE.Config(dim=16, max_seq_len=32, scaling="yarn", rope_factor=2.0)
        changes = dict(
            dim=8,
            max_seq_len=16,
            theta=5000.0,
            scaling="none",
            scaling_factor=4.0,
            low_freq_factor=2.0,
            high_freq_factor=8.0,
            original_max_position_embeddings=4096,
            rope_factor=4.0,
            beta_fast=16.0,
            beta_slow=2.0,
            original_seq_len=2048,
            truncate=False,
            mrope_section=[20, 24, 20],
        )
        fields = {f.name for f in dataclasses.fields(base)}
        self.assertEqual(changes.keys() | {"param_init", "sharding_config"}, fields)
        for name, value in changes.items():
            self.assertNotEqual(getattr(base, name), value, msg=name)
            pair = self._build_pair(base, dataclasses.replace(base, **{name: value}))
            self.assertEqual(len(_storages(pair)), 2, msg=name)

    def test_module_class(self):
        for other in (ComplexRoPE, MRoPE):
            pair = self._build_pair(ROPE, other.Config(dim=16, max_seq_len=32))
            self.assertEqual(len(_storages(pair)), 2)

    def test_device_and_dtype(self):
        class DefaultDtype(CosSinRoPE):
            @dataclasses.dataclass(kw_only=True, slots=True)
            class Config(CosSinRoPE.Config):
                pass

            def _precompute_cache(self):
                return torch.ones(4)

        from torchtitan.models.common.rope import share_rope_caches

        config = DefaultDtype.Config(dim=16, max_seq_len=32)
        with share_rope_caches():
            ropes = [config.build(), config.build()]
            with torch.device("meta"):
                ropes += [config.build(), config.build()]
            with mock.patch.object(torch, "get_default_dtype", lambda: torch.bfloat16):
                ropes += [config.build(), config.build()]
        self.assertEqual(len(_storages(ropes)), 3)
        self.assertEqual(
            [rope.cache.device.type for rope in ropes],
            ["cpu"] * 2 + ["meta"] * 2 + ["cpu"] * 2,
        )

    def test_models(self):
        models = [_build_config().build() for _ in range(2)]
        self.assertEqual(len(_storages(_ropes(models[0]) + _ropes(models[1]))), 2)

    def test_threads(self):
        from torchtitan.models.common.rope import share_rope_caches

        ropes = []
        with share_rope_caches():
            ropes.append(ROPE.build())
            thread = threading.Thread(target=lambda: ropes.append(ROPE.build()))
            thread.start()
            thread.join()
        self.assertEqual(len(_storages(ropes)), 2)


class TestNumerics(unittest.TestCase):
    """Bitwise as with a cache of each layer's own."""

    def _check(self, rope: RoPE.Config) -> None:
        shared = _build_config(rope).build()
        previous = None
        for unshare in (False, True):
            if unshare:
                for module in _ropes(shared):
                    module.cache = module._precompute_cache()
            self.assertEqual(
                len(_storages(_ropes(shared))), NUM_LAYERS if unshare else 1
            )
            torch.manual_seed(0)
            h = torch.randn(2, 8, 2, rope.dim, requires_grad=True)
            positions = torch.arange(8).flip(0).repeat(2, 1)
            query, key = h * 2, h * 3
            for module in _ropes(shared):
                query, key = module(query, key, positions)
            (query * key).square().sum().backward()
            result = (query, key, h.grad)
            if unshare:
                for actual, expected in zip(previous, result, strict=True):
                    self.assertTrue(torch.equal(actual, expected))
            previous = result

    def test_outputs_and_gradients(self):
        for cls in (CosSinRoPE, ComplexRoPE, MRoPE):
            with self.subTest(cls=cls):
                self._check(cls.Config(dim=16, max_seq_len=32))

    def test_no_recompilation(self):
        """A compiled layer guards on what the cache is, not on whose it is."""
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(
            lambda rope, q: rope(q, q)[0], backend=counter, fullgraph=True
        )
        q = torch.randn(2, 8, 2, 16)
        for rope in _ropes(_build_config().build()):
            compiled(rope, q)
        self.assertEqual(counter.frame_count, 1)


class TestParallelized(unittest.TestCase):
    """Model.parallelize() makes each buffer a DTensor or annotates its SPMD types."""

    def setUp(self):
        self.addCleanup(set_spmd_backend, get_spmd_backend())
        dist.init_process_group("fake", rank=1, world_size=4, store=dist.HashStore())
        self.addCleanup(dist.destroy_process_group)

    def _check(self, spmd_backend: str) -> list[RoPE]:
        set_spmd_backend(spmd_backend)
        parallelism = ParallelismConfig(
            tensor_parallel_degree=2,
            spmd_backend=spmd_backend,
            enable_sequence_parallel=True,
        )
        config = _build_config()
        config.update_from_config(config=mock.Mock(parallelism=parallelism))
        with torch.device("meta"):
            model = config.build()
        with mock.patch.object(parallel_dims_module, "device_type", "cpu"):
            parallel_dims = ParallelDims.from_config(parallelism, world_size=4)
            parallel_dims.build_mesh()
            model.parallelize(parallel_dims)
        model.to_empty(device="cpu")
        self.assertEqual(len(_storages(_ropes(model))), 1)
        with torch.no_grad(), _dense_mesh(parallel_dims):
            model.init_states()
        ropes = _ropes(model)
        self.assertEqual(len(_storages(ropes)), 1)
        for rope in ropes:
            self.assertTrue(torch.equal(_local(rope.cache), rope._precompute_cache()))
        return ropes

    def test_spmd_types(self):
        from spmd_types.runtime import get_local_type, has_local_type

        ropes = self._check("spmd_types")
        for rope in ropes:
            self.assertTrue(has_local_type(rope.cache))
            self.assertEqual(get_local_type(rope.cache), get_local_type(ropes[0].cache))

    def test_dtensor(self):
        for spmd_backend in ("partial_dtensor", "full_dtensor"):
            with self.subTest(spmd_backend=spmd_backend):
                for rope in self._check(spmd_backend):
                    self.assertIsInstance(rope.cache, DTensor)
                    self.assertTrue(
                        all(p.is_replicate() for p in rope.cache.placements)
                    )


def _dense_mesh(parallel_dims: ParallelDims):
    if get_spmd_backend() != "spmd_types":
        return contextlib.nullcontext()
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh

    return set_current_spmd_mesh(parallel_dims.spmd_dense_mesh())


class TestOneTrillionParameters(unittest.TestCase):
    """The shape of a 1T model: 74 layers, 65,536 positions, head size 128, float32."""

    def _bytes(self, ropes: list[RoPE]) -> int:
        return sum(_storages(ropes).values())

    def test_bytes_on_cpu(self):
        # Without sharing: measured at 64 positions, of which each takes as much.
        short = CosSinRoPE.Config(dim=128, max_seq_len=64)
        unshared = self._bytes([short.build() for _ in range(74)])
        self.assertEqual(unshared * (65_536 // 64), 4_966_055_936)

        rope = CosSinRoPE.Config(dim=128, max_seq_len=65_536)
        model = _init(_build_on_meta(rope=rope, num_layers=74))
        self.assertEqual(len(_ropes(model)), 74)
        self.assertEqual(self._bytes(_ropes(model)), 67_108_864)


if __name__ == "__main__":
    unittest.main()
