# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""How FSDP shards experts that are fewer than its ranks, and what is refused.

Placements are those of fake process groups and models on the meta device: 768 ranks need no process. Values,
gradients and checkpoints are those of three ranks, which are threads.
"""

import contextlib
import copy
import math
import re
import tempfile
import unittest
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule
from torch.distributed.tensor import distribute_tensor, Replicate, Shard
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.qwen3 import _build_qwen3_moe_layers
from torchtitan.models.qwen3.model import Qwen3Model


def build_model(*, num_experts: int, dim: int, hidden: int) -> Qwen3Model:
    config = Qwen3Model.Config(
        vocab_size=64,
        dim=dim,
        norm=RMSNorm.Config(normalized_shape=dim),
        tok_embeddings=Embedding.Config(num_embeddings=64, embedding_dim=dim),
        lm_head=Linear.Config(in_features=dim, out_features=64),
        layers=_build_qwen3_moe_layers(
            n_layers=1,
            dim=dim,
            n_heads=4,
            n_kv_heads=2,
            head_dim=16,
            moe_hidden_dim=hidden,
            num_experts=num_experts,
            top_k=2,
            attn_backend="flex",
            moe_comm_backend="standard",
            rope=CosSinRoPE.Config(dim=16, max_seq_len=16, theta=1e4),
        ),
    )
    with torch.device("meta"):
        return config.build()


@contextlib.contextmanager
def fake_process_group(world_size: int):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def expert_placements(model: Qwen3Model):
    experts = model.layers["0"].moe.routed_experts.inner_experts
    return {name: param.placements for name, param in experts.named_parameters()}


class TestExpertShards(unittest.TestCase):
    def apply(self, model: Qwen3Model, *, ep: int = 1, **sizes: int):
        """Shard as for ``ep``, over axes of the given sizes; return FSDP's placements."""
        world_size = math.prod(sizes.values())
        with fake_process_group(world_size):
            dp_mesh = init_device_mesh(
                "cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)
            )
            *replicas, shards = sizes.values()
            sparse_mesh = init_device_mesh(
                "cpu",
                (*replicas, shards // ep, ep),
                mesh_dim_names=(*list(sizes)[:-1], "efsdp", "ep"),
            )
            apply_fsdp_to_decoder(
                model,
                dp_mesh,
                edp_mesh=sparse_mesh[sparse_mesh.mesh_dim_names[:-1]],
                ep_degree=ep,
                param_dtype=torch.float32,
                reduce_dtype=torch.float32,
                pp_enabled=False,
            )
        return expert_placements(model)

    def assert_all(self, placements, expected):
        self.assertEqual(placements, dict.fromkeys(placements, expected))

    def assert_refused(self, message: str, *args, **kwargs):
        with self.assertRaisesRegex(ValueError, re.escape(message)):
            self.apply(*args, **kwargs)

    def test_768_ranks_at_ep_4(self):
        # 192 shards do not divide the 1792 rows of w1 and w3. They divide their 6144
        # columns, and the 6144 rows of w2.
        placements = self.apply(
            build_model(num_experts=384, dim=6144, hidden=1792), fsdp=768, ep=4
        )
        self.assertEqual(
            placements,
            {"w1_EFD": (Shard(2),), "w2_EDF": (Shard(1),), "w3_EFD": (Shard(2),)},
        )

    def test_a_dim_for_each_parameter_without_ep(self):
        placements = self.apply(build_model(num_experts=4, dim=16, hidden=20), fsdp=8)
        self.assertEqual(
            placements,
            {"w1_EFD": (Shard(2),), "w2_EDF": (Shard(1),), "w3_EFD": (Shard(2),)},
        )
        placements = self.apply(build_model(num_experts=4, dim=20, hidden=16), fsdp=8)
        self.assertEqual(
            placements,
            {"w1_EFD": (Shard(1),), "w2_EDF": (Shard(2),), "w3_EFD": (Shard(1),)},
        )

    def test_replicas_do_not_count_as_shards(self):
        # 4 x 48 ranks, and 64 experts: enough for the 48 shards.
        placements = self.apply(
            build_model(num_experts=64, dim=20, hidden=28), dp_replicate=4, fsdp=48
        )
        self.assert_all(placements, (Replicate(), Shard(0)))
        # As many experts as shards, and one less.
        sizes = {"dim": 16, "hidden": 24}
        placements = self.apply(
            build_model(num_experts=4, **sizes), dp_replicate=2, fsdp=4
        )
        self.assert_all(placements, (Replicate(), Shard(0)))
        placements = self.apply(
            build_model(num_experts=3, **sizes), dp_replicate=2, fsdp=4
        )
        self.assert_all(placements, (Replicate(), Shard(1)))
        # With EP, only efsdp shards each expert.
        placements = self.apply(
            build_model(num_experts=4, **sizes), dp_replicate=2, fsdp=4, ep=2
        )
        self.assert_all(placements, (Replicate(), Shard(0)))

    def test_tensor_and_context_parallel_ranks_do_not_count_as_shards(self):
        # One mesh has all axes, and FSDP is told which of them shard.
        world_size = 2 * 2 * 2 * 2
        with fake_process_group(world_size):
            mesh = init_device_mesh(
                "cpu",
                (2, 2, 2, 2),
                mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"),
            )
            model = build_model(num_experts=4, dim=16, hidden=24)
            for module in model.modules():
                for name, param in list(module.named_parameters(recurse=False)):
                    param = distribute_tensor(param, mesh, [Replicate()] * 4)
                    module.register_parameter(name, torch.nn.Parameter(param))
            apply_fsdp_to_decoder(
                model,
                mesh,
                dp_mesh_dims=DataParallelMeshDims(
                    shard=("dp_shard", "cp"), replicate="dp_replicate"
                ),
                param_dtype=torch.float32,
                reduce_dtype=torch.float32,
                pp_enabled=False,
            )
        for placements in expert_placements(model).values():
            self.assertFalse([p for p in placements if p.is_shard() and p.dim != 0])

    def test_what_is_said_to_fit_does(self):
        # 12 shards divide none of 40 and 28, 4 divide both.
        sizes = {"num_experts": 4, "dim": 28, "hidden": 40}
        self.assert_refused(
            "24 ranks (efsdp 12 x ep 2) are more than the 4 experts, so FSDP shards each "
            "expert, but efsdp 12 divides no size of an expert of w1_EFD (40, 28), "
            "w2_EDF (28, 40), w3_EFD (40, 28). What fits: 3 times the "
            "data_parallel_replicate_degree",
            build_model(**sizes),
            fsdp=24,
            ep=2,
        )
        placements = self.apply(build_model(**sizes), dp_replicate=3, fsdp=8, ep=2)
        self.assertIn(Shard(1), placements["w1_EFD"])

        # 16 shards divide none of 40 and 24, 8 divide both.
        sizes = {"num_experts": 4, "dim": 24, "hidden": 40}
        self.assert_refused(
            "2 times the data_parallel_replicate_degree, or expert_parallel_degree 4",
            build_model(**sizes),
            fsdp=32,
            ep=2,
        )
        placements = self.apply(build_model(**sizes), fsdp=32, ep=4)
        self.assertIn(Shard(1), placements["w1_EFD"])

        # 8 shards divide none of 5 and 7. So no expert can be cut: replicas until four
        # experts are enough, or EP.
        sizes = {"num_experts": 4, "dim": 28, "hidden": 20}
        self.assert_refused(
            "8 ranks (fsdp 8 x ep 1) are more than the 4 experts, so FSDP shards each "
            "expert, but fsdp 8 divides no size of an expert of w1_EFD (20, 28), "
            "w2_EDF (28, 20), w3_EFD (20, 28). What fits: 2 times the "
            "data_parallel_replicate_degree, or expert_parallel_degree 2 or 4",
            build_model(**sizes),
            fsdp=8,
        )
        placements = self.apply(build_model(**sizes), dp_replicate=2, fsdp=4)
        self.assert_all(placements, (Replicate(), Shard(0)))
        for ep in (2, 4):
            self.apply(build_model(**sizes), fsdp=8, ep=ep)

    def test_even_shards_are_left_alone(self):
        placements = self.apply(build_model(num_experts=4, dim=16, hidden=24), fsdp=8)
        self.assert_all(placements, (Shard(1),))

    def test_whole_experts_may_be_uneven(self):
        placements = self.apply(build_model(num_experts=5, dim=16, hidden=7), fsdp=4)
        self.assert_all(placements, (Shard(0),))


class Block(torch.nn.Module):
    """A transformer block of experts alone, each of which gets the same number of tokens."""

    moe_enabled = True

    def __init__(self, config: GroupedExperts.Config):
        super().__init__()
        self.experts = config.build()
        for param in self.experts.parameters():
            torch.nn.init.normal_(param, std=0.1)
        self.moe = SimpleNamespace(
            routed_experts=SimpleNamespace(inner_experts=self.experts)
        )

    def forward(self, x):
        num_experts = self.experts.num_experts
        num_tokens = torch.full((num_experts,), x.shape[0] // num_experts)
        return self.experts(x, num_tokens)


class ExpertsOnly(torch.nn.Module):
    enable_weight_tying = False
    tok_embeddings = norm = lm_head = None

    def __init__(self, config: GroupedExperts.Config):
        super().__init__()
        self.layers = torch.nn.ModuleDict({"0": Block(config)})

    def forward(self, x):
        return self.layers["0"](x)


class TestExpertsOfOtherDims(MultiThreadedTestCase):
    """Three shards divide the 24 columns of w1 and w3 and not their 16 rows."""

    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_train_and_save_as_without_sharding(self):
        plain = ExpertsOnly(
            GroupedExperts.Config(dim=24, hidden_dim=16, num_experts=2)
        )
        # The ranks are threads, which share the default generator.
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in plain.parameters():
                param.copy_(0.1 * torch.randn(param.shape, generator=generator))
        model = copy.deepcopy(plain)
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
        apply_fsdp_to_decoder(
            model,
            mesh,
            param_dtype=torch.float32,
            reduce_dtype=torch.float32,
            pp_enabled=False,
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):  # not every backend has PREMUL_SUM
                module.set_force_sum_reduction_for_comms(True)
        params = dict(model.named_parameters())
        self.assertEqual(
            {name.split(".")[-1]: param.placements for name, param in params.items()},
            {"w1_EFD": (Shard(2),), "w2_EDF": (Shard(1),), "w3_EFD": (Shard(2),)},
        )

        inputs = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(1))
        output = model(inputs[self.rank])
        self.assertTrue(torch.equal(output, plain(inputs[self.rank])))
        output.square().sum().backward()
        for x in inputs:
            plain(x).square().sum().backward()
        for name, param in plain.named_parameters():
            gradient = params[name].grad.full_tensor()
            torch.testing.assert_close(gradient, param.grad, rtol=1e-5, atol=1e-6)

        folder = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder)
        with torch.no_grad():
            for param in params.values():
                param.mul_(2)
        dcp.save(model.state_dict(), checkpoint_id=folder[0])
        loaded = {n: torch.empty_like(p) for n, p in plain.state_dict().items()}
        dcp.load(loaded, checkpoint_id=folder[0])
        for name, param in plain.state_dict().items():
            self.assertTrue(torch.equal(loaded[name], 2 * param), name)


if __name__ == "__main__":
    unittest.main()
