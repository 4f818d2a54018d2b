"""Time and error of the total norm of gradients on the CPU, without and with the patch.

Run it where ``import torch`` gives the patched package by PYTHONPATH; the pristine one is
what is imported without PYTHONPATH. Each is measured in processes of its own, which take
turns::

    PYTHONPATH=OVERLAY python bench.py                          # 10.8 GB, as one rank's
    PYTHONPATH=OVERLAY python bench.py --experts 4 --layers 1   # a small machine
    PYTHONPATH=OVERLAY python bench.py --large                  # and cases of 2**28 elements

``results`` has the gradients of layers of a 1T model with ``--experts`` experts each: float32
normal values, and DTensors on a mesh of one rank, as FSDP2 leaves them on the host. ``cases``
has memory layouts, dtypes, sizes and numbers of tensors: the CPU time of one thread, which is
the work, and the time with all threads. The error is relative to a sum in float64; what rounding
the result to its dtype may cost is ``rounding``. Prints one JSON object; bytes, seconds, bytes a
second.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


VARIANTS = ("pristine", "patched")
HIDDEN, EXPERT_HIDDEN, QKV = 6144, 1792, 10240
LARGE = 1 << 28


@dataclass(frozen=True)
class Case:
    """``count`` gradients of ``numel`` elements in one layout, and small ones."""

    layout: str
    dtype: str
    numel: int
    count: int = 1
    num_small: int = 0  # of 1,024 elements, contiguous

    @property
    def name(self) -> str:
        small = f" and {self.num_small} small" * bool(self.num_small)
        return f"{self.layout} {self.dtype} {self.count}x{self.numel}{small}"


def list_cases(large: bool) -> list[Case]:
    dtypes = ("float32", "bfloat16", "float16")
    layouts = ("contiguous", "channels_last", "transposed", "sliced")
    cases = [Case(*c) for c in itertools.product(layouts, dtypes, (1 << 20, 9 << 18))]
    sizes = [
        (1 << 10, 4000),
        (1 << 15, 64),
        (1 << 16, 64),
        (1 << 18, 16),
        ((1 << 18) + 4, 16),
    ]
    sizes += [(1 << 19, 8), ((1 << 20) + 4, 8), (1 << 22, 4), (1 << 25, 1)]
    cases += [
        Case("contiguous", d, n, c) for d in (*dtypes, "float64") for n, c in sizes
    ]
    cases += [Case("contiguous", d, 1 << 21, 1, 4000) for d in dtypes]
    shards = ("Shard(0)", "Shard(1)", "Shard(0) of one dim", "Replicate")
    for layout, (numel, count) in itertools.product(
        shards, ((1 << 19, 8), (1 << 25, 1))
    ):
        cases += [
            Case(layout, dtype, numel, count) for dtype in ("float32", "bfloat16")
        ]
    cases.append(Case("Shard(0) of two columns", "float32", 1 << 26))
    if large:
        cases += [
            Case(lay, d, LARGE) for lay in ("contiguous", "Shard(1)") for d in dtypes
        ]
        cases += [Case("equal values", d, LARGE) for d in dtypes]
    return cases


def build(case: Case, mesh: object) -> list:
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dtype = getattr(torch, case.dtype)
    n = case.numel

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32).to(dtype)

    def shard(tensor: torch.Tensor, placement: object) -> DTensor:
        return DTensor.from_local(tensor, mesh, [placement], run_check=False)

    rows = n // 1024
    make: dict[str, Callable] = {
        "contiguous": lambda: normal(n),
        "equal values": lambda: torch.full((n,), 0.1, dtype=dtype),
        "channels_last": lambda: normal(rows, 64, 4, 4).to(
            memory_format=torch.channels_last
        ),
        "transposed": lambda: normal(rows, 1024).t(),
        "sliced": lambda: normal(rows, 2048)[:, :1024],
        "Shard(0)": lambda: shard(normal(rows, 1024), Shard(0)),
        "Shard(1)": lambda: shard(normal(rows, 1024), Shard(1)),
        "Shard(0) of one dim": lambda: shard(normal(n), Shard(0)),
        "Shard(0) of two columns": lambda: shard(normal(n // 2, 2), Shard(0)),
        "Replicate": lambda: shard(normal(rows, 1024), Replicate()),
    }
    grads = [make[case.layout]() for _ in range(case.count)]
    return grads + [normal(1024) for _ in range(case.num_small)]


def exact_norm(grads: list) -> float:
    locals_ = [getattr(g, "_local_tensor", g) for g in grads]
    parts = (p for t in locals_ for p in t.reshape(-1).split(1 << 22))
    return sum(p.double().square().sum() for p in parts).sqrt().item()


def to_float(total: object) -> float:
    return getattr(total, "_local_tensor", total).item()


def measure_case(case: Case, mesh: object, threads: int) -> dict[str, float]:
    import torch

    torch.manual_seed(0)
    grads = build(case, mesh)
    figures: dict[str, float] = {}
    for name, clock, number in (
        ("cpu_seconds", time.process_time, 1),
        ("seconds", time.perf_counter, threads),
    ):
        torch.set_num_threads(number)
        torch.nn.utils.get_total_norm(grads)
        took = []
        end = time.perf_counter() + 0.2
        while len(took) < 3 or time.perf_counter() < end:
            begin = clock()
            total = torch.nn.utils.get_total_norm(grads)
            took.append(clock() - begin)
        # The least: what else runs on the machine only adds.
        figures[name] = min(took)
    exact = exact_norm(grads)
    figures["relative_error"] = abs(to_float(total) - exact) / exact
    figures["rounding"] = torch.finfo(grads[0].dtype).eps / 2
    return figures


def measure_model(args: argparse.Namespace, mesh: object) -> dict[str, float | int]:
    import torch
    from torch.distributed.tensor import DTensor, Shard

    torch.manual_seed(0)
    block = torch.randn(EXPERT_HIDDEN * HIDDEN)  # drawn on one thread: once

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape)
        for part in tensor.view(-1).split(block.numel()):
            part.copy_(block[: part.numel()])
        return tensor

    shapes = [(QKV, HIDDEN), (HIDDEN, HIDDEN)]
    shapes += 3 * [(args.experts, EXPERT_HIDDEN, HIDDEN)]
    tensors = [normal(shape) for _ in range(args.layers) for shape in shapes]
    grads = [
        DTensor.from_local(t, mesh, [Shard(0)], run_check=False) if args.dtensor else t
        for t in tensors
    ]
    seconds = []
    for _ in range(args.repeats + 1):  # one to warm up
        begin = time.perf_counter()
        total = torch.nn.utils.get_total_norm(grads)
        seconds.append(time.perf_counter() - begin)
    exact = exact_norm(tensors)
    size = sum(t.numel() for t in tensors) * 4
    took = statistics.median(seconds[1:])
    return {
        "seconds": took,
        "bytes_a_second": size / took,
        "relative_error": abs(to_float(total) - exact) / exact,
        "bytes": size,
        "threads": torch.get_num_threads(),
        "seconds_of_all_repeats": seconds[1:],
    }


def measure(args: argparse.Namespace) -> dict:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    model = measure_model(args, mesh)
    cases = list_cases(args.large) if args.cases else []
    return {
        "model": model,
        "cases": {c.name: measure_case(c, mesh, threads) for c in cases},
    }


def compare(runs: dict[str, list[dict]], case: str) -> dict:
    """The least time of all runs for each variant, and how much more one takes."""
    best = {}
    for name in VARIANTS:
        figures = [run["cases"][case] for run in runs[name]]
        best[name] = figures[0] | {
            key: min(each[key] for each in figures)
            for key in ("cpu_seconds", "seconds")
        }
    before, after = (best[name] for name in VARIANTS)
    best["cpu_seconds_over_pristine"] = after["cpu_seconds"] / before["cpu_seconds"]
    best["seconds_over_pristine"] = after["seconds"] / before["seconds"]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--dtensor", action=argparse.BooleanOptionalAction, default=True
    )
    parser.add_argument("--cases", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--large", action="store_true", help="cases of 2**28 elements, too"
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args)))
        return
    if "PYTHONPATH" not in os.environ:
        sys.exit("error: PYTHONPATH must name the overlay with the patch")
    arguments = [sys.executable, __file__, *sys.argv[1:], "--measure"]
    pristine = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    runs: dict[str, list[dict]] = {name: [] for name in VARIANTS}
    for _ in range(args.runs):
        for name in VARIANTS:
            env = pristine if name == "pristine" else None
            done = subprocess.run(
                arguments, env=env, check=True, stdout=subprocess.PIPE, text=True
            )
            runs[name].append(json.loads(done.stdout))
            print(name, runs[name][-1]["model"]["seconds"], file=sys.stderr)
    results = {}
    for name in VARIANTS:
        models = sorted(
            (run["model"] for run in runs[name]), key=lambda m: m["seconds"]
        )
        seconds = [run["model"]["seconds"] for run in runs[name]]
        results[name] = models[len(models) // 2] | {"seconds_of_all_runs": seconds}
    cases = {case: compare(runs, case) for case in runs["patched"][0]["cases"]}
    for case, each in cases.items():
        print(
            f"{case:45} CPU time x {each['cpu_seconds_over_pristine']:.2f},"
            f" time x {each['seconds_over_pristine']:.2f},"
            f" error {each['pristine']['relative_error']:.0e}"
            f" -> {each['patched']['relative_error']:.0e}",
            file=sys.stderr,
        )
    arguments = {k: v for k, v in vars(args).items() if k != "measure"}
    output = {"arguments": arguments, "results": results, "cases": cases}
    print(json.dumps(output, indent=2))


if __name__ == "__main__":
    main()
