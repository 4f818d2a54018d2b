# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""Rows, bytes and time of dispatch and combine, standard and deduplicated.

    torchrun --nproc-per-node 4 bench.py                      # CPU (gloo) or GPUs (NCCL)
    torchrun --nproc-per-node 4 bench.py --dim 6144 --experts 384

Both dispatchers are the patched TorchTitan's and exchange by all_to_all_single. Routing
is random and balanced; the experts return their input, so that the time is that of
dispatch, combine and their backward alone. Rows and bytes are those that leave a rank,
counted at the collective over forward and backward; rows are those of the model's width,
bytes are all. Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.overrides.dedup_dispatch import DedupTokenDispatcher

DISPATCHERS = {"standard": AllToAllTokenDispatcher, "dedup": DedupTokenDispatcher}


class Wire(TorchDispatchMode):
    """Counts what leaves this rank in all_to_all_single."""

    def __init__(self, rank: int, dim: int) -> None:
        super().__init__()
        self.rank, self.dim, self.rows, self.bytes = rank, dim, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            x, _, input_splits = args[:3]
            rows = sum(input_splits) - input_splits[self.rank]
            self.bytes += rows * x[:1].numel() * x.element_size() if len(x) else 0
            if x.ndim == 2 and x.shape[1] == self.dim:
                self.rows += rows
        return func(*args, **(kwargs or {}))


def measure(name: str, args: argparse.Namespace, device: torch.device, mesh) -> dict:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    dispatcher = (
        DISPATCHERS[name].Config(num_experts=args.experts, top_k=args.top_k).build()
    )
    dispatcher.wire_meshes(ep_mesh=mesh)
    ids_TK = torch.rand(args.tokens, args.experts).topk(args.top_k).indices.to(device)
    counts_E = torch.bincount(ids_TK.view(-1), minlength=args.experts)
    make = {"device": device, "requires_grad": True}
    x_TD = torch.randn(args.tokens, args.dim, dtype=torch.bfloat16, **make)
    scores_TK = torch.rand(args.tokens, args.top_k, **make)
    grad_TD = torch.randn_like(x_TD)

    def step() -> None:
        routed, _, metadata = dispatcher.dispatch(x_TD, scores_TK, ids_TK, counts_E)
        dispatcher.combine(routed, metadata, x_TD).backward(grad_TD)

    with Wire(rank, args.dim) as wire:
        step()
    seconds = []
    for _ in range(args.steps):
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    sent = torch.tensor([wire.rows, wire.bytes], dtype=torch.float64, device=device)
    dist.all_reduce(sent)
    rows, nbytes = (sent / dist.get_world_size()).tolist()
    return {
        # Two ways forward, two backward.
        "rows_a_token_each_way": round(rows / 4 / args.tokens, 3),
        "bytes_sent": round(nbytes),
        "median_step_ms": round(1e3 * statistics.median(seconds), 3),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    set_spmd_backend("default")  # as gloo needs it for unequal splits
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    result = {
        "arguments": vars(args),
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        **{name: measure(name, args, device, mesh) for name in DISPATCHERS},
    }
    if dist.get_rank() == 0:
        print(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
