"""Time and error of the total norm of gradients on the CPU, without and with the patch.

Run it where ``import torch`` gives the patched package by PYTHONPATH; the pristine one is
what is imported without PYTHONPATH. Each is measured in processes of its own, which take
turns::

    PYTHONPATH=OVERLAY python bench.py                          # 10.8 GB, as one rank's
    PYTHONPATH=OVERLAY python bench.py --experts 4 --layers 1   # a small machine

The gradients are those of layers of a 1T model with ``--experts`` experts each: float32
normal values, and DTensors on a mesh of one rank, as FSDP2 leaves them on the host. The error is relative to a sum in float64. Prints one JSON object; bytes, seconds,
bytes a second.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time


VARIANTS = ("pristine", "patched")
HIDDEN, EXPERT_HIDDEN, QKV = 6144, 1792, 10240


def measure(args: argparse.Namespace) -> dict[str, float | int]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
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
    squares = sum(
        part.double().square().sum()
        for t in tensors
        for part in t.view(-1).split(1 << 22)
    )
    exact = squares.sqrt().item()
    local = total.to_local() if isinstance(total, DTensor) else total
    size = sum(t.numel() for t in tensors) * 4
    took = statistics.median(seconds[1:])
    return {
        "seconds": took,
        "bytes_a_second": size / took,
        "relative_error": abs(local.item() - exact) / exact,
        "bytes": size,
        "threads": torch.get_num_threads(),
        "seconds_of_all_repeats": seconds[1:],
    }


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
            print(name, runs[name][-1]["seconds"], file=sys.stderr)
    results = {
        name: sorted(each, key=lambda run: run["seconds"])[len(each) // 2]
        | {"seconds_of_all_runs": [run["seconds"] for run in each]}
        for name, each in runs.items()
    }
    arguments = {k: v for k, v in vars(args).items() if k != "measure"}
    print(json.dumps({"arguments": arguments, "results": results}, indent=2))


if __name__ == "__main__":
    main()
