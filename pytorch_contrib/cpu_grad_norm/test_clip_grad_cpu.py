# Owner(s): ["module: nn"]

import math
import random as py_random
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
            # Without rows, the sum is off by 1e-4 here, and by 4e-2 at 2**28 values.
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

    @parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @parametrize("layout", ["channels_last", "transposed", "permuted", "parameter"])
    def test_dense_layouts(self, layout, dtype):
        torch.manual_seed(0)
        tensor = {
            "channels_last": lambda t: t.view(-1, 1024, 3, 3).to(
                memory_format=torch.channels_last
            ),
            "transposed": lambda t: t.view(-1, 1152).t(),
            "permuted": lambda t: t.view(16, -1, 64, 1).permute(2, 3, 0, 1),
            "parameter": lambda t: torch.nn.Parameter(t),
        }[layout](torch.randn(9 << 19).to(dtype))
        total = get_total_norm([tensor])
        exact = exact_norm([tensor.detach()])
        rounding = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        self.assertEqual(total.item(), exact, rtol=rounding, atol=0)
        self.assertEqual(total.dtype, dtype)

    def test_random_dense_layouts(self):
        """Sizes and orders of dims, offsets into the storage, several tensors."""
        random = py_random.Random(0)
        for _ in range(12):
            shape = [random.choice((1, 2, 3, 7, 16, 33)) for _ in range(3)]
            shape.append((1 << 20) // math.prod(shape) + random.randrange(1, 40))
            random.shuffle(shape)
            offset = random.randrange(3)
            storage = torch.randn(offset + math.prod(shape))
            dense = storage[offset:].view(shape)
            order = random.sample(range(4), 4)
            tensors = [dense.permute(order), torch.randn(random.randrange(1, 9))]
            total = get_total_norm(tensors)
            self.assertEqual(total.item(), exact_norm(tensors), rtol=1e-6, atol=0)

    @parametrize("layout", ["expanded", "strided", "overlapping"])
    def test_gaps_and_overlaps_are_as_before(self, layout):
        torch.manual_seed(0)
        tensor = {
            "expanded": lambda: torch.randn(3000, 1).expand(3000, 1000),
            "strided": lambda: torch.randn(3000, 2000)[:, ::2],
            "overlapping": lambda: torch.randn(2 << 20).unfold(0, 8, 4),
        }[layout]()
        expected = torch.linalg.vector_norm(torch.linalg.vector_norm(tensor)[None])
        self.assertEqual(get_total_norm([tensor]), expected, rtol=0, atol=0)

    @parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype):
        # One rounding of the result, however many tensors have rows; without rows, the
        # sum of squares of equal values stops growing.
        torch.manual_seed(0)
        half = torch.finfo(dtype).eps / 2
        equal = torch.full((1 << 25,), 0.01, dtype=dtype)
        normal = [torch.randn((1 << 23) + 5).to(dtype) for _ in range(2)]
        for tensors in ([equal], normal):
            total = get_total_norm(tensors)
            self.assertEqual(total.dtype, dtype)
            exact = exact_norm(tensors)
            self.assertEqual(total.item(), exact, rtol=half * 1.02, atol=0)
        mixed = get_total_norm([*normal, torch.randn(5)])
        self.assertEqual(mixed.dtype, torch.float32)

    def test_equal_values(self):
        # Their rounding errors all have one sign.
        random = py_random.Random(0)
        for value in [0.1, 1.0, *(random.uniform(1, 2) for _ in range(6))]:
            tensor = torch.full((1 << 22,), value)
            exact = tensor[0].double().item() * 2048
            total = get_total_norm([tensor]).item()
            self.assertEqual(total, exact, rtol=1.1e-6, atol=0)

    def test_zeros(self):
        self.assertEqual(get_total_norm([torch.zeros(LARGE)]).item(), 0)

    def test_sparse(self):
        for num_rows in (10, 1 << 17):  # with the zeros, small and large
            embedding = torch.nn.Embedding(num_rows, 64, sparse=True)
            embedding(torch.tensor([1, 2, 3])).sum().backward()
            dense = torch.nn.Parameter(torch.empty(LARGE))
            dense.grad = torch.full((LARGE,), 0.5)
            total = clip_grad_norm_([embedding.weight], 1.0)
            self.assertEqual(total.item(), math.sqrt(3 * 64), rtol=1e-6, atol=0)
            embedding.weight.grad = embedding.weight.grad * total
            total = clip_grad_norm_([embedding.weight, dense], 1.0)
            exact = math.sqrt(3 * 64 + LARGE / 4)
            self.assertEqual(total.item(), exact, rtol=1e-6, atol=0)

    @parametrize("norm_type", [0.5, 1.0, 3.0, math.inf])
    def test_other_norms_are_as_before(self, norm_type):
        torch.manual_seed(0)
        tensor = torch.rand(LARGE)
        expected = torch.linalg.vector_norm(
            torch.linalg.vector_norm(tensor, norm_type)[None], norm_type
        )
        self.assertEqual(get_total_norm([tensor], norm_type), expected, rtol=0, atol=0)

    def test_float64_is_as_before(self):
        torch.manual_seed(0)
        tensor = torch.randn(LARGE, dtype=torch.float64)
        expected = torch.linalg.vector_norm(torch.linalg.vector_norm(tensor)[None])
        self.assertEqual(get_total_norm([tensor]), expected, rtol=0, atol=0)

    @parametrize("num_large", [0, 1])
    def test_small_tensors_are_as_before(self, num_large):
        # Up to the limit itself. One operator for all of them, large ones or not.
        torch.manual_seed(0)
        small = [torch.randn((1 << 20) - 1), torch.randn(3), torch.randn(0)]
        large = [torch.randn(1 << 20) for _ in range(num_large)]
        norms = torch._foreach_norm(small, 2.0)
        with unittest.mock.patch.object(
            torch, "_foreach_norm", wraps=torch._foreach_norm
        ) as foreach_norm:
            total = get_total_norm(small + large)
        foreach_norm.assert_called_once()
        self.assertEqual(len(foreach_norm.call_args.args[0]), len(small))
        if not large:
            expected = torch.linalg.vector_norm(torch.stack(norms))
            self.assertEqual(total, expected, rtol=0, atol=0)

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
                totals.append(get_total_norm([tensor]).item())
        finally:
            torch.set_num_threads(threads)
        self.assertEqual(len(set(totals)), 1)


instantiate_parametrized_tests(TestClipGradCPU)


if __name__ == "__main__":
    run_tests()
