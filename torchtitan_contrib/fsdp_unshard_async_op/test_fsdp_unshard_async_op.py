# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""parallelism.fsdp_unshard_async_op: all-gathers allocated in the compute stream."""

import ast
import contextlib
import os
import sys
import typing
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn as nn
import torchtitan
import tyro
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.testing._internal.common_distributed import MultiProcContinuousTest

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import fsdp
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3 import _build_llama3_layers
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.qwen3 import _build_qwen3_moe_layers
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.trainer import Trainer

VOCAB, DIM, SEQ_LEN, NUM_LAYERS = 20, 16, 8, 3


def _root_configs() -> dict:
    init = {"weight": partial(nn.init.normal_, std=0.1), "bias": nn.init.zeros_}
    return dict(
        dim=DIM,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=DIM, param_init=init
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init={"weight": nn.init.ones_}),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=init),
    )


def _build_dense(enable_weight_tying: bool = False) -> Decoder:
    layers = _build_llama3_layers(
        n_layers=NUM_LAYERS,
        dim=DIM,
        n_heads=2,
        hidden_dim=2 * DIM,
        rope=ComplexRoPE.Config(dim=DIM // 2, max_seq_len=SEQ_LEN, theta=10000),
        attn_backend="flex",
    )
    for layer in layers:
        # The masked backends have no backward on a CPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = Llama3Model.Config(
        **_root_configs(), layers=layers, enable_weight_tying=enable_weight_tying
    ).build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def _build_moe() -> Decoder:
    layers = _build_qwen3_moe_layers(
        n_layers=NUM_LAYERS,
        dim=DIM,
        n_heads=2,
        n_kv_heads=2,
        head_dim=DIM // 2,
        moe_hidden_dim=DIM,
        num_experts=4,
        top_k=2,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=DIM // 2, max_seq_len=SEQ_LEN, theta=10000),
    )
    return Qwen3Model.Config(**_root_configs(), layers=layers).build()


class TestFsdpUnshardAsyncOpConfig(unittest.TestCase):
    def test_off_by_default(self):
        self.assertFalse(ParallelismConfig().fsdp_unshard_async_op)

    def test_not_on_the_command_line(self):
        hints = typing.get_type_hints(ParallelismConfig, include_extras=True)
        self.assertIn(tyro.conf.Suppress, hints["fsdp_unshard_async_op"].__metadata__)

    def test_both_names_of_the_method(self):
        """The private one where PyTorch has no other, the public one without a warning."""
        model = mock.Mock(spec=["_set_unshard_async_op"])
        fsdp.enable_fsdp_unshard_async_op(model)
        model._set_unshard_async_op.assert_called_once_with(True)
        model = mock.Mock(spec=["_set_unshard_async_op", "set_unshard_async_op"])
        fsdp.enable_fsdp_unshard_async_op(model)
        model.set_unshard_async_op.assert_called_once_with(True)
        model._set_unshard_async_op.assert_not_called()

    def test_symmetric_memory_is_refused(self):
        with self.assertRaisesRegex(
            ValueError, "memory pool of their own: set one of the two"
        ):
            ParallelismConfig(fsdp_unshard_async_op=True, enable_fsdp_symm_mem=True)

    def test_cuda_graphs_are_refused(self):
        parallelism = ParallelismConfig(fsdp_unshard_async_op=True)
        with self.assertRaisesRegex(ValueError, "untested with .*disable_cuda_graphs"):
            Trainer.Config(parallelism=parallelism)
        Trainer.Config(
            parallelism=parallelism,
            training=TrainingConfig(disable_cuda_graphs=True),
        )
        Trainer.Config()

    def test_every_model_family_passes_it_on(self):
        """Each call of a function that shards for training, in models and experiments."""
        root = Path(torchtitan.__file__).parent
        # Not rglob, which does not follow links to folders.
        paths = [
            Path(folder, "parallelize.py")
            for top in ("models", "experiments")
            for folder, _, files in os.walk(root / top, followlinks=True)
            if "parallelize.py" in files
        ]
        passed = {}
        for path in paths:
            text = path.read_text()
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(
                    "apply_fsdp"
                ):
                    name = ast.unparse(node.func)
                    if (
                        name != "apply_fsdp_to_vision_encoder"
                    ):  # then the decoder's covers it
                        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                        family = path.parent.relative_to(root).as_posix()
                        passed[family] = keywords.get("unshard_async_op")
        # Its order is not a decoder's, so it enables the option after apply_fsdp.
        self.assertIsNone(passed.pop("models/flux"))
        self.assertGreaterEqual(len(passed), 8)
        for family, value in passed.items():
            self.assertEqual(value, "parallelism.fsdp_unshard_async_op", family)

    def test_flux_gives_the_order_of_its_forward(self):
        # transformers is not needed to shard.
        with mock.patch.dict(sys.modules, {"transformers": mock.MagicMock()}):
            from torchtitan.models.flux import parallelize as flux
        model = mock.Mock(
            double_blocks=[mock.Mock(), mock.Mock()], single_blocks=[mock.Mock()]
        )
        order = [model.img_in, model.time_in, model.vector_in, model.txt_in]
        order += [*model.double_blocks, *model.single_blocks, model.final_layer]
        for enabled, calls in ((False, []), (True, [mock.call(model, order)])):
            with (
                mock.patch.object(flux, "apply_fsdp"),
                mock.patch.object(flux, "enable_fsdp_unshard_async_op") as enable,
            ):
                flux.parallelize_flux(
                    model,
                    parallel_dims=mock.Mock(cp_enabled=False),
                    training=TrainingConfig(),
                    parallelism=ParallelismConfig(
                        spmd_backend="partial_dtensor", fsdp_unshard_async_op=enabled
                    ),
                    compile_config=CompileConfig(),
                    ac_config=None,
                    dump_folder="",
                )
            self.assertEqual(enable.mock_calls, calls)


@dataclass
class AllGathers:
    """Modules in the order in which FSDP gathers them, and whether it did so async."""

    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    async_ops: set[bool] = field(default_factory=set)
    in_backward: bool = False

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        all_gather = _fsdp_param_group.foreach_all_gather

        def record_all_gather(fsdp_params, group, async_op, *args):
            names = [param._param_fqn for param in fsdp_params]
            (self.backward if self.in_backward else self.forward).append(names[0])
            self.async_ops.add(async_op)
            return all_gather(fsdp_params, group, async_op, *args)

        with mock.patch.object(
            _fsdp_param_group, "foreach_all_gather", record_all_gather
        ):
            yield


class GlooTestBase(MultiProcContinuousTest):
    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def _shard(
        self,
        model: Decoder,
        unshard_async_op: bool,
        *,
        dp_mesh: DeviceMesh | None = None,
        param_dtype: torch.dtype = torch.bfloat16,
        pp_enabled: bool = False,
        **kwargs,
    ) -> Decoder:
        if dp_mesh is None:
            dp_mesh = init_device_mesh(
                "cpu", (self.world_size,), mesh_dim_names=("fsdp",)
            )
        # Pinned memory needs an accelerator.
        unpinned = mock.patch.object(
            fsdp, "CPUOffloadPolicy", partial(CPUOffloadPolicy, pin_memory=False)
        )
        with unpinned, warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*_set_unshard_async_op.*")
            fsdp.apply_fsdp_to_decoder(
                model,
                dp_mesh,
                param_dtype=param_dtype,
                reduce_dtype=torch.float32,
                pp_enabled=pp_enabled,
                unshard_async_op=unshard_async_op,
                **kwargs,
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # gloo has no PREMUL_SUM, which a divide factor is passed on as.
                module.set_force_sum_reduction_for_comms(True)
        return model

    def _train(
        self, parts: list[nn.Module], *, steps: int, microbatches: int
    ) -> tuple[list[float], AllGathers]:
        """Train and return each step's loss, and the all-gathers of the last microbatch."""
        params = [p for part in parts for p in part.parameters()]
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        generator = torch.Generator().manual_seed(self.rank)
        losses = []
        for _ in range(steps):
            total = 0.0
            for _ in range(microbatches):
                all_gathers = AllGathers()
                with all_gathers.record():
                    tokens = torch.randint(VOCAB, (2, SEQ_LEN), generator=generator)
                    h = tokens
                    for part in parts:
                        h = part(h)
                    loss = nn.functional.cross_entropy(
                        h.flatten(0, 1).float(), tokens.flatten()
                    )
                    all_gathers.in_backward = True
                    loss.backward()
                total += loss.item()
            losses.append(total)
            optimizer.step()
            optimizer.zero_grad()
        return losses, all_gathers

    def _check(
        self,
        build: Callable[[], list[Decoder]] = lambda: [_build_dense()],
        *,
        steps: int = 3,
        microbatches: int = 1,
        **kwargs,
    ) -> tuple[AllGathers, AllGathers]:
        """Compare with the option off, bit by bit; return the all-gathers on and off."""
        parts = [self._shard(part, True, **kwargs) for part in build()]
        reference = [self._shard(part, False, **kwargs) for part in build()]
        losses, on = self._train(parts, steps=steps, microbatches=microbatches)
        expected_losses, off = self._train(
            reference, steps=steps, microbatches=microbatches
        )

        self.assertEqual(losses, expected_losses, rtol=0, atol=0)
        for part, expected_part in zip(parts, reference, strict=True):
            for (name, param), expected in zip(
                part.named_parameters(), expected_part.parameters(), strict=True
            ):
                self.assertTrue(
                    torch.equal(param.to_local(), expected.to_local()), msg=name
                )
        self.assertLessEqual(on.async_ops, {True})
        self.assertLessEqual(off.async_ops, {False})
        self.assertEqual(sorted(on.forward), sorted(off.forward))
        self.assertEqual(on.backward, off.backward)
        return on, off


class TestFsdpUnshardAsyncOp(GlooTestBase):
    world_size = 2

    def test_ten_steps(self):
        on, _ = self._check(steps=10)
        self.assertEqual(on.async_ops, {True})

    def test_each_module_prefetches_the_next(self):
        model = self._shard(_build_dense(), True)
        all_gathers = AllGathers()
        launched = {}
        chain = [model.tok_embeddings, *model.layers.values(), model.norm]
        for module in chain:
            module.register_forward_pre_hook(
                lambda module, _: launched.update({module: len(all_gathers.forward)})
            )
        with all_gathers.record():
            model(torch.zeros(1, SEQ_LEN, dtype=torch.long))
        # The root has no parameters of its own. When a module starts, it and the next
        # one are launched, and no more.
        self.assertEqual(len(all_gathers.forward), len(chain))
        expected = [min(i + 2, len(chain)) for i in range(len(chain))]
        self.assertEqual([launched[module] for module in chain], expected)

    def test_no_explicit_prefetch_without_the_option(self):
        model = self._shard(_build_dense(), False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self.assertEqual(
                    module._get_fsdp_state()._states_to_forward_prefetch, []
                )

    def test_implicit_backward_prefetch_is_kept(self):
        model = self._shard(_build_dense(), True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self.assertEqual(
                    module._get_fsdp_state()._states_to_backward_prefetch, []
                )

    def test_expert_parallel_prefetch_is_kept(self):
        # Both directions are explicit; the dense blocks have no use for the EP mesh.
        on, off = self._check(ep_degree=2)
        self.assertEqual(on.forward, off.forward)

    def test_gradient_accumulation(self):
        self._check(microbatches=2)

    def test_always_reshard(self):
        self._check(reshard_after_forward_policy="always")

    def test_never_reshard(self):
        self._check(reshard_after_forward_policy="never")

    def test_cpu_offload(self):
        self._check(cpu_offload=True)

    def test_full_activation_checkpointing(self):
        def build() -> list[Decoder]:
            model = _build_dense()
            FullAC.Config().build(dump_folder="").apply(model)
            return [model]

        self._check(build)

    def test_tied_weights(self):
        self._check(lambda: [_build_dense(enable_weight_tying=True)])

    def test_pipeline_stages(self):
        """Each stage is a root, and prefetches within itself."""

        def build() -> list[Decoder]:
            first, middle, last = _build_dense(), _build_dense(), _build_dense()
            first.norm = first.lm_head = None
            middle.tok_embeddings = middle.norm = middle.lm_head = None
            last.tok_embeddings = None
            return [first, middle, last]

        for policy in ("default", "always"):
            self._check(
                build,
                pp_enabled=True,
                reshard_after_forward_policy=policy,
                microbatches=2,
            )

    def test_every_group_of_every_module(self):
        def flags(model: nn.Module) -> list[bool]:
            return [
                group.unshard_async_op
                for module in model.modules()
                if isinstance(module, FSDPModule)
                for group in module._get_fsdp_state()._fsdp_param_groups
            ]

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        edp_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
        self.assertEqual(flags(self._shard(_build_dense(), False)), [False] * 6)
        # Embedding, layers, norm and head in one group found through either module.
        self.assertEqual(flags(self._shard(_build_dense(), True)), [True] * 6)
        self.assertEqual(flags(self._shard(_build_moe(), True)), [True] * 6)
        # Two groups a layer: routed experts have a mesh of their own.
        model = self._shard(_build_moe(), True, ep_degree=2, edp_mesh=edp_mesh["efsdp"])
        self.assertEqual(flags(model), [True] * 9)
        # A vision encoder is sharded before the decoder.
        model = _build_dense()
        model.vision_encoder = nn.Linear(DIM, DIM)
        fsdp.apply_fsdp_to_vision_encoder(
            model.vision_encoder, mesh, torch.bfloat16, torch.float32
        )
        self.assertEqual(flags(self._shard(model, True)), [True] * 7)

    def test_given_order(self):
        """What Flux does, whose blocks are not a decoder's."""
        model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
        for module in (*model, model):
            fsdp.fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        fsdp.enable_fsdp_unshard_async_op(model, list(model))
        prefetched = [m._get_fsdp_state()._states_to_forward_prefetch for m in model]
        states = [m._get_fsdp_state() for m in model]
        self.assertEqual(prefetched, [[states[1]], [states[2]], []])


class TestFsdpUnshardAsyncOpHSDP(GlooTestBase):
    world_size = 4

    def test_hsdp(self):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
        self._check(dp_mesh=mesh)


if __name__ == "__main__":
    unittest.main()
