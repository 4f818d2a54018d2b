# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""Seconds and memory to plan DistMuon for a 1T model as one rank of 384, without and with the patch.

The process group is a fake one, so that a single CPU core plans what each of 384 ranks plans: 74 layers of
7 dense matrices, each owned by one rank during compute, and 3 stacks of 384 experts, one whole expert a rank.
Run it where ``import torchtitan`` gives the patched package by PYTHONPATH; the pristine one is what is
imported without PYTHONPATH. Each is measured in processes of its own::

    PYTHONPATH=OVERLAY python bench.py

The pristine plan takes minutes, so it is measured once by default, and the patched one five times. All ranks
must agree on the owners, so the two variants' plans are compared by digest. Prints one JSON object.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter

NUM_RANKS, NUM_EP = 384, 8
HIDDEN, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 6144, 128, 48, 16
NUM_EXPERTS, EXPERT_HIDDEN = 384, 1792

DENSE_SHAPES = {
    "attention.wq.weight": (NUM_HEADS * HEAD_DIM, HIDDEN),
    "attention.wk.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "attention.wv.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "attention.wo.weight": (HIDDEN, NUM_HEADS * HEAD_DIM),
    "moe.shared_experts.w1.weight": (EXPERT_HIDDEN, HIDDEN),
    "moe.shared_experts.w2.weight": (HIDDEN, EXPERT_HIDDEN),
    "moe.shared_experts.w3.weight": (EXPERT_HIDDEN, HIDDEN),
}
EXPERT_SHAPES = {
    "moe.routed_experts.inner_experts.w1_EFD": (NUM_EXPERTS, EXPERT_HIDDEN, HIDDEN),
    "moe.routed_experts.inner_experts.w2_EDF": (NUM_EXPERTS, HIDDEN, EXPERT_HIDDEN),
    "moe.routed_experts.inner_experts.w3_EFD": (NUM_EXPERTS, EXPERT_HIDDEN, HIDDEN),
}


def local_parameter(shape, mesh, placements):
    """A parameter as FSDP2 stores it in float32; its memory is never touched, so it is never resident."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local_shape, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return torch.nn.Parameter(
        DTensor.from_local(
            torch.empty(local_shape),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(stride),
        )
    )


def plan_digest(plans) -> str:
    """A digest of routes in one direction, owners, and this rank's packed schedules in both."""
    from torchtitan.distributed.flex_shard._optimizer_reshard_schedule import (
        _redistribution_plan_key,
    )

    digest = hashlib.sha256()
    for plan in plans:
        for item_plan in plan.redistribution_plans:
            digest.update(repr(_redistribution_plan_key(item_plan)).encode())
        for schedule in (
            plan.storage_to_compute_schedule,
            plan.compute_to_storage_schedule,
        ):
            fields = (
                schedule.input_split_sizes,
                schedule.output_split_sizes,
                schedule.input_spans_by_parameter,
                schedule.output_spans_by_parameter,
                schedule.has_remote_transfers,
            )
            digest.update(repr(fields).encode())
    return digest.hexdigest()


def measure(num_layers: int, rank: int) -> dict:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from torchtitan.distributed.flex_shard import (
        BucketConfig,
        build_dist_muon,
        ComputeLayout,
        dist_muon,
        Owned,
    )

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
    dense_mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp_shard",))
    expert_mesh = init_device_mesh(
        "cpu", (NUM_RANKS // NUM_EP, NUM_EP), mesh_dim_names=("efsdp", "ep")
    )
    params, layouts = {}, {}
    for layer in range(num_layers):
        for name, shape in DENSE_SHAPES.items():
            fqn = f"layers.{layer}.{name}"
            params[fqn] = local_parameter(shape, dense_mesh, [Shard(0)])
            layouts[fqn] = ComputeLayout({"dp_shard": Owned()})
        for name, shape in EXPERT_SHAPES.items():
            fqn = f"layers.{layer}.{name}"
            placements = [_StridedShard(0, split_factor=NUM_EP), Shard(0)]
            params[fqn] = local_parameter(shape, expert_mesh, placements)
            layouts[fqn] = ComputeLayout({"efsdp": Shard(0), "ep": Shard(0)})

    # DistMuon's planning alone: the pin wants CUDA, and reserves the exchange buffers after planning.
    dist_muon.DistMuon._validate_parameter_storage = lambda self: torch.device("cpu")
    dist_muon._BucketedRedistributionRuntime.reserve_buffers = lambda *_, **__: None
    begin = time.perf_counter()
    optimizer = build_dist_muon(
        [{"params": list(params.values()), "param_names": list(params)}],
        compute_sharding_by_fqn=layouts,
        bucket_configs=[
            BucketConfig(
                name=f"layers.{layer}",
                patterns=tuple(n for n in params if n.startswith(f"layers.{layer}.")),
            )
            for layer in range(num_layers)
        ],
    )
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    plans = optimizer._bucket_plans
    work, matrices, bytes_sent = Counter(), Counter(), 0
    for plan in plans:
        for item, item_plan in zip(
            plan.redistributed_items, plan.redistribution_plans, strict=True
        ):
            (owner,) = {
                participant
                for route in item_plan.storage_to_compute_routes
                for participant in route.destination.participants
            }
            matrices[owner] += 1
            work[owner] += dist_muon._estimate_muon_compute_cost(
                item.global_compute_shape, ns_steps=5
            )
        own = plan.group.participants.index(plan.group.local_participant)
        for schedule in (
            plan.storage_to_compute_schedule,
            plan.compute_to_storage_schedule,
        ):
            sizes = list(schedule.input_split_sizes)
            del sizes[own]  # what stays is not sent
            bytes_sent += sum(sizes) * plan.dtype.itemsize
    expert_bytes = sum(
        item.param.to_local().nbytes
        for plan in plans
        for item in plan.redistributed_items
        if "routed_experts" in item.fqn
    )
    mean = sum(work.values()) / NUM_RANKS
    largest = max(
        dist_muon._estimate_muon_compute_cost(torch.Size(s), ns_steps=5)
        for s in DENSE_SHAPES.values()
    )
    return {
        "seconds": seconds,
        "peak_rss_bytes": peak,
        "bytes_sent_per_step_by_this_rank": bytes_sent,
        "bytes_of_expert_parameters_in_any_transfer": expert_bytes,
        "newton_schulz_flops_busiest_over_mean": max(work.values()) / mean,
        "newton_schulz_flops_largest_matrix_over_mean": largest / mean,
        "matrices": sum(matrices.values()),
        "matrices_of_busiest_rank": max(matrices.values()),
        "ranks_without_matrix": NUM_RANKS - len(matrices),
        "plan_digest": plan_digest(plans),
    }


def run(variant: str, arguments: list[str]) -> dict:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if variant == "pristine":
        env.pop("PYTHONPATH", None)
    command = [sys.executable, __file__, "--measure", *arguments]
    return json.loads(
        subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=74)
    parser.add_argument(
        "--rank", type=int, default=17, help="the one of 384 ranks that plans"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pristine-repeats", type=int, default=1)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.layers, args.rank)))
        return

    arguments = ["--layers", str(args.layers), "--rank", str(args.rank)]
    repeats = {"patched": args.repeats, "pristine": args.pristine_repeats}
    runs = {v: [run(v, arguments) for _ in range(n)] for v, n in repeats.items() if n}
    results = {
        variant: all_runs[0]
        | {
            key: statistics.median(r[key] for r in all_runs)
            for key in ("seconds", "peak_rss_bytes")
        }
        | {"seconds_of_all_runs": [r["seconds"] for r in all_runs]}
        for variant, all_runs in runs.items()
    }

    from importlib.metadata import version

    report = {
        "what": "DistMuon's planning for a 1T model as one rank of 384, on one CPU core",
        "layers": args.layers,
        "statistic": "median of "
        + " and ".join(f"{n} {v} process(es)" for v, n in repeats.items()),
        "results": results,
        "command": f"PYTHONPATH=OVERLAY python bench.py {' '.join(arguments)}",
        "torch": version("torch"),
        "torchtitan": version("torchtitan"),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
    }
    print(json.dumps(report, indent=2))
    if len({r["plan_digest"] for r in results.values()}) != 1:
        sys.exit("bench.py: expected equal plans from both variants")


if __name__ == "__main__":
    main()
