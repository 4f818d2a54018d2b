# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""apply_router_scores() has the bits of the plain expression, however it is called."""

import itertools
import unittest
from collections.abc import Callable
from unittest import mock

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn as nn
from spmd_types.checker import typecheck
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import moe_scores, token_dispatcher
from torchtitan.models.common.config_utils import (
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe_scores import apply_router_scores


def plain(routed_output_ND: torch.Tensor, scores_N: torch.Tensor) -> torch.Tensor:
    """What the dispatchers computed before."""
    return (routed_output_ND.to(torch.float32) * scores_N.reshape(-1, 1)).to(
        routed_output_ND.dtype
    )


def make_inputs(
    num_rows: int,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    scores_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return routed outputs, scores and a gradient of the result."""
    generator = torch.Generator().manual_seed(num_rows * dim)
    routed_ND, grad_ND = (
        torch.randn(num_rows, dim, generator=generator).to(device, dtype) for _ in "ab"
    )
    scores_N = torch.rand(num_rows, generator=generator).to(device, scores_dtype)
    return routed_ND.requires_grad_(), scores_N.requires_grad_(), grad_ND


def run(
    function: Callable, routed_ND: torch.Tensor, scores_N: torch.Tensor, grad_ND
) -> list[torch.Tensor]:
    """Return the output and the gradients of both inputs."""
    out_ND = function(routed_ND, scores_N)
    return [out_ND, *torch.autograd.grad(out_ND, (routed_ND, scores_N), grad_ND)]


def chunks_of(num_rows: int, dim: int):
    return mock.patch.object(moe_scores, "CHUNK_NUMEL", num_rows * dim)


class TestApplyRouterScores(unittest.TestCase):
    def assert_same_bits(self, actual: list, expected: list) -> None:
        for name, x, y in zip(
            ("output", "gradient of the routed output", "gradient of the scores"),
            actual,
            expected,
            strict=True,
        ):
            self.assertEqual((x.dtype, x.shape), (y.dtype, y.shape), name)
            self.assertTrue(torch.equal(x, y), name)

    def test_bits(self):
        # Fewer rows than a chunk, as many, one more, a multiple, and a remainder; dims
        # that are no multiple of a vector register.
        dims = (1, 7, 100, 768)
        nums_rows = (0, 1, 3, 4, 5, 12, 50)
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        for dim, num_rows, dtype, scores_dtype, rows_per_chunk in itertools.product(
            dims, nums_rows, dtypes, (torch.float32, torch.bfloat16), (1, 4, 1000)
        ):
            with self.subTest(
                dim=dim, num_rows=num_rows, dtype=dtype, scores_dtype=scores_dtype
            ), chunks_of(rows_per_chunk, dim):
                inputs = make_inputs(num_rows, dim, dtype, scores_dtype)
                self.assert_same_bits(
                    run(apply_router_scores, *inputs), run(plain, *inputs)
                )

    def test_bits_where_threads_share_a_reduction(self):
        # More than at::internal::GRAIN_SIZE (32,768) elements a row and a chunk.
        for num_rows, dim in ((1, 70_000), (3, 70_000), (131, 6144)):
            with self.subTest(num_rows=num_rows, dim=dim), chunks_of(50, 6144):
                inputs = make_inputs(num_rows, dim)
                self.assert_same_bits(
                    run(apply_router_scores, *inputs), run(plain, *inputs)
                )

    def test_bits_of_values_that_float32_and_bfloat16_round(self):
        values = (0.0, -0.0, 1e-40, 3e38, -3e38, float("inf"), float("nan"), 1 / 3)
        pairs = list(itertools.product(values, values))
        routed_ND, scores_N = (torch.tensor(v) for v in zip(*pairs, strict=True))
        routed_ND = routed_ND.reshape(-1, 1).bfloat16().requires_grad_()
        scores_N.requires_grad_()
        grad_ND = routed_ND.detach().flip(0)
        with chunks_of(5, 1):
            actual = run(apply_router_scores, routed_ND, scores_N, grad_ND)
        expected = run(plain, routed_ND, scores_N, grad_ND)
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
            signs = ~x.isnan()
            self.assertTrue(torch.equal(x.signbit()[signs], y.signbit()[signs]))

    def test_strides(self):
        def strided(x_ND, how):
            num_rows, dim = x_ND.shape
            return {
                "columns": x_ND.repeat_interleave(2, 1)[:, ::2],
                "part of wider rows": torch.cat([x_ND, x_ND], 1)[:, :dim],
                "every other row": x_ND.repeat_interleave(2, 0)[::2],
                "one row, expanded": x_ND[:1].expand(num_rows, dim),
                "one value, expanded": x_ND[0, 0].expand(num_rows, dim),
                "column-major": x_ND.t().contiguous().t(),
            }[how]

        routed_ND, scores_N, grad_ND = make_inputs(50, 100)
        for how in (
            "columns",
            "part of wider rows",
            "every other row",
            "one row, expanded",
            "one value, expanded",
        ):
            with self.subTest(how), chunks_of(4, 100):
                for inputs in (
                    (strided(routed_ND, how), scores_N, grad_ND),
                    (routed_ND, scores_N, strided(grad_ND, how)),
                ):
                    self.assert_same_bits(
                        run(apply_router_scores, *inputs), run(plain, *inputs)
                    )

        # Scores that are no contiguous vector, as those of a column are not.
        scores_N = torch.rand(50, 3)[:, 1].requires_grad_()
        with chunks_of(4, 100):
            inputs = (routed_ND, scores_N, grad_ND)
            self.assert_same_bits(run(apply_router_scores, *inputs), run(plain, *inputs))

            # No dispatcher has a column-major gradient. A row's sum over it depends on
            # how many rows there are, so the last bits of the scores' gradient may differ.
            inputs = (routed_ND, scores_N, strided(grad_ND, "column-major"))
            *actual, actual_scores = run(apply_router_scores, *inputs)
            *expected, expected_scores = run(plain, *inputs)
        for x, y in zip(actual, expected, strict=True):
            self.assertTrue(torch.equal(x, y))
        torch.testing.assert_close(actual_scores, expected_scores)

    def test_chunks_cover_all_rows_and_are_nearly_equal(self):
        for num_rows, rows_per_chunk in itertools.product(range(40), range(1, 12)):
            with chunks_of(rows_per_chunk, 8):
                chunks = list(moe_scores._chunks_of_rows(torch.empty(num_rows, 8)))
            rows = [i for chunk in chunks for i in range(num_rows)[chunk]]
            self.assertEqual(rows, list(range(num_rows)))
            sizes = {chunk.stop - chunk.start for chunk in chunks}
            self.assertLessEqual(max(sizes, default=0), rows_per_chunk)
            self.assertLessEqual(max(sizes, default=0) - min(sizes, default=0), 1)

    def test_what_needs_no_gradient_gets_none_and_costs_nothing(self):
        for routed_needs_grad, scores_need_grad in ((True, False), (False, True)):
            inputs = make_inputs(5, 8)
            routed_ND = inputs[0].detach().requires_grad_(routed_needs_grad)
            scores_N = inputs[1].detach().requires_grad_(scores_need_grad)
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x: saved.append(x.shape) or x, lambda x: x
            ):
                out_ND = apply_router_scores(routed_ND, scores_N)
            out_ND.backward(inputs[2])
            expected = run(plain, *inputs)
            if routed_needs_grad:
                self.assertEqual(saved, [scores_N.shape])
                self.assertTrue(torch.equal(routed_ND.grad, expected[1]))
                self.assertIsNone(scores_N.grad)
            else:
                self.assertEqual(saved, [routed_ND.shape])
                self.assertTrue(torch.equal(scores_N.grad, expected[2]))
                self.assertIsNone(routed_ND.grad)

        with torch.no_grad():
            self.assertFalse(apply_router_scores(*make_inputs(5, 8)[:2]).requires_grad)

    def test_inputs_and_gradient_are_left_alone(self):
        # In float32 a cast is no copy.
        for dtype in (torch.bfloat16, torch.float32):
            inputs = make_inputs(5, 8, dtype)
            before = [x.detach().clone() for x in inputs]
            run(apply_router_scores, *inputs)
            for x, y in zip(inputs, before, strict=True):
                self.assertTrue(torch.equal(x, y))

    def test_a_change_in_place_before_backward_is_found(self):
        routed_ND, scores_N, grad_ND = make_inputs(5, 8)
        routed_ND = routed_ND * 1
        out_ND = apply_router_scores(routed_ND, scores_N)
        routed_ND.add_(1)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            out_ND.backward(grad_ND)

    def test_double_backward_is_refused(self):
        routed_ND, scores_N, _ = make_inputs(5, 8)
        out_ND = apply_router_scores(routed_ND, scores_N)
        (grad_ND,) = torch.autograd.grad(
            out_ND.float().square().sum(), routed_ND, create_graph=True
        )
        with self.assertRaisesRegex(RuntimeError, "once_differentiable"):
            grad_ND.sum().backward()

    def test_deterministic_algorithms(self):
        inputs = make_inputs(50, 100)
        expected = run(plain, *inputs)
        torch.use_deterministic_algorithms(True)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        with chunks_of(4, 100):
            self.assert_same_bits(run(apply_router_scores, *inputs), expected)

    def test_meta_and_fake_tensors(self):
        with chunks_of(4, 100):
            for context in (torch.device("meta"), FakeTensorMode()):
                with context:
                    routed_ND = torch.empty(50, 100, dtype=torch.bfloat16)
                    scores_N = torch.empty(50)
                    out_ND = apply_router_scores(
                        routed_ND.requires_grad_(), scores_N.requires_grad_()
                    )
                    out_ND.backward(torch.empty_like(out_ND))
                self.assertEqual(out_ND.dtype, torch.bfloat16)
                self.assertEqual(routed_ND.grad.shape, (50, 100))
                self.assertEqual(routed_ND.grad.dtype, torch.bfloat16)
                self.assertEqual(scores_N.grad.shape, (50,))
                self.assertEqual(scores_N.grad.dtype, torch.float32)

    def test_a_compiler_gets_the_plain_expression(self):
        inputs = make_inputs(50, 100)
        graphs = []

        def backend(graph_module, _example_inputs):
            graphs.append(graph_module)
            return graph_module

        compiled = torch.compile(apply_router_scores, backend=backend, fullgraph=True)
        with chunks_of(4, 100):
            self.assert_same_bits(run(compiled, *inputs), run(plain, *inputs))
        (graph_module,) = graphs
        calls = [n for n in graph_module.graph.nodes if n.op.startswith("call")]
        self.assertEqual(len(calls), 4)  # to, reshape, mul, to

    def test_non_strict_tracing_gets_the_plain_expression(self):
        routed_ND, scores_N, _ = make_inputs(50, 100)
        with chunks_of(4, 100), torch.compiler._non_strict_tracing_context():
            traced = make_fx(apply_router_scores)(routed_ND, scores_N)
        targets = [n.target for n in traced.graph.nodes if n.op == "call_function"]
        self.assertEqual(targets.count(torch.ops.aten.mul.Tensor), 1)
        self.assertNotIn(torch.ops.aten.mul.out, targets)

    def test_activation_checkpointing(self):
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w2 = nn.Linear(100, 100, bias=False)
                self.gate = nn.Linear(100, 1, bias=False)
                self.function = apply_router_scores

            def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
                return self.function(self.w2(x_ND), self.gate(x_ND).sigmoid()[:, 0])

        def gradients(model, function):
            model.zero_grad()
            for module in model.modules():
                if isinstance(module, Block):
                    module.function = function
            h_ND = x_ND
            for layer in model.layers.values():
                h_ND = layer(h_ND)
            h_ND.float().square().sum().backward()
            return [p.grad.clone() for p in model.parameters()]

        torch.manual_seed(0)
        x_ND = torch.randn(50, 100, dtype=torch.bfloat16)
        for policy in (FullAC, SelectiveAC):
            with self.subTest(policy.__name__), chunks_of(4, 100):
                model = nn.Module()
                model.layers = nn.ModuleDict({str(i): Block() for i in range(3)})
                model.bfloat16()
                expected = gradients(model, plain)
                policy(policy.Config()).apply(model)
                actual = gradients(model, apply_router_scores)
                for x, y in zip(actual, expected, strict=True):
                    self.assertTrue(torch.equal(x, y))

    def test_reentrant_checkpoint_and_saved_tensor_hooks(self):
        inputs = make_inputs(50, 100)
        expected = run(plain, *inputs)
        with chunks_of(4, 100):
            out_ND = checkpoint(apply_router_scores, *inputs[:2], use_reentrant=True)
            out_ND.backward(inputs[2])
            self.assert_same_bits([out_ND, *(x.grad for x in inputs[:2])], expected)
            with torch.autograd.graph.save_on_cpu():
                actual = run(apply_router_scores, *inputs)
            self.assert_same_bits(actual, expected)


class TestTypes(unittest.TestCase):
    def setUp(self):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def type_of(self, function, routed_type, scores_type):
        """Return the local type of the result, or the class of the error."""
        routed_ND, scores_N, _ = make_inputs(5, 8)
        axis = self.mesh.get_group("tp")
        with typecheck():
            spmd.assert_type(routed_ND, {axis: routed_type})
            spmd.assert_type(scores_N, {axis: scores_type})
            try:
                out_ND = function(routed_ND, scores_N)
            except spmd.SpmdTypeError as error:
                return type(error)
            return spmd.get_local_type(out_ND)

    def test_types_are_those_of_the_plain_expression(self):
        types = (spmd.R, spmd.I, spmd.V, spmd.P)
        results = set()
        for routed_type, scores_type in itertools.product(types, types):
            with self.subTest(routed=routed_type, scores=scores_type):
                expected = self.type_of(plain, routed_type, scores_type)
                actual = self.type_of(apply_router_scores, routed_type, scores_type)
                self.assertEqual(actual, expected)
                results.add(str(expected))
        self.assertGreater(len(results), 2)  # some fit and some do not


class TestMoELayer(unittest.TestCase):
    def test_bits_of_a_layer(self):
        dim, num_experts, top_k = 64, 4, 2
        init = {"weight": nn.init.xavier_normal_}
        torch.manual_seed(0)
        moe = make_moe_config(
            num_experts=num_experts,
            router=make_router_config(
                dim=dim, num_experts=num_experts, gate_param_init=init, top_k=top_k
            ),
            routed_experts=make_routed_experts_config(
                dim=dim,
                hidden_dim=32,
                num_experts=num_experts,
                top_k=top_k,
                param_init={},
                comm_backend="standard",
            ),
        ).build()
        with torch.no_grad():
            for param in moe.parameters():
                nn.init.normal_(param, std=0.1)
        moe.bfloat16()
        x_BLD = torch.randn(2, 25, dim).bfloat16().requires_grad_()

        def step():
            moe.zero_grad()
            x_BLD.grad = None
            out_BLD = moe(x_BLD)
            out_BLD.float().square().sum().backward()
            return [out_BLD, x_BLD.grad, *(p.grad for p in moe.parameters())]

        with chunks_of(7, dim):
            actual = step()
        with mock.patch.object(token_dispatcher, "apply_router_scores", plain):
            expected = step()
        for x, y in zip(actual, expected, strict=True):
            self.assertTrue(torch.equal(x, y))
            self.assertTrue(x.any())


@unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
class TestCUDA(unittest.TestCase):
    def test_bits(self):
        # dim 8,192 and more: CUDA may divide a row's sum between blocks, by the number
        # of rows.
        for num_rows, dim in ((0, 64), (1, 64), (10_001, 768), (6_000, 6144), (5_001, 8192)):
            with self.subTest(num_rows=num_rows, dim=dim):
                inputs = make_inputs(num_rows, dim, device="cuda")
                actual = run(apply_router_scores, *inputs)
                for x, y in zip(actual, run(plain, *inputs), strict=True):
                    self.assertTrue(torch.equal(x, y))

    def test_peak_memory(self):
        num_rows, dim = 65_536, 1024
        inputs = make_inputs(num_rows, dim, device="cuda")
        run(apply_router_scores, *inputs)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(apply_router_scores, *inputs)
        extra = torch.cuda.max_memory_allocated() - held
        # The output and the gradient in bfloat16; two chunks and vectors.
        nbytes = inputs[0].nbytes
        self.assertLess(extra, 2 * nbytes + 2 * 4 * moe_scores.CHUNK_NUMEL + 2**24)


if __name__ == "__main__":
    unittest.main()
