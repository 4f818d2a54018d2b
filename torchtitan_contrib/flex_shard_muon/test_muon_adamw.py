# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

# Tables are as wide as they are logged.
# flake8: noqa: E501

"""Which parameters have Muon, and where they are computed, for every decoder.

Models are on the meta device and process groups are fake: no process is started.
"""

import copy
import dataclasses
import importlib
import inspect
import json
import re
import sys
import unittest
from typing import get_type_hints
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.components.optimizer import (
    default_adamw,
    muon,
    muon_adamw,
    ParamGroupConfig,
)
from torchtitan.components.optimizer.param_groups import format_param_groups
from torchtitan.distributed.flex_shard import BlockShard, dist_muon, Owned
from torchtitan.distributed.flex_shard.derive import (
    derive_bucket_configs,
    derive_compute_layouts,
    MUON_HYPERPARAMETERS,
)
from torchtitan.distributed.flex_shard.dist_muon import DistMuon
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.qwen3 import _build_qwen3_moe_layers
from torchtitan.protocols.model_spec import ModelSpec


def spec(family: str, flavor: str = "debugmodel", **kwargs) -> ModelSpec:
    module = importlib.import_module(f"torchtitan.models.{family}")
    return module.model_registry(flavor, **kwargs)


def whole_model(model_spec: ModelSpec) -> nn.Module:
    with torch.device("meta"):
        return model_spec.model.build()


def table(model_spec: ModelSpec, **kwargs) -> str:
    config = muon_adamw(model_spec, lr=1e-3, **kwargs)
    return format_param_groups(config, whole_model(model_spec))


def muon_names(model_spec: ModelSpec, **kwargs) -> list[str]:
    """Names with Muon in the first two layers' worth of the whole model."""
    config = muon_adamw(model_spec, lr=1e-3, **kwargs)
    names = [name for name, _ in whole_model(model_spec).named_parameters()]
    taken = []
    for group in config.param_groups:
        matched = [name for name in names if re.search(group.pattern, name)]
        names = [name for name in names if name not in matched]
        taken += matched if group.optimizer_name == "Muon" else []
    return taken


class TestMuonAdamW(TestCase):
    maxDiff = None

    def test_table_with_arguments_of_the_optimizer(self):
        # Such as another Newton-Schulz method: they do not change what is updated.
        config = muon_adamw(spec("llama3"), lr=1e-3)
        config.optimizer_factory_kwargs_by_name["Muon"]["newton_schulz"] = "gram"
        self.assertEqual(
            format_param_groups(config, whole_model(spec("llama3"))),
            table(spec("llama3")),
        )

    def test_tables(self):
        self.assertExpectedInline(
            table(spec("llama3")),
            """\
group  optimizer  parameters                                 shape       updated as  tensors   elements   share
0      Muon       layers.*.attention.qkv_linear.wqkv.weight  768 x 256   1 matrix          6  1,179,648  19.14%
0      Muon       layers.*.attention.wo.weight               256 x 256   1 matrix          6    393,216   6.38%
0      Muon       layers.*.feed_forward.w1.weight            768 x 256   1 matrix          6  1,179,648  19.14%
0      Muon       layers.*.feed_forward.w2.weight            256 x 768   1 matrix          6  1,179,648  19.14%
0      Muon       layers.*.feed_forward.w3.weight            768 x 256   1 matrix          6  1,179,648  19.14%
0      Muon       all                                                                     30  5,111,808  82.93%
1      AdamW      tok_embeddings.weight                      2048 x 256                    1    524,288   8.51%
1      AdamW      vectors                                                                 13      3,328   0.05%
1      AdamW      lm_head.weight                             2048 x 256                    1    524,288   8.51%
1      AdamW      all                                                                     15  1,051,904  17.07%""",
        )
        self.assertExpectedInline(
            table(spec("qwen3")),
            """\
group  optimizer  parameters                                 shape       updated as  tensors    elements   share
0      Muon       layers.*.attention.qkv_linear.wqkv.weight  4096 x 256  1 matrix          8   8,388,608  26.22%
0      Muon       layers.*.attention.wo.weight               256 x 2048  1 matrix          8   4,194,304  13.11%
0      Muon       layers.*.feed_forward.w1.weight            3072 x 256  1 matrix          8   6,291,456  19.67%
0      Muon       layers.*.feed_forward.w2.weight            256 x 3072  1 matrix          8   6,291,456  19.67%
0      Muon       layers.*.feed_forward.w3.weight            3072 x 256  1 matrix          8   6,291,456  19.67%
0      Muon       all                                                                     40  31,457,280  98.34%
1      AdamW      tok_embeddings.weight                      2048 x 256                    1     524,288   1.64%
1      AdamW      vectors                                                                 33       6,400   0.02%
1      AdamW      all                                                                     34     530,688   1.66%""",
        )
        self.assertExpectedInline(
            table(spec("qwen3", "debugmodel_moe")),
            """\
group  optimizer  parameters                                        shape           updated as   tensors     elements   share
0      Muon       layers.*.attention.qkv_linear.wqkv.weight         4096 x 256      1 matrix           8    8,388,608   2.66%
0      Muon       layers.*.attention.wo.weight                      256 x 2048      1 matrix           8    4,194,304   1.33%
0      Muon       layers.*.moe.routed_experts.inner_experts.w1_EFD  64 x 768 x 256  64 matrices        8  100,663,296  31.88%
0      Muon       layers.*.moe.routed_experts.inner_experts.w2_EDF  64 x 256 x 768  64 matrices        8  100,663,296  31.88%
0      Muon       layers.*.moe.routed_experts.inner_experts.w3_EFD  64 x 768 x 256  64 matrices        8  100,663,296  31.88%
0      Muon       all                                                                                 40  314,572,800  99.62%
1      AdamW      tok_embeddings.weight                             2048 x 256                         1      524,288   0.17%
1      AdamW      vectors                                                                             33        6,400   0.00%
1      AdamW      layers.*.moe.router.gate.weight                   64 x 256                           8      131,072   0.04%
1      AdamW      lm_head.weight                                    2048 x 256                         1      524,288   0.17%
1      AdamW      all                                                                                 43    1,186,048   0.38%""",
        )
        self.assertExpectedInline(
            table(spec("deepseek_v3"), per_head=True),
            """\
group  optimizer  parameters                                        shape          updated as             tensors    elements   share
0      Muon       layers.*.attention.wq.weight                      3072 x 256     16 blocks of 192 rows        6   4,718,592  14.29%
0      Muon       layers.*.attention.wkv_a.weight                   576 x 256      1 matrix                     6     884,736   2.68%
0      Muon       layers.*.attention.wkv_b.weight                   4096 x 512     16 blocks of 256 rows        6  12,582,912  38.11%
0      Muon       layers.*.attention.wo.weight                      256 x 2048     1 matrix                     6   3,145,728   9.53%
0      Muon       layers.*.feed_forward.w1.weight                   1024 x 256     1 matrix                     1     262,144   0.79%
0      Muon       layers.*.feed_forward.w2.weight                   256 x 1024     1 matrix                     1     262,144   0.79%
0      Muon       layers.*.feed_forward.w3.weight                   1024 x 256     1 matrix                     1     262,144   0.79%
0      Muon       layers.*.moe.routed_experts.inner_experts.w1_EFD  8 x 256 x 256  8 matrices                   5   2,621,440   7.94%
0      Muon       layers.*.moe.routed_experts.inner_experts.w2_EDF  8 x 256 x 256  8 matrices                   5   2,621,440   7.94%
0      Muon       layers.*.moe.routed_experts.inner_experts.w3_EFD  8 x 256 x 256  8 matrices                   5   2,621,440   7.94%
0      Muon       layers.*.moe.shared_experts.w1.weight             512 x 256      1 matrix                     5     655,360   1.99%
0      Muon       layers.*.moe.shared_experts.w2.weight             256 x 512      1 matrix                     5     655,360   1.99%
0      Muon       layers.*.moe.shared_experts.w3.weight             512 x 256      1 matrix                     5     655,360   1.99%
0      Muon       all                                                                                          57  31,948,800  96.77%
1      AdamW      tok_embeddings.weight                             2048 x 256                                  1     524,288   1.59%
1      AdamW      vectors                                                                                      19       6,400   0.02%
1      AdamW      layers.*.moe.router.gate.weight                   8 x 256                                     5      10,240   0.03%
1      AdamW      lm_head.weight                                    2048 x 256                                  1     524,288   1.59%
1      AdamW      all                                                                                          26   1,065,216   3.23%""",
        )
        self.assertExpectedInline(
            table(spec("gpt_oss", moe_comm_backend="standard")),
            """\
group  optimizer  parameters                                                 shape           updated as  tensors    elements   share
0      Muon       layers.*.attention.qkv_linear.wqkv.weight                  5120 x 256      1 matrix          4   5,242,880   6.43%
0      Muon       layers.*.attention.wo.weight                               256 x 4096      1 matrix          4   4,194,304   5.15%
0      Muon       layers.*.moe.routed_experts.inner_experts.mlp1_weight_EGD  8 x 5760 x 256  8 matrices        4  47,185,920  57.90%
0      Muon       layers.*.moe.routed_experts.inner_experts.mlp2_weight_EDF  8 x 256 x 2880  8 matrices        4  23,592,960  28.95%
0      Muon       all                                                                                         16  80,216,064  98.44%
1      AdamW      tok_embeddings.weight                                      2048 x 256                        1     524,288   0.64%
1      AdamW      vectors                                                                                     25      24,096   0.03%
1      AdamW      layers.*.moe.routed_experts.inner_experts.mlp1_bias_EG     8 x 5760                          4     184,320   0.23%
1      AdamW      layers.*.moe.routed_experts.inner_experts.mlp2_bias_ED     8 x 256                           4       8,192   0.01%
1      AdamW      layers.*.moe.router.gate.weight                            8 x 256                           4       8,192   0.01%
1      AdamW      lm_head.weight                                             2048 x 256                        1     524,288   0.64%
1      AdamW      all                                                                                         39   1,273,376   1.56%""",
        )

    def test_one_trillion(self):
        # 74 layers of qwen3's blocks with a shared expert and without query and key norms.
        model_spec = spec("qwen3", "debugmodel_moe")
        model_spec.model = dataclasses.replace(
            model_spec.model,
            dim=6144,
            vocab_size=256_000,
            tok_embeddings=dataclasses.replace(
                model_spec.model.tok_embeddings,
                num_embeddings=256_000,
                embedding_dim=6144,
            ),
            norm=dataclasses.replace(model_spec.model.norm, normalized_shape=6144),
            lm_head=dataclasses.replace(
                model_spec.model.lm_head, in_features=6144, out_features=256_000
            ),
            layers=_build_qwen3_moe_layers(
                n_layers=74,
                dim=6144,
                n_heads=48,
                n_kv_heads=16,
                head_dim=128,
                moe_hidden_dim=1792,
                num_experts=384,
                top_k=8,
                attn_backend="flex",
                moe_comm_backend="standard",
                rope=CosSinRoPE.Config(dim=128, max_seq_len=4096, theta=1e6),
            ),
        )
        init = {"weight": nn.init.zeros_}
        for layer in model_spec.model.layers:
            layer.attention.qk_norm = None
            layer.moe.shared_experts = make_ffn_config(
                dim=6144, hidden_dim=1792, w1_param_init=init, w2w3_param_init=init
            )
        self.assertExpectedInline(
            table(model_spec),
            """\
group  optimizer  parameters                                        shape              updated as    tensors         elements   share
0      Muon       layers.*.attention.qkv_linear.wqkv.weight         10240 x 6144       1 matrix           74    4,655,677,440   0.49%
0      Muon       layers.*.attention.wo.weight                      6144 x 6144        1 matrix           74    2,793,406,464   0.29%
0      Muon       layers.*.moe.routed_experts.inner_experts.w1_EFD  384 x 1792 x 6144  384 matrices       74  312,861,523,968  32.87%
0      Muon       layers.*.moe.routed_experts.inner_experts.w2_EDF  384 x 6144 x 1792  384 matrices       74  312,861,523,968  32.87%
0      Muon       layers.*.moe.routed_experts.inner_experts.w3_EFD  384 x 1792 x 6144  384 matrices       74  312,861,523,968  32.87%
0      Muon       layers.*.moe.shared_experts.w1.weight             1792 x 6144        1 matrix           74      814,743,552   0.09%
0      Muon       layers.*.moe.shared_experts.w2.weight             6144 x 1792        1 matrix           74      814,743,552   0.09%
0      Muon       layers.*.moe.shared_experts.w3.weight             1792 x 6144        1 matrix           74      814,743,552   0.09%
0      Muon       all                                                                                    592  948,477,886,464  99.65%
1      AdamW      tok_embeddings.weight                             256000 x 6144                          1    1,572,864,000   0.17%
1      AdamW      layers.*.moe.router.gate.weight                   384 x 6144                            74      174,587,904   0.02%
1      AdamW      vectors                                                                                149          915,456   0.00%
1      AdamW      lm_head.weight                                    256000 x 6144                          1    1,572,864,000   0.17%
1      AdamW      all                                                                                    225    3,321,231,360   0.35%""",
        )

    def test_roles_move_matrices(self):
        llama3 = spec("llama3")
        matrices = muon_names(llama3, exclude=())
        self.assertEqual(matrices[0], "tok_embeddings.weight")
        self.assertEqual(matrices[-1], "lm_head.weight")
        self.assertNotIn("router", str(matrices))  # absent, and no error to name it
        self.assertEqual(
            muon_names(llama3, exclude=("embedding", "head")), matrices[1:-1]
        )
        self.assertEqual(
            {
                name.split(".")[2]
                for name in muon_names(
                    llama3, exclude=("embedding", "head", "attention")
                )
            },
            {"feed_forward"},
        )

    def test_a_tied_weight_is_embedding_and_head(self):
        tied = spec("qwen3")
        self.assertTrue(tied.model.enable_weight_tying)
        for exclude in (("embedding",), ("head",)):
            self.assertNotIn("tok_embeddings.weight", muon_names(tied, exclude=exclude))
        self.assertIn("tok_embeddings.weight", muon_names(tied, exclude=("router",)))

    def test_biases_of_experts_are_not_matrices(self):
        names = muon_names(spec("gpt_oss", moe_comm_backend="standard"), exclude=())
        self.assertTrue(any("mlp1_weight_EGD" in name for name in names))
        self.assertFalse(any("bias" in name for name in names))

    def test_unknown_role(self):
        known = "embedding, router, experts, feed_forward, attention, other, head"
        with self.assertRaisesRegex(ValueError, rf"\['gate'\]; known: {known}"):
            muon_adamw(spec("llama3"), lr=1e-3, exclude=("router", "gate"))
        with self.assertRaisesRegex(ValueError, "collection of roles, got 'head'"):
            muon_adamw(spec("llama3"), lr=1e-3, exclude="head")

    def test_config_is_plain_data(self):
        config = muon_adamw(
            spec("deepseek_v3"),
            lr=1e-3,
            per_head=True,
            overrides_by_pattern={"wo": {"lr": 1}},
        )
        self.assertEqual(copy.deepcopy(config), config)
        as_dict = json.loads(json.dumps(config.to_dict()))
        self.assertEqual(as_dict, json.loads(json.dumps(dataclasses.asdict(config))))
        muon = as_dict["optimizer_factory_kwargs_by_name"]["Muon"]
        self.assertEqual(
            muon["block_rows_by_pattern"]["layers.*.attention.wkv_b.weight"], 256
        )

    def test_overrides_split_groups(self):
        config = muon_adamw(
            spec("llama3"),
            lr=1e-3,
            overrides_by_pattern={
                r"^layers\.0\.": {"lr": 5e-4},
                r"\.w2\.": {"weight_decay": 0.0},
            },
        )
        self.assertEqual(
            [
                (
                    g.optimizer_name,
                    g.optimizer_kwargs["lr"],
                    g.optimizer_kwargs["weight_decay"],
                )
                for g in config.param_groups
            ],
            [
                ("Muon", 5e-4, 0.1),
                ("AdamW", 5e-4, 0.1),
                ("Muon", 1e-3, 0.0),
                ("Muon", 1e-3, 0.1),
                ("AdamW", 1e-3, 0.1),
            ],
        )
        self.assertRegex(
            "layers.0.feed_forward.w2.weight", config.param_groups[0].pattern
        )
        self.assertNotRegex(
            "layers.1.feed_forward.w2.weight", config.param_groups[0].pattern
        )

    def test_dead_override(self):
        cases = {
            "layrs": "'layrs' matched no parameters. The model has: tok_embeddings",
            r"layers\.0\.": "matched no parameters that earlier patterns left",
        }
        for pattern, message in cases.items():
            with self.assertRaisesRegex(ValueError, re.escape(message)):
                muon_adamw(
                    spec("llama3"),
                    lr=1e-3,
                    overrides_by_pattern={"layers": {"lr": 1.0}, pattern: {"lr": 1.0}},
                )

    def test_unknown_argument(self):
        cases = (
            ({"momentun": 0.9}, "muon_adamw: Muon .*'momentun' here, did you mean 'mom"),
            ({"per_haed": True}, "'per_haed' here, did you mean 'per_head'"),
            ({"zzz": 1}, "Muon has no argument 'zzz' here; it has adjust_lr_fn, .*eps"),
            ({"adamw_kwargs": {"beta": 1}}, "AdamW .*'beta' here, did you mean 'betas'"),
            ({"adamw_kwargs": {"params": []}}, "adamw_kwargs: AdamW has no .*'params'"),
            (
                {"overrides_by_pattern": {"wo": {"betas": (0.9, 0.9)}}},
                "overrides_by_pattern: Muon has no argument 'betas' here; it has .*mom",
            ),
            (
                {"overrides_by_pattern": {"norm": {"momentum": 0.9}}},
                "overrides_by_pattern: AdamW has no argument 'momentum'",
            ),
            ({"bucket_configs": ()}, "derives bucket_configs from the model"),
            ({"compute_sharding_by_fqn": {}}, "derives compute_sharding_by_fqn"),
        )
        for kwargs, message in cases:
            with self.assertRaisesRegex(ValueError, message):
                muon_adamw(spec("llama3"), lr=1e-3, **kwargs)

    def test_wrong_type(self):
        for kwargs, message in (
            ({"lr": "1e-3"}, "Muon's lr must be float, got '1e-3'"),
            ({"momentum": True}, "Muon's momentum must be float, got True"),
            ({"ns_steps": 5.0}, "ns_steps must be int"),
            ({"nesterov": 1}, "nesterov must be bool"),
            ({"ns_coefficients": (1.0, 2.0)}, r"must be tuple\[float, float, float\]"),
            ({"adjust_lr_fn": 1}, r"must be str \| None"),
            ({"adamw_kwargs": {"betas": 0.9}}, "AdamW's betas must be tuple"),
            ({"overrides_by_pattern": {"wo": {"lr": None}}}, "lr must be float, got No"),
        ):
            with self.assertRaisesRegex(TypeError, message):
                muon_adamw(spec("llama3"), **{"lr": 1e-3, **kwargs})
        config = muon_adamw(
            spec("llama3"), lr=1, ns_coefficients=[2, -1.5, 0.5], adjust_lr_fn=None
        )
        self.assertEqual(config.param_groups[0].optimizer_kwargs["lr"], 1)

    def test_heads_that_differ_between_layers(self):
        model_spec = spec("llama3")
        first = model_spec.model.layers[0].attention
        first.n_heads, first.n_kv_heads = 8, 8
        first.qkv_linear = dataclasses.replace(
            first.qkv_linear, head_dim=32, n_heads=8, n_kv_heads=8
        )
        config = muon_adamw(model_spec, lr=1e-3, per_head=True)
        rows = config.optimizer_factory_kwargs_by_name["Muon"]["block_rows_by_pattern"]
        name = "layers.{}.attention.qkv_linear.wqkv.weight"
        self.assertEqual([rows[name.format(i)] for i in range(6)], [32] + [16] * 5)
        self.assertNotIn(name.format("*"), rows)


class TestJudgedOnTheWholeModel(TestCase):
    def test_dead_pattern_of_any_config(self):
        config = default_adamw()
        config.param_groups.insert(
            0, ParamGroupConfig(pattern="bias", optimizer_name="AdamW")
        )
        with self.assertRaisesRegex(ValueError, "'bias' matched no parameters"):
            config.judge(whole_model(spec("llama3")))

    def test_shadowed_pattern(self):
        config = default_adamw()
        config.param_groups *= 2
        with self.assertRaisesRegex(ValueError, "that earlier groups left"):
            config.judge(whole_model(spec("llama3")))

    def test_model_changed_after_its_optimizer_was_configured(self):
        model_spec = spec("llama3")
        config = muon_adamw(model_spec, lr=1e-3)
        model = whole_model(model_spec)
        for layer in model.layers.values():
            layer.feed_forward.w13 = layer.feed_forward.w1
            del layer.feed_forward.w1
        message = (
            r"layers\.\*\.feed_forward\.w1\.weight' matched.*was the model changed"
        )
        with self.assertRaisesRegex(ValueError, message):
            config.judge(model)

    def test_config_is_not_changed(self):
        config = muon_adamw(spec("llama3"), lr=1e-3)
        before = copy.deepcopy(config)
        config.judge(whole_model(spec("llama3")))
        self.assertEqual(config, before)


class FakeProcessGroupTestCase(TestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        dist.init_process_group(
            "fake", store=FakeStore(), rank=0, world_size=self.world_size
        )
        self.addCleanup(dist.destroy_process_group)

    def mesh(self, **sizes: int):
        names = tuple(sizes)
        return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=names)


class TestArgumentsOfMuon(FakeProcessGroupTestCase):
    def parts(self) -> list[nn.Module]:
        model = whole_model(spec("llama3"))
        fully_shard(model, mesh=self.mesh(dp_shard=4))
        return [model.to_empty(device="cpu")]

    def test_hyperparameters_are_what_a_group_of_muon_has(self):
        config = muon_adamw(spec("llama3"), lr=1e-3, momentum=0.5).judge(
            whole_model(spec("llama3"))
        )
        optimizer = config.build(model_parts=self.parts()).optimizers[0]
        self.assertEqual({*optimizer.defaults}, {*MUON_HYPERPARAMETERS})
        self.assertEqual(optimizer.param_groups[0]["momentum"], 0.5)

    def test_arguments_of_the_optimizer_are_not_in_its_groups(self):
        class WithOptions(DistMuon):
            def __init__(self, params, *, option: str = "a", **kwargs):
                self.option = option
                super().__init__(params, **kwargs)

            __init__.__annotations__ |= get_type_hints(DistMuon.__init__)

        signature = inspect.signature(DistMuon)
        parameter = inspect.Parameter("option", inspect.Parameter.KEYWORD_ONLY)
        parameters = {**signature.parameters, "option": parameter}
        WithOptions.__signature__ = signature.replace(parameters=[*parameters.values()])
        with (
            patch.object(muon, "DistMuon", WithOptions),
            patch.object(dist_muon, "DistMuon", WithOptions),
        ):
            config = muon_adamw(spec("llama3"), lr=1e-3, option="b")
            with self.assertRaisesRegex(ValueError, "did you mean 'option'"):
                muon_adamw(spec("llama3"), lr=1e-3, optoin="b")
            with self.assertRaisesRegex(ValueError, "no argument 'option'"):
                muon_adamw(
                    spec("llama3"),
                    lr=1e-3,
                    overrides_by_pattern={"wo": {"option": "b"}},
                )
            optimizer = config.build(model_parts=self.parts()).optimizers[0]
        self.assertEqual(optimizer.option, "b")
        plain = muon_adamw(spec("llama3"), lr=1e-3)
        expected = plain.build(model_parts=self.parts()).optimizers[0]
        self.assertEqual(
            [{*group} for group in optimizer.param_groups],
            [{*group} for group in expected.param_groups],
        )
        # By hand, they are refused where they would have no effect.
        plain.param_groups[0].optimizer_kwargs["momentun"] = 0.9
        with self.assertRaisesRegex(ValueError, "'momentun' is no hyper.*an 'momentum'"):
            plain.build(model_parts=self.parts())

    @unittest.skipUnless(
        {"momentum_dtype", "matrices_per_batch", "newton_schulz"}
        <= {*inspect.signature(DistMuon).parameters},
        "requires a DistMuon with these arguments",
    )
    def test_arguments_take_effect(self):
        model_spec = spec("llama3")
        arguments = {
            "host_offload": True,
            "momentum_dtype": "bfloat16",
            "update_split": "weight_on_host",
            "max_buffer_gib": 0.5,
            "matrices_per_batch": 3,
            "newton_schulz": "gram",
        }
        plain = muon_adamw(model_spec, lr=1e-3, implementation="for-loop")
        container = muon_adamw(
            model_spec, lr=1e-3, implementation="for-loop", **arguments
        ).build(model_parts=self.parts())
        optimizer = container.optimizers[0]
        state = container.state_dict()
        name = "layers.0.attention.wo.weight"
        self.assertEqual(state[f"state.{name}.momentum_buffer"].dtype, torch.bfloat16)
        self.assertEqual(optimizer.update_split, "weight_on_host")
        self.assertEqual(optimizer._matrices_per_batch, 3)
        self.assertEqual(optimizer._newton_schulz, "gram")
        # A checkpoint that was made without these arguments has what this one asks for.
        older = plain.build(model_parts=self.parts()).state_dict()
        self.assertEqual(set(state) - set(older), set(container.optional_keys))
        container.load_state_dict(older)
        for name, value, message in (
            ("momentum_dtype", torch.bfloat16, "momentum_dtype must be str, got torch."),
            ("matrices_per_batch", "8", "matrices_per_batch must be int, got '8'"),
            ("host_offload", "yes", "host_offload must be bool | None"),
        ):
            with self.assertRaisesRegex(TypeError, re.escape(message)):
                muon_adamw(model_spec, lr=1e-3, **{name: value})


class TestPipelineStages(FakeProcessGroupTestCase):
    def stage(self, model: nn.Module, keep: str) -> nn.Module:
        """A stage as the pipeline split leaves it: other modules are None or gone."""
        part = copy.deepcopy(model)
        for name in ("tok_embeddings", "norm", "lm_head"):
            if not re.search(keep, name):
                setattr(part, name, None)
        for index in list(part.layers):
            if not re.search(keep, f"layers.{index}"):
                del part.layers[index]
        fully_shard(part, mesh=self.mesh(dp_shard=4))
        return part.to_empty(device="cpu")

    def test_stages_without_a_match_build(self):
        model_spec = spec("llama3")
        model = whole_model(model_spec)
        config = muon_adamw(model_spec, lr=1e-3)
        judged = config.judge(model)
        stages = {
            "tok_embeddings": ["AdamW"],  # no matrix
            r"layers\.[0-2]": ["DistMuon", "AdamW"],
            r"layers\.[3-5]|norm|lm_head": ["DistMuon", "AdamW"],
        }
        names = set()
        for keep, optimizers in stages.items():
            container = judged.build(model_parts=[self.stage(model, keep)])
            self.assertEqual([type(o).__name__ for o in container], optimizers)
            names |= {
                n for o in container for g in o.param_groups for n in g["param_names"]
            }
        self.assertEqual(names, {name for name, _ in model.named_parameters()})

    def test_a_stage_without_adamw_parameters_builds(self):
        model_spec = spec("llama3")
        config = muon_adamw(model_spec, lr=1e-3, exclude=())
        model = whole_model(model_spec)
        head = self.stage(model, "lm_head")
        container = config.judge(model).build(model_parts=[head])
        self.assertEqual([type(o).__name__ for o in container], ["DistMuon"])

    def test_without_a_judgement_a_part_must_match(self):
        model_spec = spec("llama3")
        config = muon_adamw(model_spec, lr=1e-3)
        stage = self.stage(whole_model(model_spec), "tok_embeddings")
        with self.assertRaisesRegex(ValueError, "matched no parameters"):
            config.build(model_parts=[stage])

    def test_wrapped_layers_match(self):
        model_spec = spec("llama3")
        model = whole_model(model_spec)
        config = muon_adamw(model_spec, lr=1e-3)
        for index, layer in model.layers.items():
            model.layers[index] = checkpoint_wrapper(layer)
        fully_shard(model, mesh=self.mesh(dp_shard=4))
        container = config.build(model_parts=[model.to_empty(device="cpu")])
        muon = next(iter(container))
        self.assertEqual(len(muon.param_groups[0]["params"]), 30)
        self.assertIn(
            "layers.0.attention.wo.weight", muon.param_groups[0]["param_names"]
        )


class TestDerivedLayouts(FakeProcessGroupTestCase):
    world_size = 8

    def param(self, shape, mesh, placements) -> DTensor:
        return distribute_tensor(
            torch.zeros(shape), mesh, placements, src_data_rank=None
        )

    def test_axes_that_shard(self):
        hsdp = self.mesh(dp_replicate=2, dp_shard=4)
        sparse = self.mesh(dp_replicate=2, efsdp=2, ep=2)
        replicas = self.mesh(dp_replicate=8)
        params = {
            "matrix": self.param((8, 4), hsdp, [Replicate(), Shard(0)]),
            "heads": self.param((8, 4), hsdp, [Replicate(), Shard(0)]),
            "experts": self.param((8, 4, 4), sparse, [Replicate(), Shard(0), Shard(0)]),
            "whole": self.param((8, 4), replicas, [Replicate()]),
        }
        layouts = derive_compute_layouts(params, {"heads": 2})
        self.assertEqual(
            {
                name: dict(layout.shardings_by_mesh_axis)
                for name, layout in layouts.items()
            },
            {
                "matrix": {"dp_shard": Owned()},
                "heads": {"dp_shard": BlockShard(dim=0, block_size=2)},
                "experts": {"efsdp": Shard(0), "ep": Shard(0)},
                "whole": {"dp_replicate": Owned()},
            },
        )

    def test_buckets(self):
        dense = self.mesh(dp_shard=8)
        sparse = self.mesh(efsdp=4, ep=2)
        params = {"head": self.param((8, 4), dense, [Shard(0)])}
        for i in (0, 1, 2, 10):
            params[f"layers.{i}.wo"] = self.param((8, 4), dense, [Shard(0)])
        params["layers.1.local"] = self.param((8, 4, 4), sparse, [Shard(0), Shard(0)])
        params["layers.2.moving"] = self.param((2, 4, 4), sparse, [Shard(1), Shard(0)])
        params["mtp_layers.0.wo"] = self.param((8, 4), dense, [Shard(0)])
        self.assertEqual(
            [
                (bucket.name, bucket.patterns)
                for bucket in derive_bucket_configs(params)
            ],
            [
                ("layers.0", ("layers.0.wo",)),
                (
                    "layers.1-2 over dp_shard",
                    ("layers.1.wo", "layers.1.local", "layers.2.wo"),
                ),
                ("layers.1-2 over efsdp, ep", ("layers.2.moving",)),
                ("layers.10", ("layers.10.wo",)),
                ("mtp_layers.0", ("mtp_layers.0.wo",)),
                ("head", ("head",)),
            ],
        )

    def test_plain_tensors(self):
        model_spec = spec("llama3")
        config = muon_adamw(model_spec, lr=1e-3)
        with self.assertRaisesRegex(
            TypeError, "seed checkpoint.*can be made with AdamW"
        ):
            config.build(model_parts=[whole_model(model_spec)])


class TestEqualsKimiRecipe(FakeProcessGroupTestCase):
    def test_layouts_and_buckets(self):
        # The recipe's module also imports the image pipeline, which needs torchvision.
        images = "torchtitan.hf_datasets.multimodal"
        stubs = {
            f"{images}.{name}": MagicMock() for name in ("mm_datasets", "utils.image")
        }
        with patch.dict(sys.modules, stubs):
            registry = importlib.import_module(
                "torchtitan.models.kimi_k2_7.config_registry"
            )
        model_spec = registry.model_registry("debugmodel")
        recipe = registry._dist_muon_optimizer(model_spec, lr=8e-4)
        derived = muon_adamw(
            model_spec,
            lr=8e-4,
            exclude=("embedding", "head"),
            per_head=True,
            implementation="foreach",
        )
        self.assertEqual(
            [g.optimizer_kwargs for g in derived.param_groups],
            [
                {
                    **g.optimizer_kwargs,
                    **({"fused": False} if "foreach" in g.optimizer_kwargs else {}),
                }
                for g in recipe.param_groups
            ],
        )

        model = whole_model(model_spec)
        dense, sparse = self.mesh(dp_shard=4), self.mesh(efsdp=2, ep=2)
        layouts_of_recipe = recipe.optimizer_factory_kwargs_by_name["DistMuon"]
        for name, param in list(model.named_parameters()):
            experts = "routed_experts" in name
            mesh = sparse if experts else dense
            placements = [Shard(0)] * mesh.ndim
            owner, _, leaf = name.rpartition(".")
            local = torch.empty(param.shape, device="meta")
            sharded = distribute_tensor(local, mesh, placements, src_data_rank=None)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(sharded))
        params = {
            name: param
            for name, param in model.named_parameters()
            if re.search(derived.param_groups[0].pattern, name)
        }
        self.assertEqual(
            set(params),
            {
                n
                for n, _ in model.named_parameters()
                if re.search(recipe.param_groups[0].pattern, n)
            },
        )
        rows = derived.optimizer_factory_kwargs_by_name["Muon"]["block_rows_by_pattern"]
        layouts = derive_compute_layouts(params, rows)
        for name, param in params.items():
            expected = layouts_of_recipe["compute_sharding_by_fqn"][name]
            axes = param.device_mesh.mesh_dim_names
            self.assertEqual(
                dict(layouts[name].shardings_by_mesh_axis),
                {a: s for a, s in expected.shardings_by_mesh_axis.items() if a in axes},
                name,
            )
        self.assertEqual(len(params), len(layouts_of_recipe["compute_sharding_by_fqn"]))
        self.assertEqual(
            derive_bucket_configs(params), layouts_of_recipe["bucket_configs"]
        )


if __name__ == "__main__":
    unittest.main()
