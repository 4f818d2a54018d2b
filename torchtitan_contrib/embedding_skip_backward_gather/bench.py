# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""What a backward saves by not gathering the token embedding: bytes, memory, time.

    torchrun --nproc-per-node 2 bench.py                                # CPU or GPUs
    torchrun --nproc-per-node 2 bench.py --vocab 256000 --dim 6144      # the 1T shape

The model has nothing but an embedding, a few feed-forward blocks and a head, so the
time is an upper bound: with more blocks the gather may hide behind their backward.
Both runs use the patched TorchTitan; the first asks FSDP for the gather again. Prints
one JSON object: bytes received a rank and backward, peak memory in bytes (GPUs only)
and the median step in milliseconds, and what full-size models save by arithmetic.
"""

import argparse
import gc
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common import Embedding

BYTES_PER_ELEMENT = 2  # bfloat16
FULL_SIZE = {"1T, 384 GPUs": (256_000, 6_144, 384)}  # vocabulary, dim, FSDP degree


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        return x_BLD + self.down(F.silu(self.up(x_BLD)))


class ToyDecoder(nn.Module):
    """The attributes that apply_fsdp_to_decoder reads."""

    enable_weight_tying = False

    def __init__(self, vocab: int, dim: int, num_blocks: int) -> None:
        super().__init__()
        self.tok_embeddings = Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim
        ).build()
        self.layers = nn.ModuleDict({str(i): Block(dim) for i in range(num_blocks)})
        self.norm = nn.RMSNorm(dim)
        # Small, so that the head does not set the peak memory.
        self.lm_head = nn.Linear(dim, 128, bias=False)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.tok_embeddings(tokens_BL)
        for block in self.layers.values():
            x_BLD = block(x_BLD)
        return self.lm_head(self.norm(x_BLD)).float().square().mean()


def measure(args: argparse.Namespace, device: torch.device, gather: bool) -> dict:
    torch.manual_seed(0)
    held_before = 0
    if device.type == "cuda":
        # The model of an earlier call is in reference cycles: it must not count.
        gc.collect()
        held_before = torch.cuda.memory_allocated()
    with device:
        model = ToyDecoder(args.vocab, args.dim, args.blocks)
    apply_fsdp_to_decoder(
        model,
        init_device_mesh(
            device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",)
        ),
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        pp_enabled=False,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    if gather:
        model.tok_embeddings.set_unshard_in_backward(True)

    sizes: list[int] = []
    foreach_all_gather = _fsdp_param_group.foreach_all_gather

    def record(*a, **k):
        result = foreach_all_gather(*a, **k)
        output = result.all_gather_output
        sizes.append(output.numel() * output.element_size())
        return result

    tokens_BL = torch.randint(args.vocab, (args.batch, args.seq_len), device=device)
    peaks, seconds = [], []
    try:
        _fsdp_param_group.foreach_all_gather = record
        for _ in range(args.warmup + args.steps):
            synchronize(device)
            start = time.perf_counter()
            loss = model(tokens_BL)
            sizes.clear()
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            loss.backward()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
            if device.type == "cuda":
                peaks.append(torch.cuda.max_memory_allocated() - held_before)
            model.zero_grad()
    finally:
        _fsdp_param_group.foreach_all_gather = foreach_all_gather
    return {
        "all_gathers_in_backward": len(sizes),
        "bytes_gathered_in_backward": sum(sizes),
        "peak_bytes_in_backward": max(peaks[args.warmup :]) if peaks else None,
        "median_step_ms": round(1e3 * statistics.median(seconds[args.warmup :]), 3),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=16_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    before = measure(args, device, gather=True)
    after = measure(args, device, gather=False)
    result = {
        "arguments": vars(args),
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "gathered": before,
        "skipped": after,
        "bytes_saved": before["bytes_gathered_in_backward"]
        - after["bytes_gathered_in_backward"],
        "full_size": {
            name: {
                # The all-gather's output, which is transient memory. All of it but
                # the rank's own shard crosses the network.
                "transient_bytes": vocab * dim * BYTES_PER_ELEMENT,
                "received_bytes": vocab
                * dim
                * BYTES_PER_ELEMENT
                * (degree - 1)
                // degree,
            }
            for name, (vocab, dim, degree) in FULL_SIZE.items()
        },
    }
    if dist.get_rank() == 0:
        print(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
