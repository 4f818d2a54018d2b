# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""DedupTokenDispatcher on gloo ranks against one process with all experts in float64."""

import unittest
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torchtitan.config.override import apply_overrides, OverrideConfig
from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend
from torchtitan.models.common.config_utils import make_routed_experts_config
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    TorchAOTokenDispatcher,
)
from torchtitan.overrides.dedup_dispatch import (
    dedup_dispatch,
    DedupTokenDispatcher,
    plan_receive,
    plan_send,
)

DIM = 20  # no width of ids and scores, 2 K, that are exchanged here


@st.composite
def routings(draw):
    """Return ids of each rank's tokens, and the numbers of ranks and of experts."""
    ep_size = draw(st.integers(1, 5))
    num_experts = ep_size * draw(st.integers(1, 4))
    top_k = draw(st.integers(1, num_experts))
    choice = st.permutations(range(num_experts)).map(lambda ids: ids[:top_k])
    ids = draw(
        st.lists(st.lists(choice, max_size=6), min_size=ep_size, max_size=ep_size)
    )
    return [torch.tensor(x).reshape(-1, top_k).long() for x in ids], num_experts


class TestPlans(unittest.TestCase):
    @settings(max_examples=200, deadline=None)
    @given(routings())
    def test_each_rank_gets_a_token_once_with_its_experts(self, routing):
        ids_per_rank, num_experts = routing
        ep_size = len(ids_per_rank)
        num_local = num_experts // ep_size
        plans = [plan_send(ids, num_experts, ep_size) for ids in ids_per_rank]
        for receiver in range(ep_size):
            rows, local_ids, slot_counts = [], [], 0
            for sender, (ids, plan) in enumerate(zip(ids_per_rank, plans, strict=True)):
                tokens = plan.is_sent_TP[:, receiver].nonzero()[:, 0].tolist()
                expected = [
                    t
                    for t, chosen in enumerate(ids.tolist())
                    if any(i // num_local == receiver for i in chosen)
                ]
                self.assertEqual(tokens, expected)
                counts = plan.counts_PC[receiver]
                self.assertEqual(counts[num_local], len(tokens))
                for e in range(num_local):
                    self.assertEqual(counts[e], (ids == receiver * num_local + e).sum())
                slot_counts = slot_counts + counts[num_local:]
                rows += [(sender, t) for t in tokens]
                local_ids.append(plan.local_expert_ids_TPK[tokens, receiver])
            slot_counts = slot_counts.tolist()
            local_ids_SK = torch.cat(local_ids)
            row_R, pair_R, groups = plan_receive(local_ids_SK, num_local, slot_counts)

            experts = local_ids_SK.view(-1)[pair_R]
            actual = [
                (e, rows[s])
                for e, s in zip(experts.tolist(), row_R.tolist(), strict=True)
            ]
            expected = sorted(
                (i % num_local, (sender, t))
                for sender, ids in enumerate(ids_per_rank)
                for t, chosen in enumerate(ids.tolist())
                for i in chosen
                if i // num_local == receiver
            )
            self.assertEqual(actual, expected)  # by expert, then by row

            # Each pair goes once into its own row, and a group has no row twice.
            self.assertEqual(sorted(groups.source_N.tolist()), list(range(len(row_R))))
            self.assertTrue(torch.equal(groups.index_N, row_R[groups.source_N]))
            self.assertEqual(sum(groups.sizes), len(row_R))
            for index, _ in groups.chunks():
                self.assertEqual(max(Counter(index.tolist()).values()), 1)


class TestOverride(unittest.TestCase):
    def test_it_replaces_the_standard_dispatcher_only(self):
        config = make_routed_experts_config(
            dim=8, hidden_dim=8, num_experts=4, top_k=2, param_init={}, comm_backend="standard"
        )
        target = "torchtitan.overrides.dedup_dispatch.dedup_dispatch"
        apply_overrides(OverrideConfig(imports=[target]), config)
        dispatcher = config.token_dispatcher
        self.assertIs(type(dispatcher), DedupTokenDispatcher.Config)
        self.assertEqual((dispatcher.num_experts, dispatcher.top_k), (4, 2))
        self.assertIs(dedup_dispatch(dispatcher), dispatcher)
        padded = TorchAOTokenDispatcher.Config(num_experts=4, top_k=2, pad_multiple=16)
        with self.assertRaisesRegex(ValueError, "got TorchAOTokenDispatcher.Config"):
            dedup_dispatch(padded)

    def test_without_expert_parallelism(self):
        x_TD, ids_TK = torch.randn(5, 4), torch.arange(10).view(5, 2) % 4
        scores_TK, counts_E = torch.rand(5, 2), torch.bincount(ids_TK.view(-1))
        results = []
        for cls in (AllToAllTokenDispatcher, DedupTokenDispatcher):
            dispatcher = cls.Config(num_experts=4, top_k=2).build()
            routed, _, metadata = dispatcher.dispatch(x_TD, scores_TK, ids_TK, counts_E)
            results.append(dispatcher.combine(routed, metadata, x_TD))
        self.assertTrue(torch.equal(*results))


class Wire(TorchDispatchMode):
    """Counts the rows of width DIM that leave this rank, call by call."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.rows = rank, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            x, _, input_splits = args[:3]
            if x.ndim == 2 and x.shape[1] == DIM and x.is_floating_point():
                self.rows.append(sum(input_splits) - input_splits[self.rank])
        return func(*args, **(kwargs or {}))


class TestExpertParallel(MultiProcContinuousTest):
    """Eight processes, in groups of 2, 4 or 8 EP ranks."""

    world_size = 8
    # A rank that fails leaves the others waiting in a collective.
    timeout = timedelta(seconds=240)

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    def use(self, ep_size: int) -> None:
        shape = (self.world_size // ep_size, ep_size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
        self.mesh, self.ep_size = mesh["ep"], ep_size
        self.ep_rank, self.group = mesh.get_local_rank("ep"), mesh.get_group("ep")

    def make(self, num_experts: int, top_k: int, cls=DedupTokenDispatcher):
        dispatcher = cls.Config(num_experts=num_experts, top_k=top_k).build()
        dispatcher.wire_meshes(ep_mesh=self.mesh)
        return dispatcher

    def route(self, num_tokens: int, num_experts: int, top_k: int, skew: float = 0.0):
        """Return this rank's ids; with ``skew`` the first experts are preferred."""
        generator = torch.Generator().manual_seed(self.rank)
        logits = torch.randn(num_tokens, num_experts, generator=generator)
        return (logits - skew * torch.arange(num_experts)).topk(top_k).indices

    def step(self, dispatcher, ids_TK, weight_ED, dtype, recompute=False):
        """Return output, gradients of tokens, scores and experts; one layer's step.

        Expert e is ``tanh(x) * weight_ED[e]``: not linear in x, cheap, exact enough.
        """
        ep_size = self.ep_size if dispatcher is not None else 1
        generator = torch.Generator().manual_seed(100 + self.rank)
        T, K = ids_TK.shape
        x_TD = torch.randn(T, DIM, generator=generator).bfloat16().to(dtype)
        scores_TK = torch.rand(T, K, generator=generator)
        grad_TD = torch.randn(T, DIM, generator=generator).bfloat16().to(dtype)
        x_TD.requires_grad_()
        num_experts = len(weight_ED)
        e = num_experts // ep_size
        first = e * self.ep_rank if dispatcher is not None else 0
        if dispatcher is None:  # the definition
            scores_TK = scores_TK.to(dtype)
        scores_TK.requires_grad_()
        weight_eD = weight_ED[first : first + e].to(dtype).requires_grad_()
        self.counts = []

        def layer(x_TD, scores_TK):
            if dispatcher is None:
                y_TKD = torch.tanh(x_TD)[:, None] * weight_eD[ids_TK]
                return (y_TKD * scores_TK[..., None]).sum(1)
            counts_E = torch.bincount(ids_TK.view(-1), minlength=num_experts)
            routed, counts_e, metadata = dispatcher.dispatch(
                x_TD, scores_TK, ids_TK, counts_E
            )
            self.counts.append(counts_e)
            expert_R = torch.arange(e).repeat_interleave(counts_e)
            routed = torch.tanh(routed) * weight_eD[expert_R]
            return dispatcher.combine(routed, metadata, x_TD)

        if recompute:
            out_TD = checkpoint(layer, x_TD, scores_TK, use_reentrant=False)
        else:
            out_TD = layer(x_TD, scores_TK)
        out_TD.backward(grad_TD)
        weight_grad = torch.zeros(num_experts, DIM, dtype=dtype)
        if weight_eD.grad is not None:
            weight_grad[first : first + e] = weight_eD.grad
        return [out_TD.detach(), x_TD.grad, scores_TK.grad, weight_grad]

    def check(self, ids_TK: torch.Tensor, num_experts: int, dtype=torch.float32):
        top_k = ids_TK.shape[1]
        generator = torch.Generator().manual_seed(7)
        weight_ED = torch.randn(num_experts, DIM, generator=generator).bfloat16()
        dispatcher = self.make(num_experts, top_k)
        with Wire(self.ep_rank) as wire:
            actual = self.step(dispatcher, ids_TK, weight_ED, dtype)
        (counts_e,) = self.counts
        expected = self.step(None, ids_TK, weight_ED, torch.float64)
        for x in (actual[3], expected[3]):
            dist.all_reduce(x, group=self.group)
        tolerance = 3e-5 if dtype == torch.float32 else 4e-2
        for x, y in zip(actual, expected, strict=True):
            bound = tolerance * max(1.0, y.abs().max().item() if y.numel() else 0.0)
            torch.testing.assert_close(x.double(), y, rtol=0, atol=bound)

        # A row for each other rank that has experts of the token: forward there, forward
        # back, backward there, backward back.
        ranks_TK = ids_TK // (num_experts // self.ep_size)
        to_TP = torch.zeros(len(ids_TK), self.ep_size, dtype=torch.int64)
        to_TP.scatter_(1, ranks_TK, 1)
        to_P = to_TP.sum(0)
        from_P = torch.empty_like(to_P)
        dist.all_to_all_single(from_P, to_P, group=self.group)
        sent = (to_P.sum() - to_P[self.ep_rank]).item()
        received = (from_P.sum() - from_P[self.ep_rank]).item()
        self.assertEqual(wire.rows, [sent, received, sent, received])
        # What load balancing and grouped matrix products count is unchanged.
        counts_E = torch.bincount(ids_TK.reshape(-1), minlength=num_experts)
        dist.all_reduce(counts_E, group=self.group)
        self.assertEqual(counts_e.tolist(), counts_E.view(self.ep_size, -1)[self.ep_rank].tolist())
        return sent

    def test_balanced_skewed_and_empty(self):
        for P in (2, 4, 8):
            self.use(P)
            self.check(self.route(40, 4 * P, 4), 4 * P)
            self.check(self.route(40, 4 * P, 4, skew=1.0), 4 * P)
            self.check(self.route(40, 4 * P, 1), 4 * P)  # top-1
            self.check(self.route(9, P, P), P)  # all experts, one a rank
            self.check(self.route(17 * (self.rank % 2), 4 * P, 3), 4 * P)  # empty ranks
            self.check(self.route(0, 4 * P, 3), 4 * P)  # no tokens at all
            one_rank = torch.tensor([[5, 4, 7]]).expand(11, 3).contiguous()
            self.check(one_rank, 4 * P)  # all tokens to rank 1
            self.check(self.route(40, 4 * P, 4), 4 * P, torch.bfloat16)

    def test_recomputed_and_repeated_steps_are_bitwise_equal(self):
        self.use(4)
        ids_TK = self.route(40, 16, 4, skew=0.2)
        weight_ED = torch.randn(16, DIM, generator=torch.Generator().manual_seed(7))
        dispatcher = self.make(16, 4)
        for recompute in (False, False, True):
            step = self.step(dispatcher, ids_TK, weight_ED, torch.bfloat16, recompute)
            if not recompute:
                first = step
            for x, y in zip(first, step, strict=True):
                self.assertTrue(torch.equal(x, y))
        self.assertEqual(len(self.counts), 2)  # it was recomputed

    def test_rows_a_token_of_top_8(self):
        self.use(4)
        num_tokens, weight_ED = 1000, torch.ones(64, DIM)
        ids_TK = self.route(num_tokens, 64, 8)
        # 3 (1 - C(48, 8) / C(64, 8)) with distinct experts
        self.assertAlmostEqual(self.check(ids_TK, 64) / num_tokens, 2.74, delta=0.1)

        # The standard dispatcher, whose all-to-all gloo has without spmd_types only.
        backend = get_spmd_backend()
        set_spmd_backend("default")
        try:
            standard = self.make(64, 8, AllToAllTokenDispatcher)
            with Wire(self.ep_rank) as wire:
                expected = self.step(standard, ids_TK, weight_ED, torch.float32)
        finally:
            set_spmd_backend(backend)
        self.assertEqual(len(wire.rows), 4)
        self.assertAlmostEqual(wire.rows[0] / num_tokens, 8 * 3 / 4, delta=0.1)
        dispatcher = self.make(64, 8)
        actual = self.step(dispatcher, ids_TK, weight_ED, torch.float32)
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * y.abs().max().item())

    def test_what_is_refused(self):
        self.use(4)
        with self.assertRaisesRegex(ValueError, "got 9,"):
            self.make(9, 2)
        dispatcher, ids_TK = self.make(8, 2), self.route(3, 8, 2)
        x_TD, scores_TK = torch.randn(3, DIM), torch.rand(3, 2)

        @torch.compile(fullgraph=True, backend="eager")
        def layer(x_TD):
            return dispatcher.dispatch(x_TD, scores_TK, ids_TK, None)[0]

        with self.assertRaisesRegex(Exception, "DedupTokenDispatcher cannot be compiled"):
            layer(x_TD)


if __name__ == "__main__":
    unittest.main()
