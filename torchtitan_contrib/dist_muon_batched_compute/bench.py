# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""A DistMuon step of a mixture of experts: without and with batches across parameters.

    python bench.py --pristine --overlay OVERLAY --out evidence/h200x2.json   # two GPUs
    python bench.py --smoke --base BASE --overlay OVERLAY                       # gloo, CPU

OVERLAY is a folder with the patched torchtitan, to be put first on PYTHONPATH
(`integration patches overlay dist_muon_batched_compute` prints it). The pristine one
refuses CPUs, so a smoke run compares with BASE, the overlay of dist_muon_any_device.

A layer has `--dense` matrices 6144 x 6144, stored in row shards and computed by an owner,
and `--experts` experts on each rank (w1 and w3 1792 x 6144, w2 6144 x 1792). Two layers
are a bucket, dense matrices and experts alike, as in TorchTitan's Kimi recipe. Variants
alternate, each run in a process of its own that starts the ranks. Reported for each
variant, the largest value of the ranks, median over the runs:

step_ms            median step
exposed_ms         time in a step in which the compute stream waits for a transfer,
                   between CUDA events around each wait (steps of their own); GPUs only
newton_schulz      calls in a step
peak_bytes         allocated in a step beyond what was before it; GPUs only
growth_bytes       reserved by the allocator after the last step beyond the first
update_difference  relative Frobenius norm, first step, against the first variant
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pristine", action="store_true", help="measure without overlay")
    parser.add_argument("--base", type=pathlib.Path, help="an overlay to compare with")
    parser.add_argument("--overlay", type=pathlib.Path, help="the patched overlay")
    parser.add_argument("--smoke", action="store_true", help="tiny matrices on CPUs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dense", type=int, default=4, help="in a layer")
    parser.add_argument("--experts", type=int, default=2, help="in a layer, a rank")
    parser.add_argument("--batch", type=int, help="matrices_per_batch (patched only)")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--runs", type=int, default=3, help="processes for each variant")
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON here, too")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--patched", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.worker and not (args.pristine or args.base or args.overlay):
        parser.error("nothing to measure: give --pristine, --base or --overlay")
    if args.smoke and args.pristine:
        parser.error("the pristine DistMuon refuses CPUs: give --base instead")
    return args


# ---- one rank ----------------------------------------------------------------------


def build(args: argparse.Namespace, device):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from torchtitan.distributed.flex_shard import (
        BucketConfig,
        build_dist_muon,
        ComputeLayout,
        Owned,
    )

    wide, narrow = (96, 28) if args.smoke else (6144, 1792)
    mesh = init_device_mesh(device.type, (args.ranks,), mesh_dim_names=("dp_shard",))
    generator = torch.Generator(device).manual_seed(torch.distributed.get_rank())
    params, shardings = {}, {}
    for layer in range(args.layers):
        shapes = {f"dense{i}": (wide // args.ranks, wide) for i in range(args.dense)}
        shapes |= dict.fromkeys(("w1", "w3"), (args.experts, narrow, wide))
        shapes["w2"] = (args.experts, wide, narrow)
        for name, shape in shapes.items():
            local, grad = (
                torch.randn(shape, device=device, generator=generator) for _ in range(2)
            )
            fqn = f"layers.{layer}.{name}"
            params[fqn] = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
            params[fqn].grad = DTensor.from_local(grad, mesh, [Shard(0)])
            sharding = Owned() if name.startswith("dense") else Shard(0)
            shardings[fqn] = ComputeLayout({"dp_shard": sharding})
    buckets = [
        BucketConfig(tuple(f"layers.{i}.*" for i in range(first, first + 2)))
        for first in range(0, args.layers, 2)
    ]
    options = {"matrices_per_batch": args.batch} if args.patched and args.batch else {}
    optimizer = build_dist_muon(
        [{"params": list(params.values()), "param_names": list(params)}],
        compute_sharding_by_fqn=shardings,
        bucket_configs=buckets,
        **options,
    )
    return params, optimizer


def exposed_wait_ms(optimizer, steps: int) -> list[float]:
    """Time in each step in which the caller's stream waits for an event."""
    import torch

    caller = torch.cuda.current_stream()
    wait_event = torch.cuda.Stream.wait_event
    waits: list = []

    def timed_wait(stream, event):
        if stream != caller:
            return wait_event(stream, event)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        wait_event(stream, event)
        after.record(stream)
        waits.append((before, after))

    torch.cuda.Stream.wait_event = timed_wait
    exposed = []
    for _ in range(steps):
        waits.clear()
        optimizer.step()
        torch.cuda.synchronize()
        exposed.append(sum(before.elapsed_time(after) for before, after in waits))
    torch.cuda.Stream.wait_event = wait_event
    return exposed


def run_rank(rank: int, args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    import torchtitan
    from torchtitan.distributed.flex_shard import dist_muon

    cuda = not args.smoke
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{args.worker}.store",
        rank=rank,
        world_size=args.ranks,
    )

    def finish() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    params, optimizer = build(args, device)
    before = {n: p.detach().to_local().flatten()[::9973].clone() for n, p in params.items()}
    calls = 0
    direction = dist_muon._compute_muon_direction

    def counted(*pos, **named):
        nonlocal calls
        calls += 1
        return direction(*pos, **named)

    dist_muon._compute_muon_direction = counted
    optimizer.step()
    dist_muon._compute_muon_direction = direction
    finish()
    update = torch.cat(
        [p.detach().to_local().flatten()[::9973] - before[n] for n, p in params.items()]
    )
    result = {"newton_schulz": calls, "update": update.tolist()}

    if cuda:
        reserved = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    milliseconds = []
    for step in range(args.warmup + args.steps):
        dist.barrier()
        start = finish()
        optimizer.step()
        milliseconds.append(1e3 * (finish() - start))
    result["step_ms"] = statistics.median(milliseconds[args.warmup :])
    if cuda:
        result["peak_bytes"] = torch.cuda.max_memory_allocated() - allocated
        result["growth_bytes"] = torch.cuda.memory_reserved() - reserved
        dist.barrier()
        result["exposed_ms"] = statistics.median(exposed_wait_ms(optimizer, args.steps))
    result["device"] = torch.cuda.get_device_name() if cuda else "cpu"
    result["torchtitan"] = torchtitan.__file__
    pathlib.Path(f"{args.worker}.{rank}").write_text(json.dumps(result))
    dist.destroy_process_group()


# ---- all of them -------------------------------------------------------------------


def run_variant(name: str, overlay: pathlib.Path | None, args) -> list[dict]:
    env = dict(os.environ, PYTHONPATH=str(overlay.resolve()) if overlay else "")
    with tempfile.TemporaryDirectory() as folder:
        stem = pathlib.Path(folder, "run")
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(stem)]
        if name == "patched":
            command.append("--patched")
        subprocess.run(command, env=env, check=True)
        results = [
            json.loads(pathlib.Path(f"{stem}.{rank}").read_text())
            for rank in range(args.ranks)
        ]
    # Not resolved: an overlay links the files that it does not patch.
    found = pathlib.Path(results[0].pop("torchtitan")).absolute()
    if overlay and overlay.resolve() not in found.parents:
        raise SystemExit(
            f"expected torchtitan from {overlay}, got {found}: the overlay has none, and "
            "the numbers would be another variant's. Build it again."
        )
    return results


def relative_difference(runs: list[list[dict]], reference: list[list[dict]]) -> float:
    pairs = [
        (got, expected)
        for got_rank, expected_rank in zip(runs[0], reference[0], strict=True)
        for got, expected in zip(got_rank["update"], expected_rank["update"], strict=True)
    ]
    difference = sum((got - expected) ** 2 for got, expected in pairs)
    return (difference / sum(expected**2 for _, expected in pairs)) ** 0.5


def main() -> None:
    args = parse_args()
    if args.worker:
        import torch.multiprocessing as mp

        mp.spawn(run_rank, (args,), nprocs=args.ranks)
        return

    variants: dict[str, pathlib.Path | None] = {}
    if args.pristine:
        variants["pristine"] = None
    if args.base:
        variants["base"] = args.base
    if args.overlay:
        variants["patched"] = args.overlay
    runs: dict[str, list[list[dict]]] = {name: [] for name in variants}
    for i in range(args.runs):
        for name, overlay in variants.items():
            runs[name].append(run_variant(name, overlay, args))
            slowest = max(rank["step_ms"] for rank in runs[name][-1])
            print(f"run {i + 1}, {name}: {slowest:.2f} ms", file=sys.stderr)

    reference = next(iter(runs.values()))
    options = {k: v for k, v in vars(args).items() if isinstance(v, int)}
    report: dict = {"arguments": options, "device": reference[0][0]["device"]}
    for name, of_variant in runs.items():
        summary = {}
        for field in ("step_ms", "exposed_ms", "newton_schulz", "peak_bytes", "growth_bytes"):
            if field in of_variant[0][0]:
                values = [max(rank[field] for rank in run) for run in of_variant]
                summary[field] = statistics.median(values)
                if field.endswith("_ms"):
                    summary[f"{field}_of_runs"] = values
        summary["update_difference"] = relative_difference(of_variant, reference)
        report[name] = summary
    names = list(runs)
    if len(names) == 2:
        report["step_ratio"] = report[names[0]]["step_ms"] / report[names[1]]["step_ms"]
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
