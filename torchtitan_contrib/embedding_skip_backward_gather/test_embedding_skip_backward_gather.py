# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""FSDP does not gather the token embedding for a backward that does not read it."""

import contextlib
import dataclasses
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import distribute_tensor, DTensor, Shard
from torch.testing._internal.common_distributed import MultiProcContinuousTest

from torchtitan.distributed import fsdp
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.deepseek_v3.mtp import (
    apply_fsdp_to_mtp_decoder,
    MTPDecoder,
    MTPTransformerBlock,
)
from torchtitan.models.llama3 import _build_llama3_layers
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.muse_glimmer.model import EmbeddingWithNorm
from torchtitan.protocols.sharding import ShardingConfig

VOCAB, DIM, SEQ_LEN = 20, 16, 8


def _build_config(**kwargs) -> Llama3Model.Config:
    init = {"weight": partial(nn.init.normal_, std=0.1), "bias": nn.init.zeros_}
    layers = _build_llama3_layers(
        n_layers=3,
        dim=DIM,
        n_heads=2,
        hidden_dim=2 * DIM,
        rope=ComplexRoPE.Config(dim=DIM // 2, max_seq_len=SEQ_LEN, theta=10000),
        attn_backend="flex",
    )
    for layer in layers:
        # The masked backends have no backward on a CPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=DIM, param_init=init
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init={"weight": nn.init.ones_}),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=init),
        layers=layers,
        **kwargs,
    )


def _build_mtp_config() -> MTPDecoder.Config:
    config = _build_config()
    *layers, last = config.layers

    def norm() -> RMSNorm.Config:
        return RMSNorm.Config(
            normalized_shape=DIM, param_init={"weight": nn.init.ones_}
        )

    mtp_layer = MTPTransformerBlock.Config(
        attention=last.attention,
        attention_norm=last.attention_norm,
        feed_forward=last.feed_forward,
        ffn_norm=last.ffn_norm,
        enorm=norm(),
        hnorm=norm(),
        mtp_norm=norm(),
        eh_proj=Linear.Config(
            in_features=2 * DIM,
            out_features=DIM,
            param_init={"weight": partial(nn.init.normal_, std=0.1)},
        ),
    )
    values = {
        f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init
    }
    names = {f.name for f in dataclasses.fields(MTPDecoder.Config)}
    values = {name: value for name, value in values.items() if name in names}
    return MTPDecoder.Config(**{**values, "layers": layers, "mtp_layers": [mtp_layer]})


def _build(config: Decoder.Config) -> Decoder:
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


class LowRankEmbedding(Embedding):
    """A frozen table with a trainable low-rank addition, whose backward reads ``up``."""

    def __init__(self, config: Embedding.Config) -> None:
        super().__init__(config)
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.ones(config.num_embeddings, 2))
        self.up = nn.Parameter(torch.ones(2, config.embedding_dim))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.down[input] @ self.up


class ScaledEmbedding(Embedding):
    """A lookup whose backward reads the table, with no parameter beside it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.weight.norm()


HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


def scale_output(module: nn.Module, _args: object, output: torch.Tensor):
    """A forward hook whose backward reads the weight."""
    return output * module.weight.norm()


class Doubling(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class TestBackwardNeedsEmbeddingWeight(unittest.TestCase):
    def _check(self, expected: bool, model: Decoder) -> None:
        self.assertEqual(fsdp.backward_needs_embedding_weight(model), expected)

    def test_plain_embedding(self):
        self._check(False, _build(_build_config()))

    def test_frozen_embedding(self):
        model = _build(_build_config())
        model.tok_embeddings.requires_grad_(False)
        self._check(False, model)

    def test_frozen_embedding_with_low_rank_addition(self):
        model = _build(_build_config())
        model.tok_embeddings = LowRankEmbedding(model.config.tok_embeddings)
        self._check(True, model)

    def test_frozen_original_of_parametrization(self):
        model = _build(_build_config())
        nn.utils.parametrize.register_parametrization(
            model.tok_embeddings, "weight", Doubling()
        )
        model.tok_embeddings.requires_grad_(False)
        self._check(True, model)

    def test_forward_that_uses_the_weight(self):
        model = _build(_build_config())
        model.tok_embeddings = ScaledEmbedding(model.config.tok_embeddings)
        self._check(True, model)

    def test_subclass_with_the_same_forward(self):
        class Subclass(Embedding):
            pass

        model = _build(_build_config())
        model.tok_embeddings = Subclass(model.config.tok_embeddings)
        self._check(True, model)

    def test_forward_of_the_instance(self):
        model = _build(_build_config())
        lookup = model.tok_embeddings.forward
        model.tok_embeddings.forward = lambda x: lookup(x)
        self._check(True, model)

    def test_forward_that_parallelize_wraps(self):
        for replaced in (False, True):
            model = _build(_build_config())
            embedding = model.tok_embeddings
            embedding._sharding_config = ShardingConfig()
            if replaced:
                lookup = embedding.forward
                embedding.forward = lambda x, lookup=lookup: lookup(x)
            dims = mock.Mock(spmd_backend="partial_dtensor")
            dims.get_optional_mesh.return_value = None
            with mock.patch.object(embedding, "_distribute_states"):
                embedding.parallelize(dims)
            self.assertIn("forward", vars(embedding))
            self._check(replaced, model)

    def test_hooks(self):
        for name in HOOKS:
            model = _build(_build_config())
            getattr(model.tok_embeddings, name)(lambda *_: None)
            self._check(True, model)

    def test_global_hooks(self):
        for name in HOOKS:
            model = _build(_build_config())
            register = name.replace("register_", "register_module_")
            handle = getattr(nn.modules.module, register)(lambda *_: None)
            self._check(True, model)
            handle.remove()
            self._check(False, model)

    def test_tensor_subclass(self):
        class Subclass(torch.Tensor):
            pass

        model = _build(_build_config())
        weight = model.tok_embeddings.weight.detach().as_subclass(Subclass)
        model.tok_embeddings.weight = nn.Parameter(weight)
        self._check(True, model)

    def test_embedding_with_norm(self):
        model = _build(_build_config())
        model.tok_embeddings = EmbeddingWithNorm.Config(
            embedding=model.config.tok_embeddings, norm=model.config.norm
        ).build()
        self._check(True, model)

    def test_tied_weights(self):
        self._check(True, _build(_build_config(enable_weight_tying=True)))

    def test_weight_with_a_second_owner(self):
        model = _build(_build_config())
        model.lm_head.weight = model.tok_embeddings.weight
        self._check(True, model)

    def test_module_with_a_second_owner(self):
        model = _build(_build_config())
        model.layers["0"].tok_embeddings = model.tok_embeddings
        self._check(True, model)

    def test_mtp(self):
        self._check(True, _build(_build_mtp_config()))


@dataclass
class Collectives:
    """What FSDP communicated, and when: bytes of each all-gather's output."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    num_reduce_scatters: int = 0
    in_backward: bool = False

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        all_gather = _fsdp_param_group.foreach_all_gather
        reduce = _fsdp_param_group.foreach_reduce

        def record_all_gather(*args, **kwargs):
            result = all_gather(*args, **kwargs)
            output = result.all_gather_output
            phase = self.backward if self.in_backward else self.forward
            phase.append(output.numel() * output.element_size())
            return result

        def record_reduce(*args, **kwargs):
            self.num_reduce_scatters += 1
            return reduce(*args, **kwargs)

        with (
            mock.patch.object(
                _fsdp_param_group, "foreach_all_gather", record_all_gather
            ),
            mock.patch.object(_fsdp_param_group, "foreach_reduce", record_reduce),
        ):
            yield


class GlooTestBase(MultiProcContinuousTest):
    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def _shard(
        self,
        model: Decoder,
        *,
        dp_mesh: DeviceMesh | None = None,
        apply: Callable = fsdp.apply_fsdp_to_decoder,
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
        with unpinned:
            apply(
                model,
                dp_mesh,
                param_dtype=param_dtype,
                reduce_dtype=torch.float32,
                pp_enabled=pp_enabled,
                **kwargs,
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # gloo has no PREMUL_SUM, which a divide factor is passed on as.
                module.set_force_sum_reduction_for_comms(True)
        return model

    def _train(
        self, model: Decoder, *, steps: int = 1, microbatches: int = 1
    ) -> tuple[list[float], Collectives]:
        """Train and return each step's loss, and the collectives of the last step."""
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-2
        )
        generator = torch.Generator().manual_seed(self.rank)
        losses = []
        for _ in range(steps):
            collectives = Collectives()
            total = 0.0
            with collectives.record():
                for _ in range(microbatches):
                    tokens = torch.randint(VOCAB, (2, SEQ_LEN), generator=generator)
                    collectives.in_backward = False
                    outputs = model(tokens)
                    outputs = outputs if isinstance(outputs, list) else [outputs]
                    loss = sum(
                        nn.functional.cross_entropy(
                            o.flatten(0, 1).float(), tokens.flatten()
                        )
                        for o in outputs
                    )
                    collectives.in_backward = True
                    loss.backward()
                    total += loss.item()
            losses.append(total)
            optimizer.step()
            optimizer.zero_grad()
        return losses, collectives

    def _check_one_fewer(
        self,
        build: Callable[[], Decoder],
        *,
        steps: int = 3,
        microbatches: int = 1,
        num_embedding_rows: int = VOCAB,
        **kwargs,
    ) -> None:
        """One all-gather fewer a backward, and not one bit of difference otherwise."""
        model = self._shard(build(), **kwargs)
        reference = self._shard(build(), **kwargs)
        reference.tok_embeddings.set_unshard_in_backward(True)

        losses, collectives = self._train(model, steps=steps, microbatches=microbatches)
        expected_losses, expected = self._train(
            reference, steps=steps, microbatches=microbatches
        )

        self.assertEqual(
            len(collectives.backward), len(expected.backward) - microbatches
        )
        # What is not received: the whole table in the dtype of the computation. A
        # vocabulary of 256,000 and a dim of 6,144 in bfloat16 are 3.15 GB.
        self.assertEqual(
            sum(expected.backward) - sum(collectives.backward),
            microbatches * num_embedding_rows * DIM * 2,
        )
        self.assertEqual(collectives.forward, expected.forward)
        self.assertEqual(collectives.num_reduce_scatters, expected.num_reduce_scatters)
        self._check_equal(model, reference, losses, expected_losses)

    def _check_unchanged(self, build: Callable[[], Decoder], **kwargs) -> None:
        model = self._shard(build(), **kwargs)
        reference = self._shard(build(), **kwargs)
        for module in reference.modules():
            if isinstance(module, FSDPModule):
                module.set_unshard_in_backward(True)
        losses, collectives = self._train(model)
        expected_losses, expected = self._train(reference)
        self.assertEqual(collectives, expected)
        self._check_equal(model, reference, losses, expected_losses)

    def _check_equal(self, model, reference, losses, expected_losses) -> None:
        self.assertEqual(losses, expected_losses, rtol=0, atol=0)
        for (name, param), expected in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            self.assertTrue(
                torch.equal(param.to_local(), expected.to_local()), msg=name
            )


class TestEmbeddingSkipBackwardGather(GlooTestBase):
    world_size = 2

    def test_ten_steps(self):
        self._check_one_fewer(lambda: _build(_build_config()), steps=10)

    def test_explicit_prefetch(self):
        # Expert parallelism makes the first block prefetch the embedding in backward.
        self._check_one_fewer(lambda: _build(_build_config()), ep_degree=2)

    def test_gradient_accumulation(self):
        self._check_one_fewer(lambda: _build(_build_config()), microbatches=2)

    def test_cpu_offload(self):
        self._check_one_fewer(lambda: _build(_build_config()), cpu_offload=True)

    def test_always_reshard_with_pp(self):
        self._check_one_fewer(
            lambda: _build(_build_config()),
            pp_enabled=True,
            reshard_after_forward_policy="always",
        )

    def test_full_activation_checkpointing(self):
        def build() -> Decoder:
            model = _build(_build_config())
            FullAC.Config().build(dump_folder="").apply(model)
            return model

        self._check_one_fewer(build)

    def test_frozen_embedding(self):
        """Nothing waits for the gather of a frozen table: it was prefetched in vain."""

        def build() -> Decoder:
            model = _build(_build_config())
            model.tok_embeddings.requires_grad_(False)
            return model

        self._check_one_fewer(build)

    def test_low_rank_addition_is_unchanged(self):
        def build() -> Decoder:
            model = _build(_build_config())
            torch.manual_seed(1)
            model.tok_embeddings = LowRankEmbedding(model.config.tok_embeddings)
            return model

        self._check_unchanged(build)

    def test_forward_hook_is_unchanged(self):
        """Without the gather, backward reads freed memory."""

        def build() -> Decoder:
            model = _build(_build_config())
            model.tok_embeddings.register_forward_hook(scale_output)
            return model

        self._check_unchanged(build)

    def test_what_is_added_later(self):
        """Hooks and forwards after fully_shard, of which a forward is inside of FSDP's."""

        def prepend_hook(embedding: nn.Module) -> None:
            embedding.register_forward_hook(scale_output, prepend=True)

        def replace_forward(embedding: nn.Module) -> None:
            lookup = embedding.forward
            embedding.forward = lambda x: lookup(x) * embedding.weight.norm()

        for add in (prepend_hook, replace_forward):
            model = self._shard(_build(_build_config()))
            reference = self._shard(_build(_build_config()))
            reference.tok_embeddings.set_unshard_in_backward(True)
            _, collectives = self._train(model)
            _, expected = self._train(reference)
            self.assertEqual(len(collectives.backward), len(expected.backward) - 1)
            for each in (model, reference):
                add(each.tok_embeddings)
            losses, collectives = self._train(model, steps=2)
            expected_losses, expected = self._train(reference, steps=2)
            self.assertEqual(collectives, expected)
            self._check_equal(model, reference, losses, expected_losses)

    def test_hook_that_goes_away(self):
        """Two forwards before the backward of the first, which reads the weight."""
        model = self._shard(_build(_build_config()))
        hook = model.tok_embeddings.register_forward_hook(scale_output, prepend=True)
        tokens = torch.arange(SEQ_LEN)[None]
        first = model(tokens).sum()
        hook.remove()
        model(tokens).sum().backward()
        first.backward()
        for param in model.parameters():
            self.assertTrue(param.grad.to_local().isfinite().all())

    def test_tied_weights_are_unchanged(self):
        self._check_unchanged(
            lambda: _build(_build_config(enable_weight_tying=True)),
            reshard_after_forward_policy="always",
        )

    def test_mtp_is_unchanged(self):
        self._check_unchanged(
            lambda: _build(_build_mtp_config()), apply=apply_fsdp_to_mtp_decoder
        )

    def test_never_reshard_is_unchanged(self):
        self._check_unchanged(
            lambda: _build(_build_config()), reshard_after_forward_policy="never"
        )

    def test_default_reshard_with_pp_is_unchanged(self):
        self._check_unchanged(lambda: _build(_build_config()), pp_enabled=True)

    def test_stage_without_embedding(self):
        model = _build(_build_config())
        model.tok_embeddings = None
        self._shard(model)


class TestEmbeddingSkipBackwardGather2D(GlooTestBase):
    world_size = 4

    def test_hsdp(self):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
        self._check_one_fewer(lambda: _build(_build_config()), dp_mesh=mesh)

    def test_vocab_parallel(self):
        """A rank of two looks up its half of the vocabulary, and masks the rest."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))

        class SumOverTP(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                x = x.clone()
                torch.distributed.all_reduce(x, group=mesh["tp"].get_group())
                return x

            @staticmethod
            def backward(ctx, grad):
                return grad

        def build() -> Decoder:
            model = _build(_build_config())
            embedding = model.tok_embeddings
            embedding.weight = nn.Parameter(
                distribute_tensor(embedding.weight, mesh["tp"], [Shard(0)])
            )
            embedding.tp_group = mesh["tp"].get_group()
            # Not a hook of the embedding, which might read its weight.
            model.layers["0"].register_forward_pre_hook(
                lambda _module, args: (SumOverTP.apply(args[0]), *args[1:])
            )
            self.assertIsInstance(embedding.weight, DTensor)
            return model

        self._check_one_fewer(
            build, dp_mesh=mesh["fsdp"], num_embedding_rows=VOCAB // 2
        )


if __name__ == "__main__":
    unittest.main()
