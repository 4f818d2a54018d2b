# Owner(s): ["module: nn"]

import math
import unittest.mock
from fractions import Fraction

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.testing._internal.common_utils import (
    HardwareClassification,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


LARGE = (1 << 22) + 3  # beyond what is summed at once, and not a number of whole rows


def exact_norm(tensors: list[torch.Tensor]) -> float:
    """The 2-norm, summed in float64 by pieces and without rounding between them."""
    total = Fraction(0)
    for tensor in tensors:
        for part in tensor.reshape(-1).split(1 << 16):
            total += Fraction(part.double().square().sum().item())
    return math.sqrt(total)


class TestClipGradCPU(TestCase):
    hw_classification = HardwareClassification.GENERIC

    @parametrize("foreach", [None, False, True])
    def test_large_float32(self, foreach):
        torch.manual_seed(0)
        tensors = [torch.randn(LARGE), torch.randn(7, 5), torch.randn(3, 700, 1000)]
        for chosen in ([tensors[0]], [tensors[2]], tensors):
            total = get_total_norm(chosen, foreach=foreach)
            # The pristine sum is off by 1e-4 here, and by 4e-2 at 2**28 values.
            self.assertEqual(total.item(), exact_norm(chosen), rtol=1e-6, atol=0)
            self.assertEqual(total.dtype, torch.float32)
            self.assertEqual(total.shape, ())

    def test_clip_grad_norm_(self):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.empty(n)) for n in (LARGE, 5)]
        for p in parameters:
            p.grad = torch.randn(p.shape)
        before = exact_norm([p.grad for p in parameters])
        total = clip_grad_norm_(parameters, 1.0)
        self.assertEqual(total.item(), before, rtol=1e-6, atol=0)
        after = exact_norm([p.grad for p in parameters])
        self.assertEqual(after, 1.0, rtol=1e-5, atol=0)

    @parametrize("layout", ["transposed", "expanded", "strided", "skinny"])
    def test_layouts(self, layout):
        torch.manual_seed(0)
        tensor = {
            "transposed": lambda: torch.randn(3000, 1000).t(),
            "expanded": lambda: torch.randn(3000, 1).expand(3000, 1000),
            "strided": lambda: torch.randn(3000, 2000)[:, ::2],
            "skinny": lambda: torch.randn(3_000_000, 1),
        }[layout]()
        total = get_total_norm([tensor])
        self.assertEqual(total.item(), exact_norm([tensor]), rtol=1e-6, atol=0)

    @parametrize("norm_type", [0.5, 1.0, 3.0, math.inf])
    def test_other_norms_are_as_before(self, norm_type):
        torch.manual_seed(0)
        tensor = torch.rand(LARGE)
        expected = torch.linalg.vector_norm(
            torch.linalg.vector_norm(tensor, norm_type)[None], norm_type
        )
        self.assertEqual(get_total_norm([tensor], norm_type), expected, rtol=0, atol=0)

    @parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_other_dtypes_are_as_before(self, dtype):
        # Rows of these would have their norms rounded.
        torch.manual_seed(0)
        tensor = torch.randn(LARGE).to(dtype)
        norm = torch.linalg.vector_norm(tensor)
        expected = torch.linalg.vector_norm(norm[None])
        self.assertEqual(get_total_norm([tensor]), expected, rtol=0, atol=0)

    def test_small_tensors_are_as_before(self):
        # The limit itself, too; for these, one operator for all of them.
        torch.manual_seed(0)
        tensors = [torch.randn(1 << 20), torch.randn(3), torch.randn(0)]
        norms = torch.stack(torch._foreach_norm(tensors, 2.0))
        expected = torch.linalg.vector_norm(norms)
        self.assertEqual(get_total_norm(tensors), expected, rtol=0, atol=0)
        with unittest.mock.patch.object(
            torch, "_foreach_norm", wraps=torch._foreach_norm
        ) as foreach_norm:
            get_total_norm(tensors)
        self.assertEqual(foreach_norm.call_count, 1)

    @parametrize("value", [math.inf, -math.inf, math.nan])
    @parametrize("where", [0, LARGE // 2, LARGE - 1])
    def test_non_finite(self, value, where):
        # In a row, and in what remains behind the last whole one.
        tensor = torch.ones(LARGE)
        tensor[where] = value
        total = get_total_norm([tensor])
        self.assertFalse(total.isfinite().item())
        with self.assertRaisesRegex(RuntimeError, "non-finite"):
            get_total_norm([tensor], error_if_nonfinite=True)

    def test_same_at_any_number_of_threads(self):
        torch.manual_seed(0)
        tensor = torch.randn(LARGE)
        threads = torch.get_num_threads()
        totals = []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                totals.append(get_total_norm([tensor.view(-1)]).item())
        finally:
            torch.set_num_threads(threads)
        self.assertEqual(len(set(totals)), 1)

    def test_float64(self):
        torch.manual_seed(0)
        tensor = torch.randn(LARGE, dtype=torch.float64)
        total = get_total_norm([tensor])
        self.assertEqual(total.item(), exact_norm([tensor]), rtol=1e-13, atol=0)


instantiate_parametrized_tests(TestClipGradCPU)


if __name__ == "__main__":
    run_tests()
