# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""Newton-Schulz of Muon on one GPU: milliseconds a matrix, rate and error, by method.

    PYTHONPATH=OVERLAY python bench.py

Compares the methods of ``orthogonalize`` with torch.optim.Muon, and with the packages
gram-newton-schulz and emerging-optimizers where they are installed. Input is float32,
as DistMuon passes it. Methods take turns in one run; a time is the median of CUDA
events around one call on the whole batch, queued without waiting. Errors are of the first matrix: against the
same polynomial in float64, and by its singular values, which the polynomial sends to
0.68 to 1.14 where they are not small. ``--case 8 1792 6144``, once or more, selects.
Prints one JSON object.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from torchtitan.distributed.flex_shard import newton_schulz

Method = Callable[[Tensor], Tensor]

A, B, C = 3.4445, -4.7750, 2.0315
STEPS, EPS = 5, 1e-7
SECONDS_A_METHOD = 1.0
CASES = [
    (batch, *shape)
    for shape in ((1792, 6144), (6144, 1792))
    for batch in (1, 8, 24)
] + [(1, 6144, 6144)]

# Operations by n = min(R, C) and m = max(R, C). "standard" is the common measure: the
# operations of the plain loop. "gram" with the symmetric kernel counts half a product.
FLOPS = {
    "standard": lambda n, m: 20 * n * n * m + 10 * n**3,
    "gram": lambda n, m: 8 * n * n * m + 28 * n**3,
    "gram_symmetric": lambda n, m: 6 * n * n * m + 14 * n**3,
}


def one_by_one(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.stack([function(matrix) for matrix in x])


def gram_without_kernel(x: Tensor) -> Tensor:
    plain = newton_schulz._plain_product
    with mock.patch.object(
        newton_schulz, "_symmetric_product_for", lambda x: plain
    ):
        return ours("gram")(x)


def ours(method: str) -> Method:
    return partial(
        newton_schulz.orthogonalize,
        method=method,
        ns_coefficients=(A, B, C),
        ns_steps=STEPS,
        eps=EPS,
    )


def optimizer_step(x: Tensor) -> Method:
    """torch.optim.Muon's whole step: momentum and weights too."""
    params = [torch.nn.Parameter(torch.zeros_like(matrix)) for matrix in x]
    for param, gradient in zip(params, x):
        param.grad = gradient
    optimizer = torch.optim.Muon(params)
    return lambda x: optimizer.step()


def find_methods(x: Tensor) -> dict[str, tuple[Method, str]]:
    """Name to function and the key of its operation count in FLOPS."""
    coefficients = {"ns_coefficients": (A, B, C), "ns_steps": STEPS, "eps": EPS}
    plain = partial(_zeropower_via_newtonschulz, **coefficients)
    methods = {
        "torch.optim.Muon, function": (partial(one_by_one, plain), "standard"),
        "torch.optim.Muon, step": (optimizer_step(x), "standard"),
        "standard": (ours("standard"), "standard"),
        "gram, plain products": (gram_without_kernel, "gram"),
    }
    n, m = sorted(x.shape[-2:])
    normal = x if x.shape[-2] == n else x.mT
    if newton_schulz._symmetric_product_for(normal) is not newton_schulz._plain_product:
        methods["gram"] = (ours("gram"), "gram_symmetric")
    if has("gram-newton-schulz"):
        # It takes the standard iteration, with symmetric products, for square matrices.
        methods["library"] = (ours("library"), "gram_symmetric")
    if has("emerging-optimizers"):
        from emerging_optimizers.orthogonalized_optimizers import muon_utils

        other = partial(
            muon_utils.newton_schulz,
            steps=STEPS,
            coefficient_type="custom",
            custom_coefficient_sets=[(A, B, C)],
            eps=EPS,
        )
        methods["emerging_optimizers"] = (partial(one_by_one, other), "standard")
    return methods


def has(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def polynomial(matrix: Tensor) -> Tensor:
    """What all methods approximate, in float64."""
    x = matrix.double()
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    x = x / x.norm()
    for _ in range(STEPS):
        r = x @ x.mT
        x = A * x + (B * r + C * r @ r) @ x
    return x.mT if matrix.shape[-2] > matrix.shape[-1] else x


def measure_time(methods: dict[str, Method], x: Tensor, repeats: int) -> dict:
    """Median milliseconds a matrix. Slow methods are called fewer times."""
    events = {name: [] for name in methods}
    seconds = {}
    for name, method in methods.items():  # warm up, and see how slow it is
        for _ in range(2):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            method(x)
            torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - begin
    for repeat in range(repeats):
        for name, method in methods.items():
            if repeat < max(5, SECONDS_A_METHOD / seconds[name]):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                method(x)
                end.record()
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs)
        / len(x)
        for name, pairs in events.items()
    }


def measure_error(method: Method, x: Tensor, reference: Tensor) -> dict[str, float]:
    result = method(x)[0].double()
    n_first = result if result.shape[-2] <= result.shape[-1] else result.mT
    squares = torch.linalg.eigvalsh(n_first @ n_first.mT)
    return {
        "relative_error": ((result - reference).norm() / reference.norm()).item(),
        "smallest_singular_value": squares[0].clamp_min(0).sqrt().item(),
        "largest_singular_value": squares[-1].sqrt().item(),
    }


def run_case(batch: int, rows: int, columns: int, repeats: int) -> dict:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn((batch, rows, columns), device="cuda", generator=generator)
    reference = polynomial(x[0])
    methods, failed = {}, {}
    for name, (method, flops) in find_methods(x).items():
        try:
            method(x)
            methods[name] = (method, flops)
        except Exception as error:  # a package may not work with this torch
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
    milliseconds = measure_time({n: m for n, (m, _) in methods.items()}, x, repeats)
    n, m = sorted((rows, columns))
    results = {}
    for name, (method, flops) in methods.items():
        ms = milliseconds[name]
        results[name] = {
            "ms_per_matrix": ms,
            "tflops_of_standard_iteration": FLOPS["standard"](n, m) / ms / 1e9,
            "tflops_of_own_operations": FLOPS[flops](n, m) / ms / 1e9,
        }
        if not name.endswith("step"):
            results[name] |= measure_error(method, x, reference)
        figures = "".join(f" {value:9.4f}" for value in results[name].values())
        print(f"{batch:2} x {rows} x {columns} {name:27}{figures}", file=sys.stderr)
    return {"batch": batch, "rows": rows, "columns": columns, "methods": results} | (
        {"failed": failed} if failed else {}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--case", nargs=3, type=int, action="append", metavar=("B", "R", "C")
    )
    args = parser.parse_args()
    cases = CASES if args.case is None else args.case
    begin = time.perf_counter()
    results = [run_case(*case, args.repeats) for case in cases]
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    ).stdout.split()
    report = {
        "date": datetime.date.today().isoformat(),
        "command": f"PYTHONPATH=OVERLAY python bench.py --repeats {args.repeats}"
        + "".join(" --case {} {} {}".format(*case) for case in args.case or ()),
        "machine": {
            "processor": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "gpus": torch.cuda.device_count(),
            "gpu": ", ".join([torch.cuda.get_device_name(), *driver[:1]]),
        },
        "torch": torch.__version__,
        "triton": triton.__version__,
        "torchtitan": version("torchtitan") if has("torchtitan") else "not installed",
        "packages": {
            name: version(name)
            for name in ("gram-newton-schulz", "emerging-optimizers")
            if has(name)
        },
        "statistic": f"median of at most {args.repeats} calls, methods in turn; input float32",
        "seconds": round(time.perf_counter() - begin, 1),
        "cases": results,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
