# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""What parallelism.fsdp_unshard_async_op changes: memory reserved, and time.

    torchrun --nproc-per-node 2 bench.py                                    # GPUs
    torchrun --nproc-per-node 2 bench.py --dim 128 --blocks 4 --vocab 1000  # CPU: time only

Trains the same decoder-shaped model with the option off and on and prints one JSON
object: the most memory that the allocator reserved and that tensors used, in bytes
(GPUs only), memory per stream, and the median step in milliseconds. Where memory is
short, first try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: run with and without.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common import Embedding


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
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.tok_embeddings(tokens_BL)
        for block in self.layers.values():
            x_BLD = block(x_BLD)
        logits_BLV = self.lm_head(self.norm(x_BLD))
        return F.cross_entropy(logits_BLV.flatten(0, 1).float(), tokens_BL.flatten())


def measure(args: argparse.Namespace, device: torch.device, async_op: bool) -> dict:
    cuda = device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
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
        unshard_async_op=async_op,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens_BL = torch.randint(args.vocab, (args.batch, args.seq_len), device=device)
    seconds, losses = [], []
    for step in range(args.warmup + args.steps):
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        loss = model(tokens_BL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    result: dict = {
        "median_step_ms": round(1e3 * statistics.median(seconds[args.warmup :]), 3),
        "losses": losses,
    }
    if cuda:
        per_stream: Counter[str] = Counter()
        for segment in torch.cuda.memory_snapshot():
            name = "compute" if segment["stream"] == 0 else "others"
            per_stream[name] += segment["total_size"]
        result |= {
            "max_reserved_bytes": torch.cuda.max_memory_reserved(),
            "max_active_bytes": torch.cuda.memory_stats()["active_bytes.all.peak"],
            "reserved_bytes_per_stream": dict(per_stream),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--dim", type=int, default=4_096)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=4_096)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    off, on = (measure(args, device, async_op) for async_op in (False, True))
    result = {
        "arguments": vars(args),
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "losses_bitwise_equal": off.pop("losses") == on.pop("losses"),
        "off": off,
        "on": on,
    }
    if dist.get_rank() == 0:
        print(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
