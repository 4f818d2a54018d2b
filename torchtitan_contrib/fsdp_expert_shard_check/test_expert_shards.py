# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""Experts that FSDP cannot shard are refused at start-up, with what fits.

Process groups are fake and models on the meta device: 768 ranks need no process.
"""

import math
import re
import unittest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
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


class TestExpertShards(unittest.TestCase):
    def apply(self, model: Qwen3Model, *, ep: int = 1, **sizes: int):
        """Shard over axes of the given sizes, experts over ``ep`` ranks as well."""
        world_size = math.prod(sizes.values())
        dist.init_process_group(
            "fake", store=FakeStore(), rank=0, world_size=world_size
        )
        try:
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
        finally:
            dist.destroy_process_group()
        return model.layers["0"].moe.routed_experts.inner_experts.w1_EFD.placements

    def assert_refused(self, message: str, *args, **kwargs):
        with self.assertRaisesRegex(ValueError, re.escape(message)):
            self.apply(*args, **kwargs)

    def test_768_ranks_at_ep_4(self):
        # 192 shards divide the 6144 rows of w2 and not the 1792 of w1 and w3.
        self.assert_refused(
            "768 ranks (efsdp 192 x ep 4) are more than the 384 experts, so FSDP shards "
            "dim 1 of each expert, but efsdp 192 does not divide that of w1_EFD (1792), "
            "w3_EFD (1792). What fits: 2 times the data_parallel_replicate_degree, or "
            "expert_parallel_degree 3 or 6 or 12 or 24 or 48 or 96 or 192 or 384",
            build_model(num_experts=384, dim=6144, hidden=1792),
            fsdp=768,
            ep=4,
        )

    def test_what_is_said_to_fit_does(self):
        # Dims 1 are 40 and 24, which 12 shards do not divide, and 4 do.
        sizes = {"num_experts": 4, "dim": 24, "hidden": 40}
        self.assert_refused(
            "What fits: 3 times the data_parallel_replicate_degree",
            build_model(**sizes),
            fsdp=24,
            ep=2,
        )
        placements = self.apply(build_model(**sizes), dp_replicate=3, fsdp=8, ep=2)
        self.assertIn(Shard(1), placements)

        # 40 and 32 at 32 ranks: 16 shards do not divide, 8 do.
        sizes = {"num_experts": 4, "dim": 32, "hidden": 40}
        self.assert_refused(
            "2 times the data_parallel_replicate_degree, or expert_parallel_degree 4",
            build_model(**sizes),
            fsdp=32,
            ep=2,
        )
        placements = self.apply(build_model(**sizes), fsdp=32, ep=4)
        self.assertIn(Shard(1), placements)

    def test_no_ep(self):
        self.assert_refused(
            "8 ranks (fsdp 8 x ep 1) are more than the 4 experts, so FSDP shards dim 1 of "
            "each expert, but fsdp 8 does not divide that of w1_EFD (20), w3_EFD (20). "
            "What fits: 2 times the data_parallel_replicate_degree, or "
            "expert_parallel_degree 2 or 4",
            build_model(num_experts=4, dim=16, hidden=20),
            fsdp=8,
        )

    def test_replicas_do_not_count_as_shards(self):
        placements = self.apply(
            build_model(num_experts=4, dim=16, hidden=20),
            dp_replicate=2,
            fsdp=4,
        )
        self.assertIn(Shard(1), placements)

    def test_even_shards_are_left_alone(self):
        placements = self.apply(build_model(num_experts=4, dim=16, hidden=24), fsdp=8)
        self.assertEqual(placements, (Shard(1),))

    def test_whole_experts_may_be_uneven(self):
        placements = self.apply(build_model(num_experts=5, dim=16, hidden=7), fsdp=4)
        self.assertEqual(placements, (Shard(0),))


if __name__ == "__main__":
    unittest.main()
