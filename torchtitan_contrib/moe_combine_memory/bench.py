# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""Memory and time of LocalTokenDispatcher.combine(), without and with the patch.

Run it where ``import torchtitan`` gives the patched package by PYTHONPATH; the pristine
one is what is imported without PYTHONPATH. Each is measured in processes of its own::

    PYTHONPATH=OVERLAY python bench.py                                # a GPU: 1T shape
    PYTHONPATH=OVERLAY python bench.py --device cpu --tokens 8192 --dim 768

Inputs are routed outputs in bfloat16 and scores in float32. Reported are bytes kept for
backward and the growth of memory at its highest from before forward until after
backward (CUDA: of the allocator; CPU: of the process), which includes the results: the
output and both gradients; and the medians of both times (CPU: of the one thread's own
time, which a busy machine changes little). Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

VARIANTS = ("pristine", "patched")


def read_status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def measure(args: argparse.Namespace) -> dict[str, float | int]:
    import torch

    from torchtitan.models.common.token_dispatcher import (
        LocalDispatchMetadata,
        LocalTokenDispatcher,
    )

    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    torch.set_num_threads(1)  # as torchrun does
    clock = time.perf_counter if on_gpu else time.process_time
    num_rows = args.tokens * args.top_k
    dispatcher = LocalTokenDispatcher.Config(num_experts=384, top_k=args.top_k).build()
    torch.manual_seed(0)

    def make_metadata(num_rows: int) -> LocalDispatchMetadata:
        order_N = torch.randperm(num_rows, device=device)
        scores_N = torch.rand(num_rows, device=device).requires_grad_()
        return LocalDispatchMetadata(
            token_indices_experts_sorted_N=order_N // args.top_k,
            topk_scores_experts_sorted_N=scores_N,
        )

    def synchronize() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return x

    def step(routed_ND, metadata, x_TD, grad_TD) -> tuple[float, float]:
        """Return the seconds of forward and of backward."""
        saved.clear()
        synchronize()
        begin = clock()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out_TD = dispatcher.combine(routed_ND, metadata, x_TD)
        synchronize()
        between = clock()
        inputs = (routed_ND, metadata.topk_scores_experts_sorted_N)
        gradients = torch.autograd.grad(out_TD, inputs, grad_TD)
        synchronize()
        end = clock()
        del gradients
        return between - begin, end - between

    def make_inputs(num_tokens: int) -> tuple:
        num_rows = num_tokens * args.top_k
        make = {"device": device, "dtype": torch.bfloat16}
        routed_ND = torch.randn(num_rows, args.dim, **make).requires_grad_()
        x_TD, grad_TD = (torch.randn(num_tokens, args.dim, **make) for _ in "ab")
        return routed_ND, make_metadata(num_rows), x_TD, grad_TD

    # Libraries load and threads start here, and are not counted.
    step(*make_inputs(min(64, args.tokens)))
    inputs = make_inputs(args.tokens)
    if on_gpu:
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        # 5: the peak of the process starts anew from what it holds; see proc(5).
        Path("/proc/self/clear_refs").write_text("5")
        held = read_status("VmRSS")
    times = [step(*inputs)]
    peak = torch.cuda.max_memory_allocated() if on_gpu else read_status("VmHWM")
    if args.steps > 1:
        times = [step(*inputs) for _ in range(args.steps)]
    forward, backward = (statistics.median(t) for t in zip(*times, strict=True))
    return {
        "routed_bytes": 2 * num_rows * args.dim,
        "saved_bytes": sum(saved.values()),
        "peak_growth_bytes": peak - held,
        "forward_ms": 1e3 * forward,
        "backward_ms": 1e3 * backward,
    }


def run(variant: str) -> dict[str, float | int]:
    env = dict(os.environ)
    if variant == "pristine":
        env.pop("PYTHONPATH", None)
    command = [sys.executable, __file__, *sys.argv[1:], "--measure"]
    out = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(out.stdout)


def main() -> None:
    import torch

    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dim", type=int, default=6144)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--steps", type=int, default=5, help="timed in each process")
    parser.add_argument("--processes", type=int, default=3, help="of each variant")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args)))
        return

    # Interleaved, so that a change in the machine's load meets both.
    runs = {variant: [] for variant in VARIANTS}
    for _ in range(args.processes):
        for variant in VARIANTS:
            runs[variant].append(run(variant))
            print(variant, runs[variant][-1], file=sys.stderr)
    results = {
        variant: {key: statistics.median(r[key] for r in rs) for key in rs[0]}
        | {f"{key}_of_all_runs": [r[key] for r in rs] for key in rs[0]}
        for variant, rs in runs.items()
    }
    report = {
        "what": "LocalTokenDispatcher.combine(), forward and backward",
        "arguments": {k: v for k, v in vars(args).items() if k != "measure"},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "statistic": f"median of {args.processes} processes each, interleaved",
        "results": results,
    }
    print(json.dumps(report, indent=2))
    if results["patched"]["saved_bytes"] >= results["pristine"]["saved_bytes"]:
        sys.exit("bench.py: expected fewer bytes kept by PYTHONPATH than without it")


if __name__ == "__main__":
    main()
