# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""The methods of ``orthogonalize``, and the choice of one in DistMuon.

The reference is the polynomial of the plain loop, evaluated in float64.
"""

import importlib.machinery
import os
import subprocess
import sys
import types
import unittest
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.components.checkpoint_utils import (
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)
from torchtitan.distributed.flex_shard import (
    BucketConfig,
    build_dist_muon,
    ComputeLayout,
    newton_schulz,
)
from torchtitan.distributed.flex_shard.newton_schulz import orthogonalize

A, B, C = 3.4445, -4.7750, 2.0315
SETTINGS = {"ns_coefficients": (A, B, C), "ns_steps": 5, "eps": 1e-7}

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def polynomial(update: Tensor, ns_steps: int = 5) -> Tensor:
    """What every method approximates, in float64 and by singular values."""
    u, s, vh = torch.linalg.svd(update.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True).clamp_min(SETTINGS["eps"])
    for _ in range(ns_steps):
        s = A * s + B * s**3 + C * s**5
    return u * s.unsqueeze(-2) @ vh


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


def singular_values(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix.double())


def hard_cases() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    wide = randn(96, 320)
    u, s, vh = torch.linalg.svd(wide, full_matrices=False)
    spike = wide.clone()
    spike[0] *= 1e4
    low_rank = randn(96, 4) @ randn(4, 320)
    return {
        "wide": wide,
        "tall": randn(320, 96),
        "square": randn(128, 128),
        # Singular values from 1 to 1e-6: the Gram matrix has them squared.
        "decaying": u * torch.logspace(0, -6, 96) @ vh,
        # Zero eigenvalues, which rounding makes negative.
        "low_rank": low_rank,
        "low_rank_and_noise": low_rank + 1e-3 * wide,
        "one_large_row": spike,
        "large_entries": 1e15 * wide,
        "small_entries": 1e-3 * wide,
    }


class TestOrthogonalize(unittest.TestCase):
    def test_standard_is_the_loop_of_torch(self):
        for name, update in hard_cases().items():
            with self.subTest(name):
                self.assertTrue(
                    torch.equal(
                        orthogonalize(update, **SETTINGS),
                        torch.optim._muon._zeropower_via_newtonschulz(
                            update, SETTINGS["ns_coefficients"], 5, SETTINGS["eps"]
                        ),
                    )
                )

    def test_standard_of_a_batch(self):
        update = torch.randn(3, 20, 12, generator=torch.Generator().manual_seed(0))
        x = update.to(torch.bfloat16).mT
        x = x / x.norm(dim=(-2, -1), keepdim=True)
        for _ in range(5):
            r = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(r, r, r, beta=B, alpha=C), x, beta=A)
        self.assertTrue(torch.equal(orthogonalize(update, **SETTINGS), x.mT))

    def test_gram_is_closer_to_the_polynomial_than_standard(self):
        for name, update in hard_cases().items():
            with self.subTest(name):
                expected = polynomial(update)
                gram = orthogonalize(update, method="gram", **SETTINGS)
                error = relative_error(gram, expected)
                standard = orthogonalize(update, **SETTINGS)
                self.assertLess(error, relative_error(standard, expected))
                # 485 = a^5 times the rounding of float16 reaches the zero directions.
                self.assertLess(error, 0.07 if "low_rank" in name else 0.025)
                difference = singular_values(gram) - singular_values(expected)
                self.assertLess(difference.abs().max().item(), 0.03)

    def test_gram_of_equal_rows(self):
        # Rounding reaches the zero directions, which the steps magnify, beside the one
        # singular vector. The loop errs less in most of these cases (about 0.006 for equal
        # rows), as all that it rounds is of rank one.
        # Factors transposed on the way made tall matrices err four times as much.
        generator = torch.Generator().manual_seed(0)
        for rows, columns in ((256, 64), (512, 128), (65, 64), (64, 64)):
            for _ in range(5):
                row = torch.randn(columns, generator=generator)
                equal = row.expand(rows, columns).contiguous()
                one = torch.zeros(rows, columns)
                one[rows // 3] = row
                # One entry a row: the singular vectors are those of a unit matrix.
                one_hot = torch.zeros(rows, columns)
                hot = torch.randint(columns, (rows,), generator=generator)
                one_hot[torch.arange(rows), hot] = 1
                for update, limit in ((equal, 0.03), (one, 0.03), (one_hot, 0.01)):
                    for matrix in (update, update.mT.contiguous()):
                        gram = orthogonalize(matrix, method="gram", **SETTINGS)
                        error = relative_error(gram, polynomial(matrix))
                        self.assertLess(error, limit)

    def test_gram_sends_singular_values_to_the_band(self):
        values = singular_values(
            orthogonalize(hard_cases()["wide"], method="gram", **SETTINGS)
        )
        self.assertGreater(values.min().item(), 0.67)
        self.assertLess(values.max().item(), 1.15)

    def test_gram_stays_bounded_over_many_steps(self):
        # Without new Gram matrices on the way this overflows after about 8 steps.
        update = hard_cases()["low_rank"]
        for ns_steps in (0, 1, 2, 3, 4, 8, 12):
            with self.subTest(ns_steps=ns_steps):
                settings = SETTINGS | {"ns_steps": ns_steps}
                got = orthogonalize(update, method="gram", **settings)
                self.assertLess(singular_values(got).max().item(), 1.3)
                if ns_steps <= 3:  # later, rounding decides the zero directions
                    expected = polynomial(update, ns_steps)
                    self.assertLess(relative_error(got, expected), 0.01)

    @hypothesis.settings(
        max_examples=40, deadline=None, derandomize=True, database=None
    )
    @hypothesis.given(
        batch=st.one_of(st.none(), st.integers(0, 3)),
        rows=st.integers(1, 33),
        columns=st.integers(1, 33),
        layout=st.sampled_from(["contiguous", "transposed", "sliced", "batch_last"]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    )
    def test_gram_of_any_shape_and_layout(self, batch, rows, columns, layout, dtype):
        generator = torch.Generator().manual_seed(rows * 40 + columns)
        update = torch.randn((batch or 1, rows, columns), generator=generator)
        update = (update if batch is None else update[:batch]).to(dtype)
        if layout == "transposed":
            update = update.mT.contiguous().mT
        elif layout == "sliced":
            update = torch.cat([update, update], dim=-1)[..., :columns]
        elif layout == "batch_last":
            update = update.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        if batch is None:
            update = update[0]
        before = update.clone()
        got = orthogonalize(update, method="gram", **SETTINGS)
        self.assertEqual(got.shape, update.shape)
        self.assertTrue(torch.equal(update, before))
        torch.testing.assert_close(
            got.double(), polynomial(update), rtol=0, atol=0.02
        )

    def test_values_that_are_not_finite(self):
        good = hard_cases()["wide"]
        nan, inf, minus_inf = good.clone(), good.clone(), good.clone()
        nan[3, 5], inf[3, 5], minus_inf[95, 319] = torch.nan, torch.inf, -torch.inf
        overflow = good * 1e30  # finite, but its squares are not
        batch = torch.stack([good, nan, inf, minus_inf, overflow, 0 * good])
        for transpose in (False, True):
            update = batch.mT if transpose else batch
            got = orthogonalize(update, method="gram", **SETTINGS)
            alone = orthogonalize(update[0], method="gram", **SETTINGS)
            torch.testing.assert_close(got[0], alone)
            self.assertTrue(got[1:5].isnan().all())
            self.assertTrue((got[5] == 0).all())
        got = orthogonalize(batch[:4], **SETTINGS)
        self.assertTrue(got[0].isfinite().all())
        self.assertTrue(got[1:].isnan().all())

    def test_unknown_method(self):
        with self.assertRaisesRegex(ValueError, "'standard', 'gram', .*got 'svd'"):
            orthogonalize(torch.ones(2, 2), method="svd", **SETTINGS)

    @unittest.skipIf(
        importlib.util.find_spec("gram_newton_schulz"), "the package is installed"
    )
    def test_library_that_is_not_installed(self):
        with self.assertRaisesRegex(ValueError, "pip install gram-newton-schulz"):
            orthogonalize(torch.ones(2, 2), method="library", **SETTINGS)

    def test_library_gets_every_setting(self):
        calls = []

        class GramNewtonSchulz:
            def __init__(self, **kwargs):
                calls.append(kwargs)

            def __call__(self, x):
                calls.append(x.dtype)
                return 2 * x

        name = "gram_newton_schulz"
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.GramNewtonSchulz = GramNewtonSchulz
        self.addCleanup(newton_schulz._library.cache_clear)
        with mock.patch.dict(sys.modules, {name: module}):
            for _ in range(2):  # made once
                got = orthogonalize(
                    torch.ones(2, 3, dtype=torch.bfloat16), method="library", **SETTINGS
                )
        self.assertTrue((got == 2).all())
        self.assertEqual(
            calls,
            [
                {
                    "ns_epsilon": 1e-7,
                    "ns_coefficients": [[A, B, C]] * 5,
                    "gram_newton_schulz_reset_iterations": [2],
                },
                torch.float32,
                torch.float32,
            ],
        )


# Runs in a process of its own: Triton decides at import whether it interprets. The
# modules are loaded by path, as importing torchtitan takes seconds. The tiles are small,
# so that a matrix has several and the last ones overhang.
INTERPRETED = """
import sys, types, torch
package = types.ModuleType("flex_shard")
package.__path__ = [sys.argv[1]]
sys.modules["flex_shard"] = package
from flex_shard import _newton_schulz_triton as kernels, newton_schulz

kernels._BLOCK, kernels._BLOCK_K = 32, 32

def check(got, expected):
    assert torch.equal(got, got.mT)
    error = (got.double() - expected).norm() / expected.norm()
    assert error < 5e-4, error

for n, m in ((8, 8), (72, 40)):
    x = torch.randn(2, n, m).half()
    for layout in (x, x.mT.contiguous().mT):
        check(kernels.symmetric_product(layout, layout.mT), x.double() @ x.double().mT)
    r = kernels.symmetric_product(x / m, x.mT)
    s, eye = r.double(), torch.eye(n).double()
    p = kernels.symmetric_product(r, r, addend=r, alpha=2, beta=-3, diagonal=1.5)
    check(p, 2 * s @ s - 3 * s + 1.5 * eye)
    check(kernels.symmetric_product(r, p), s @ p.double())
    x[1, 0, 0] = torch.nan
    r = kernels.symmetric_product(x, x.mT)
    assert r[0].isfinite().all() and r[1, 0].isnan().all()

x, scale = torch.randn(3, 10, 150), torch.rand(3, 1, 1)
assert torch.equal(kernels.scale_to_float16(x, scale), (x * scale).half())

settings = dict(ns_coefficients=(3.4445, -4.775, 2.0315), ns_steps=5, eps=1e-7)
for update in (torch.randn(1, 40, 72), torch.randn(1, 72, 40)):
    plain = newton_schulz.orthogonalize(update, method="gram", **settings)
    newton_schulz._symmetric_product_for = lambda x: kernels.symmetric_product
    got = newton_schulz.orthogonalize(update, method="gram", **settings)
    newton_schulz._symmetric_product_for = lambda x: newton_schulz._plain_product
    assert not torch.equal(got, plain)
    torch.testing.assert_close(got, plain, rtol=0, atol=5e-3)
print("all right")
"""


class TestTritonKernels(unittest.TestCase):
    def test_interpreted(self):
        result = subprocess.run(
            [sys.executable, "-c", INTERPRETED, os.path.dirname(newton_schulz.__file__)],
            env=os.environ | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
        self.assertEqual(result.stdout, "all right\n", result.stderr)

    @unittest.skipUnless(HOPPER, "requires a Hopper GPU")
    def test_on_gpu(self):
        from torchtitan.distributed.flex_shard import _newton_schulz_triton as kernels

        for batch, n, m in ((24, 256, 640), (3, 712, 520), (2, 8, 8), (5, 136, 264)):
            x = (torch.randn(batch, n, m, device="cuda") / m**0.5).half()
            for layout in (x, x.mT.contiguous().mT):
                r = kernels.symmetric_product(layout, layout.mT)
                self.assertTrue(torch.equal(r, r.mT))
                self.assertLess(relative_error(r, x.double() @ x.double().mT), 5e-4)
            p = kernels.symmetric_product(
                r, r, addend=r, alpha=C, beta=B, diagonal=A
            )
            s, eye = r.double(), torch.eye(n, device="cuda", dtype=torch.float64)
            self.assertLess(relative_error(p, A * eye + B * s + C * s @ s), 5e-4)
            t = kernels.symmetric_product(r, p)
            self.assertLess(relative_error(t, s @ p.double()), 5e-4)
            self.assertTrue(torch.equal(t, kernels.symmetric_product(r, p)))

    @unittest.skipUnless(HOPPER, "requires a Hopper GPU")
    def test_gram_on_gpu(self):
        for shape in ((24, 1024, 1536), (24, 1536, 1024), (2, 100, 300)):
            update = torch.randn(shape, device="cuda")
            update[-1] = torch.nan
            got = orthogonalize(update, method="gram", **SETTINGS)
            self.assertTrue(got[-1].isnan().all())
            self.assertLess(relative_error(got[0], polynomial(update[0])), 3e-3)


class TestDistMuonMethod(unittest.TestCase):
    def setUp(self):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))

    def _build(self, group: dict | None = None, **kwargs):
        generator = torch.Generator().manual_seed(0)
        whole_experts = DTensor.from_local(
            torch.randn(3, 16, 24, generator=generator), self.mesh, [Shard(0)]
        )
        param = torch.nn.Parameter(whole_experts)
        optimizer = build_dist_muon(
            [{"params": [param], "param_names": ["experts"]} | (group or {})],
            compute_sharding_by_fqn={"experts": ComputeLayout({"dp_shard": Shard(0)})},
            bucket_configs=[BucketConfig(patterns=("*",))],
            **kwargs,
        )
        return param, optimizer

    def _step(self, param, optimizer) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(3, 16, 24, generator=generator)
        param.grad = DTensor.from_local(grad, self.mesh, [Shard(0)])
        before = param.to_local().detach().clone()
        optimizer.step()
        return param.to_local().detach() - before

    def test_method_is_used(self):
        default = self._step(*self._build(weight_decay=0.0))
        standard = self._step(*self._build(weight_decay=0.0, newton_schulz="standard"))
        gram = self._step(*self._build(weight_decay=0.0, newton_schulz="gram"))
        self.assertTrue(torch.equal(default, standard))
        self.assertFalse(torch.equal(gram, standard))
        self.assertLess(relative_error(gram, standard.double()), 0.03)

    def test_checkpoints_do_not_hold_the_method(self):
        # What DistMuon saved before it had methods, with momentum of one step.
        old = self._build()
        self._step(*old)
        state = get_flat_optim_state_dict(old[1])
        self.assertEqual(
            {key.split(".")[-1] for key in state},
            {
                "momentum_buffer",
                "lr",
                "weight_decay",
                "momentum",
                "nesterov",
                "ns_coefficients",
                "eps",
                "ns_steps",
                "adjust_lr_fn",
            },
        )
        param, optimizer = self._build(newton_schulz="gram")
        init_optim_state(optimizer)
        load_flat_optim_state_dict(optimizer, state)
        with mock.patch.object(
            newton_schulz, "_gram_newton_schulz", wraps=newton_schulz._gram_newton_schulz
        ) as gram:
            self._step(param, optimizer)
        self.assertEqual(gram.call_count, 1)

    def test_ranks_must_agree(self):
        def signature(optimizer):
            (layout,) = optimizer._parameter_compute_layouts
            return optimizer._plan_item_signature(layout)

        gram = signature(self._build(newton_schulz="gram")[1])
        self.assertNotEqual(gram, signature(self._build()[1]))
        self.assertEqual(gram, signature(self._build(newton_schulz="gram")[1]))

    def test_misuse(self):
        with self.assertRaisesRegex(ValueError, "newton_schulz must be one of"):
            self._build(newton_schulz="svd")
        with self.assertRaisesRegex(ValueError, "an argument of build_dist_muon"):
            self._build(group={"newton_schulz": "gram"})


if __name__ == "__main__":
    unittest.main()
