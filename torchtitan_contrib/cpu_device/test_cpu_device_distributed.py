# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""Training without an accelerator, over gloo: token dispatch, FSDP and set-up."""

import functools
import os
import unittest
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
)
from torchtitan.config import CommConfig
from torchtitan.distributed import fsdp, utils as dist_utils
from torchtitan.distributed.spmd_types import set_current_spmd_mesh, set_spmd_meshes
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
)

DIM = 8


def _make_tokens(rank: int, expert_ids: list[list[int]], num_experts: int):
    """Return what a rank gives to its dispatcher: ``x_TD``, ``topk_scores_TK``,
    ``topk_expert_ids_TK`` and ``num_local_tokens_per_expert_E``."""
    generator = torch.Generator().manual_seed(rank)
    num_tokens = len(expert_ids)
    x_TD = torch.randn(num_tokens, DIM, generator=generator).requires_grad_()
    scores_TK = torch.rand(num_tokens, 2, generator=generator).requires_grad_()
    expert_ids_TK = torch.tensor(expert_ids, dtype=torch.int64).reshape(num_tokens, 2)
    counts_E = torch.bincount(expert_ids_TK.view(-1), minlength=num_experts)
    return x_TD, scores_TK, expert_ids_TK, counts_E


def _run_experts(routed_RD, counts_e, scales_eD):
    """Expert ``e`` multiplies its tokens by ``scales_eD[e]``: element by element, so
    that a token's result does not depend on which others are in its batch."""
    return routed_RD * scales_eD.repeat_interleave(counts_e, dim=0)


class ToyDecoder(nn.Module):
    """The attributes that apply_fsdp_to_decoder reads, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.enable_weight_tying = False
        self.tok_embeddings = nn.Embedding(10, DIM)
        self.layers = nn.ModuleDict({str(i): nn.Linear(DIM, DIM) for i in range(2)})
        self.norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = h + layer(h).relu()
        return nn.functional.cross_entropy(
            self.lm_head(self.norm(h)), tokens.roll(1), reduction="sum"
        )


class TestTraining(MultiProcContinuousTest):
    """Token dispatch and FSDP on three gloo ranks."""

    world_size = 3
    # A rank that fails leaves the others waiting in a collective.
    timeout = timedelta(seconds=45)

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    def _check_dispatch(self, expert_ids_per_rank: list[list[list[int]]]):
        """Compare with one process that holds all experts; a rank has two."""
        num_experts = 2 * self.world_size
        scales_ED = torch.arange(1.0, 1.0 + num_experts * DIM).view(num_experts, DIM)

        # The reference: a rank is a batch.
        reference = LocalTokenDispatcher.Config(
            num_experts=num_experts, top_k=2
        ).build()
        expected_scales_ED = scales_ED.clone().requires_grad_()
        expected = []
        for rank, expert_ids in enumerate(expert_ids_per_rank):
            x_TD, scores_TK, ids_TK, counts_E = _make_tokens(
                rank, expert_ids, num_experts
            )
            routed_RD, counts, metadata = reference.dispatch(
                x_TD, scores_TK, ids_TK, counts_E
            )
            routed_RD = _run_experts(routed_RD, counts, expected_scales_ED)
            out_TD = reference.combine(routed_RD, metadata, x_TD)
            out_TD.square().sum().backward()
            expected.append((out_TD.detach(), x_TD.grad, scores_TK.grad))

        mesh = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("ep",))
        set_spmd_meshes(dense_mesh=mesh, sparse_mesh=mesh)
        dispatcher = AllToAllTokenDispatcher.Config(
            num_experts=num_experts, top_k=2
        ).build()
        dispatcher.wire_meshes(ep_mesh=mesh)
        local = slice(2 * self.rank, 2 * self.rank + 2)
        scales_eD = scales_ED[local].clone().requires_grad_()
        x_TD, scores_TK, ids_TK, counts_E = _make_tokens(
            self.rank, expert_ids_per_rank[self.rank], num_experts
        )
        self.assertEqual(dist_utils.get_spmd_backend(), "spmd_types")
        with set_current_spmd_mesh(mesh):
            routed_RD, counts, metadata = dispatcher.dispatch(
                x_TD, scores_TK, ids_TK, counts_E
            )
            routed_RD = _run_experts(routed_RD, counts, scales_eD)
            out_TD = dispatcher.combine(routed_RD, metadata, x_TD)
            out_TD.square().sum().backward()

        expected_out_TD, expected_x_grad, expected_scores_grad = expected[self.rank]
        self.assertTrue(torch.equal(out_TD, expected_out_TD))
        self.assertTrue(torch.equal(x_TD.grad, expected_x_grad))
        self.assertTrue(torch.equal(scores_TK.grad, expected_scores_grad))
        # Summed over the tokens of all ranks, in another order.
        torch.testing.assert_close(scales_eD.grad, expected_scales_ED.grad[local])

    def test_dispatch_with_uneven_splits(self):
        self._check_dispatch(
            [
                [[0, 1], [0, 2], [5, 4]],
                [[3, 0], [1, 2], [0, 1], [2, 5], [0, 4]],
                [[5, 4]],
            ]
        )

    def test_dispatch_with_rank_that_gets_no_token(self):
        # No token for experts 2 and 3, those of rank 1.
        self._check_dispatch([[[0, 4], [1, 5]], [[0, 1], [4, 5], [0, 5]], [[5, 0]]])

    def test_dispatch_with_rank_that_sends_no_token(self):
        self._check_dispatch([[[0, 4], [2, 5]], [], [[5, 0], [3, 2], [1, 4]]])

    def test_dispatch_with_rank_that_neither_gets_nor_sends(self):
        self._check_dispatch([[[0, 4], [1, 5]], [], [[5, 0]]])

    def test_dispatch_with_even_splits(self):
        self._check_dispatch([[[0, 2], [4, 1], [3, 5]]] * 3)

    def _check_gradients(self, **kwargs):
        """FSDP's gradients are the sum over ranks, undivided."""
        torch.manual_seed(0)
        reference = ToyDecoder()
        model = ToyDecoder()
        model.load_state_dict(reference.state_dict())
        # Whatever the device of the process: the mesh is of CPUs.
        fsdp.apply_fsdp_to_decoder(
            model,
            dp_mesh=init_device_mesh(
                "cpu", (self.world_size,), mesh_dim_names=("fsdp",)
            ),
            param_dtype=torch.float32,
            reduce_dtype=torch.float32,
            pp_enabled=False,
            **kwargs,
        )
        tokens = [torch.arange(5), torch.arange(3, 10), torch.arange(2)]
        model(tokens[self.rank]).backward()
        sum(reference(t) for t in tokens).backward()
        for (name, expected), param in zip(
            reference.named_parameters(), model.parameters(), strict=True
        ):
            torch.testing.assert_close(
                param.grad.full_tensor(), expected.grad, msg=name
            )
        return model

    def test_fsdp_gradients(self):
        self._check_gradients()

    def test_fsdp_gradients_with_cpu_offload(self):
        with mock.patch.object(torch.accelerator, "is_available", return_value=False):
            model = self._check_gradients(cpu_offload=True)
        for param in model.parameters():
            self.assertFalse(param.to_local().is_pinned())


class TestInitDistributed(MultiProcessTestCase):
    """init_distributed and set_pg_timeouts on real gloo groups."""

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _init(self, enable_cpu_backend: bool) -> None:
        # The launcher's part, through a file rather than a port.
        init_process_group = functools.partial(
            dist.init_process_group,
            store=dist.FileStore(f"{self.file_name}_{enable_cpu_backend}"),
            rank=self.rank,
            world_size=self.world_size,
        )
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(dist, "init_process_group", init_process_group),
            mock.patch.multiple(dist_utils, device_type="cpu", device_module=torch.cpu),
        ):
            world_size = dist_utils.init_distributed(
                CommConfig(trace_buf_size=0), enable_cpu_backend=enable_cpu_backend
            )
            self.assertEqual(world_size, self.world_size)
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
            parallel_dims = mock.Mock()
            parallel_dims.get_all_one_dimensional_meshes.return_value = {"fsdp": mesh}
            dist_utils.set_pg_timeouts(timedelta(seconds=77), parallel_dims)
        for group in (mesh.get_group(), dist.group.WORLD):
            backend = group._get_backend(torch.device("cpu"))
            self.assertEqual(backend.options._timeout, timedelta(seconds=77))
        total = torch.ones(1)
        dist.all_reduce(total)
        self.assertEqual(total.item(), self.world_size)
        dist.destroy_process_group()

    def test_init(self):
        self._init(enable_cpu_backend=False)
        self._init(enable_cpu_backend=True)  # as for CPU offload


if __name__ == "__main__":
    unittest.main()
