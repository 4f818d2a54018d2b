# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""The optimizer step of host-resident matrices: ours, peers, and the floor of the machine.

    python bench.py                                # one GPU: 222 matrices of 1792 x 6144
    python bench.py --peers FOLDER                 # FOLDER: pip install --target of peers
    python bench.py --matrices 6 --rows 64 --columns 128 --device cpu      # a dry run

The state is what one of 384 ranks holds of a 952B mixture of experts: 74 layers of w1
and w3 (1792 x 6144) and w2 (6144 x 1792), weight, gradient and momentum in float32 in
pinned host memory. All variants run in one process on the same weights and gradients,
one after another in every round; reported are medians over the rounds, without the
first. torch.optim.Muon on the CPU takes a part of the matrices, and its time for all
of them is calculated.

The floor of a split is the largest of what it asks of the link with both directions
busy, of host memory and of Newton-Schulz, each measured alone in the same process.
Prints one JSON object, times in seconds.
"""

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.distributed.flex_shard import (
    BucketConfig,
    build_dist_muon,
    ComputeLayout,
)
from torchtitan.distributed.flex_shard._host_memory import empty_host
from torchtitan.distributed.flex_shard._host_offload import _UpdateSplit
from torchtitan.distributed.flex_shard._offload_ring import _nbytes, _NUM_SLOTS
from torchtitan.distributed.flex_shard._host_passes import compile_host_passes
from torchtitan.distributed.flex_shard._matrix_batches import _NewtonSchulzSettings
from torchtitan.distributed.flex_shard.dist_muon import DistMuon

# Bytes a parameter over the link and through host memory; see _UpdateSplit.
SPLIT_BYTES = {
    "momentum_and_weight_on_host": (2, 2, 28),
    "weight_on_host": (8, 6, 24),
    "on_device": (12, 8, 20),
}
NEWTON_SCHULZ = _NewtonSchulzSettings((3.4445, -4.7750, 2.0315), steps=5, eps=1e-7)


class State:
    """Weights and gradients on the host, as FSDP2 with CPUOffloadPolicy leaves them."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.device = device
        shapes = [
            (args.columns, args.rows) if index % 3 == 1 else (args.rows, args.columns)
            for index in range(args.matrices)
        ]
        self.numel = sum(rows * columns for rows, columns in shapes)
        generator = torch.Generator().manual_seed(0)
        sample = torch.randn(args.rows * args.columns, generator=generator)
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
        self.params: list[torch.nn.Parameter] = []
        for shape in shapes:
            weight, gradient = (
                empty_host(sample.numel(), torch.float32, device).copy_(sample * scale)
                for scale in (0.02, 1e-3)
            )
            spec = distribute_tensor(
                torch.empty(1, *shape, device="meta"), mesh, [Shard(0)]
            )._spec
            param = torch.nn.Parameter(
                DTensor(weight.view(1, *shape), spec, requires_grad=False)
            )
            param.grad = DTensor(gradient.view(1, *shape), spec, requires_grad=False)
            self.params.append(param)

    def plain(self) -> list[torch.nn.Parameter]:
        """The same memory as plain 2-D parameters, which peers take."""
        result = []
        for param in self.params:
            plain = torch.nn.Parameter(param.to_local().detach()[0])
            plain.grad = param.grad.to_local()[0]
            result.append(plain)
        return result

    def muon(self, **kwargs):
        names = [f"layers.{index}" for index in range(len(self.params))]
        return build_dist_muon(
            [{"params": self.params, "param_names": names}],
            compute_sharding_by_fqn=dict.fromkeys(
                names, ComputeLayout({"dp_shard": Shard(0)})
            ),
            bucket_configs=[BucketConfig(patterns=("*",))],
            lr=1e-4,
            **kwargs,
        )


def synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize(device)


def timed(function: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begin


def median_of(function: Callable[[], object], device, repeats: int = 5) -> float:
    function()
    return statistics.median(timed(function, device) for _ in range(repeats))


def measure_rates(
    args: argparse.Namespace, device: torch.device, optimizer: DistMuon
) -> dict[str, float]:
    """Bytes a second of the link and of host memory; seconds a matrix of Newton-Schulz."""
    numel = args.sample
    sent, received = (empty_host(numel, torch.float32, device).zero_() for _ in "ab")
    here, there = (torch.zeros(numel, device=device) for _ in "ab")
    handle = torch.get_device_module(device)
    other = handle.Stream()

    def both() -> None:
        here.copy_(sent, non_blocking=True)
        with handle.stream(other):
            received.copy_(there, non_blocking=True)

    nbytes = 4 * numel
    rates = {
        "to_device_alone": nbytes
        / median_of(lambda: here.copy_(sent, non_blocking=True), device),
        "to_host_alone": nbytes
        / median_of(lambda: received.copy_(there, non_blocking=True), device),
        "link_each_way_both_busy": nbytes / median_of(both, device),
    }
    a, b, c = (torch.zeros(numel) for _ in "abc")
    rates["host_triad"] = 12 * numel / median_of(lambda: torch.add(a, b, out=c), device)
    passes = compile_host_passes(torch.float32)
    if passes is not None:
        half = torch.zeros(numel, dtype=torch.bfloat16)
        rates["host_pass_compiled"] = (
            10
            * numel
            / median_of(
                lambda: passes.apply_direction(a, half, decay=1.0, step_size=0.0),
                device,
            )
        )
    rates["host"] = max(v for k, v in rates.items() if k.startswith("host_"))
    batch = torch.randn(8, args.rows, args.columns, device=device).bfloat16()
    rates["newton_schulz_a_matrix"] = (
        median_of(lambda: optimizer._compute_matrices(NEWTON_SCHULZ, batch), device)
        / 8
    )
    return rates


def floors(rates: dict[str, float], state: State) -> dict[str, dict[str, float]]:
    result = {}
    for split, (to_device, to_host, host) in SPLIT_BYTES.items():
        bounds = {
            "link": max(to_device, to_host) * state.numel / rates["link_each_way_both_busy"],
            "host": host * state.numel / rates["host"],
            "newton_schulz": len(state.params) * rates["newton_schulz_a_matrix"],
        }
        result[split] = bounds | {"floor": max(bounds.values())}
    return result


def peer_steps(args: argparse.Namespace, state: State) -> dict[str, Callable | str]:
    """Steps of the peers found in ``--peers``; a sentence for what cannot run."""
    if not args.peers:
        return {}
    sys.path.append(str(args.peers))
    steps: dict[str, Callable | str] = {}
    try:
        muon = importlib.import_module("muonium").Muon
        for batch_size in args.muonium_batches:
            optimizer = muon(
                state.plain(),
                lr=1e-4,
                foreach=True,
                batch_size=batch_size,
                use_cautious_wd=False,
            )
            steps[f"muonium, batch {batch_size}"] = optimizer.step
    except Exception as error:
        steps["muonium"] = f"{type(error).__name__}: {error}"
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--matrices", type=int, default=222)
    parser.add_argument("--rows", type=int, default=1792)
    parser.add_argument("--columns", type=int, default=6144)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sample", type=int, default=1 << 28, help="elements for rates")
    parser.add_argument("--cpu-matrices", type=int, default=12)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--muonium-batches", type=int, nargs="+", default=[16])
    parser.add_argument("--trace", type=Path, help="folder for a Chrome trace")
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    device = torch.device(args.device, 0) if args.device != "cpu" else torch.device("cpu")
    if args.device == "cpu":
        args.sample = min(args.sample, 1 << 16)
    else:
        torch.cuda.set_device(device)
    state = State(args, device)

    forced = {"host_offload": True} if args.device == "cpu" else {}
    chosen = state.muon(**forced)
    rates = measure_rates(args, device, chosen)
    optimizers = {"auto": chosen}
    for split in _UpdateSplit:
        optimizers[split.value] = state.muon(update_split=split.value, **forced)
        optimizers[split.value].state = chosen.state  # one momentum serves all
    steps: dict[str, Callable | str] = {
        f"ours, {name}": optimizer.step for name, optimizer in optimizers.items()
    }
    peers = peer_steps(args, state)
    steps |= peers
    few = state.plain()[: args.cpu_matrices]
    cpu = torch.optim.Muon(few, lr=1e-4)
    on_cpu = f"torch.optim.Muon on the CPU, {len(few)} matrices"
    steps[on_cpu] = cpu.step

    for name in peers:
        try:
            step = steps[name]
            if callable(step):
                step()
        except Exception as error:
            steps[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    times: dict[str, list[float]] = {}
    for round_number in range(args.rounds):
        for name, step in steps.items():
            slow = not name.startswith("ours")
            if callable(step) and not (slow and round_number > 3):
                times.setdefault(name, []).append(timed(step, device))
    peak = {}
    if device.type == "cuda":
        for name, optimizer in optimizers.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            optimizer.step()
            pipeline = optimizer._host_offload._pipeline
            dtypes = pipeline.split.device_dtypes(torch.float32)
            peak[name] = {
                "pipeline_bytes": _NUM_SLOTS * _nbytes(pipeline._numel, dtypes),
                "newton_schulz_scratch_bytes": torch.cuda.max_memory_allocated() - before,
                "shared_ring_bytes": pipeline._ring.device_bytes,
                "shared_pinned_staging_bytes": pipeline._ring.pinned_bytes,
            }
        if args.trace:
            args.trace.mkdir(parents=True, exist_ok=True)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profile:
                chosen.step()
            profile.export_chrome_trace(str(args.trace / "optimizer_step.json"))

    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    calculated = medians[on_cpu] / len(few) * len(state.params)
    limits = floors(rates, state)
    best_floor = min(limits.values(), key=lambda bounds: bounds["floor"])["floor"]
    ours = medians["ours, auto"]
    peer_medians = [medians[name] for name in peers if name in medians]
    print(
        json.dumps(
            {
                "arguments": {
                    k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()
                },
                "device": torch.cuda.get_device_name() if args.device != "cpu" else "cpu",
                "threads": torch.get_num_threads(),
                "parameters": state.numel,
                "rates": rates,
                "floors": limits,
                "split_chosen": chosen._host_offload._split.value,
                "seconds": medians,
                "all_seconds": times,
                "cannot_run": {k: v for k, v in steps.items() if isinstance(v, str)},
                "on_the_cpu_all_matrices_calculated": calculated,
                "times_the_floor": ours / best_floor,
                "times_faster_than_best_peer": min(peer_medians) / ours
                if peer_medians
                else None,
                "times_faster_than_the_cpu_calculated": calculated / ours,
                "memory": peak,
            },
            indent=1,
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
