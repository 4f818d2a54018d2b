# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""Step time and memory of full checkpointing, with the block inputs here and there.

    export PYTORCH_ALLOC_CONF=expandable_segments:True    # as run_train.sh does
    python bench.py                      # one H200, about 5 minutes
    python bench.py --longest            # the most tokens that fit, about 4 minutes
    python bench.py --smoke                # a CPU, seconds: shows that it runs

The blocks are TorchTitan's Qwen3-MoE blocks at the width of a 1T model: hidden 6,144,
48 query and 16 key/value heads of 128, experts of 1,792, 8 of them and a shared one a
token. Only the number of experts is smaller, which changes neither compute nor
activations. Attention is causal over the whole sequence.

All variants share the blocks and run in one process. Per sequence length: a first round
measures memory, each variant after an emptied cache; then rounds of one step of each
variant are timed, of which the median counts; then one step each is traced. Exposed
copy time is the time in which copies between device and host run and no kernel does.
Pinned bytes are what the variant holds after its first step.

Peers are given only the loop over the blocks, not the loss. TRL's OffloadActivations is
taken from an installed ``trl``, or with ``--trl FILE`` from its file
``trl/models/activation_offloading.py``, which then needs nothing else of TRL.

Prints one JSON object: milliseconds, bytes, tokens.
"""

import argparse
import gc
import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import types
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Callable

import torch
import torch.nn as nn
from torch.nn.attention import SDPBackend

from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.activation_offload import FullACOffload, HostOffloadEngine
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

GIB = 2**30
SHAPE = {
    "hidden": 6144,
    "heads": 48,
    "kv_heads": 16,
    "head_dim": 128,
    "expert_hidden": 1792,
    "experts": 16,
    "top_k": 8,
}
TOY = {
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "expert_hidden": 32,
    "experts": 4,
    "top_k": 2,
}


def build_block(shape: dict[str, int], max_tokens: int) -> nn.Module:
    init = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
    dim, top_k, experts = shape["hidden"], shape["top_k"], shape["experts"]
    hidden = shape["expert_hidden"]

    def norm() -> RMSNorm.Config:
        return RMSNorm.Config(
            normalized_shape=dim, param_init={"weight": nn.init.ones_}
        )

    return Qwen3TransformerBlock.Config(
        attention_norm=norm(),
        ffn_norm=norm(),
        attention=make_gqa_config(
            dim=dim,
            n_heads=shape["heads"],
            n_kv_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=CosSinRoPE.Config(
                dim=shape["head_dim"], max_seq_len=max_tokens, theta=1e6
            ),
            fuse_qkv=True,
        ),
        moe=make_moe_config(
            num_experts=experts,
            router=make_router_config(
                dim=dim,
                num_experts=experts,
                top_k=top_k,
                gate_param_init=init,
                score_func="sigmoid",
                route_norm=True,
            ),
            routed_experts=make_routed_experts_config(
                dim=dim,
                hidden_dim=hidden,
                num_experts=experts,
                top_k=top_k,
                param_init=dict.fromkeys(
                    ("w1_EFD", "w2_EDF", "w3_EFD"), init["weight"]
                ),
                comm_backend="standard",
            ),
            shared_experts=make_ffn_config(
                dim=dim, hidden_dim=hidden, w1_param_init=init, w2w3_param_init=init
            ),
        ),
    ).build()


class Stack(nn.Module):
    """Blocks between an input that requires grad and a loss that saves nothing."""

    def __init__(self, blocks: list[nn.Module], scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale
        self.layers = nn.ModuleDict({str(i): b for i, b in enumerate(blocks)})

    def forward(
        self, x_BLD: torch.Tensor, around_blocks: AbstractContextManager[Any]
    ) -> torch.Tensor:
        h_BLD = x_BLD * self.scale
        with around_blocks:
            for block in self.layers.values():
                h_BLD = block(h_BLD, None, None)
        return h_BLD.mean()


class Variant:
    """A stack under one kind of checkpointing, and a context around its blocks."""

    def __init__(
        self,
        blocks: list[nn.Module],
        scale: nn.Parameter,
        checkpointing: FullAC,
        around_blocks: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.checkpointing = checkpointing
        self.stack = Stack(blocks, scale)
        checkpointing.apply(self.stack)
        self.around_blocks = around_blocks

    def step(self, x_BLD: torch.Tensor) -> None:
        self.stack(x_BLD, self.around_blocks()).backward()


class MeasuredOffload(FullACOffload):
    """Has an engine of its own, and not the process's, to read the size of the pool."""

    engine: HostOffloadEngine

    def get_engine(self) -> HostOffloadEngine:
        self.engine = HostOffloadEngine(int(self.config.max_host_gib * GIB))
        return self.engine


def load_trl(file: Path | None) -> type | None:
    """Return TRL's class, from its file if given; None if it is not to be had."""
    if file is None:
        try:
            return importlib.import_module(
                "trl.models.activation_offloading"
            ).OffloadActivations
        except ImportError:
            return None
    import logging

    # The file takes a logger and two version checks from packages that are large.
    stand_ins = {
        "accelerate": {},
        "accelerate.logging": {"get_logger": logging.getLogger},
        "accelerate.utils": {},
        "accelerate.utils.versions": {"is_torch_version": lambda *_: True},
        "transformers": {"is_torch_npu_available": lambda: False},
        "psutil": {"virtual_memory": lambda: types.SimpleNamespace(percent=0.0)},
    }
    for name, attributes in stand_ins.items():
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__dict__.update(attributes)
            sys.modules[name] = module
    spec = importlib.util.spec_from_file_location("activation_offloading", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.OffloadActivations


def build_variants(
    blocks: list[nn.Module], scale: nn.Parameter, trl: Path | None, on_gpu: bool
) -> dict[str, Variant]:
    build = partial(Variant, blocks, scale)
    variants = {"full_ac": build(FullAC.Config().build())}
    for fraction in (0.5, 1.0):
        config = FullACOffload.Config(fraction=fraction, min_bytes=0)
        variants[f"offload_{fraction}"] = build(MeasuredOffload(config))
    variants["save_on_cpu_pinned"] = build(
        FullAC.Config().build(),
        lambda: torch.autograd.graph.save_on_cpu(pin_memory=on_gpu),
    )
    # One context for all steps, as its trainer has.
    if on_gpu and (offload_activations := load_trl(trl)) is not None:
        manager = offload_activations(use_streams=True)
        variant = build(FullAC.Config().build(), lambda: manager)
        manager.update_model_params(variant.stack)
        variants["trl_streams"] = variant
    return variants


def pinned_bytes(variant: Variant) -> int:
    if isinstance(variant.checkpointing, MeasuredOffload):
        return variant.checkpointing.engine.pool.allocated_bytes
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


def empty_caches(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
        torch.cuda.reset_peak_memory_stats()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_memory(
    variant: Variant, x_BLD: torch.Tensor, device: torch.device
) -> dict[str, int | None]:
    """Bytes after forward and at the peak of a step; the first step of the variant."""
    empty_caches(device)
    is_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if is_cuda else 0
    loss = variant.stack(x_BLD, variant.around_blocks())
    after = torch.cuda.memory_allocated() if is_cuda else 0
    loss.backward()
    synchronize(device)
    return {
        "kept_after_forward_bytes": after - before if is_cuda else None,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else None,
        "pinned_bytes": pinned_bytes(variant),
    }


def union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge intervals that overlap."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def trace_copies(variant: Variant, x_BLD: torch.Tensor) -> dict[str, float]:
    """Milliseconds of copies between device and host in a step, and of those exposed."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        variant.step(x_BLD)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    copies, kernels = [], []
    for event in events:
        interval = (event.get("ts", 0.0), event.get("ts", 0.0) + event.get("dur", 0.0))
        name = event.get("name", "")
        if event.get("cat") == "kernel":
            kernels.append(interval)
        elif event.get("cat") == "gpu_memcpy" and ("DtoH" in name or "HtoD" in name):
            copies.append(interval)

    def total(intervals: list[tuple[float, float]]) -> float:
        return sum(end - start for start, end in union(intervals)) / 1e3  # us to ms

    return {
        "copy_ms": round(total(copies), 3),
        "exposed_copy_ms": round(total(copies + kernels) - total(kernels), 3),
    }


def compare(
    variants: dict[str, Variant],
    x_BLD: torch.Tensor,
    device: torch.device,
    rounds: int,
) -> dict[str, Any]:
    # Gradients, kernels and workspaces, which belong to no variant.
    variants["full_ac"].step(x_BLD[:, :64])
    results = {
        name: measure_memory(variant, x_BLD, device)
        for name, variant in variants.items()
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            synchronize(device)
            start = time.perf_counter()
            variant.step(x_BLD)
            synchronize(device)
            times[name].append(1e3 * (time.perf_counter() - start))
    for name, variant in variants.items():
        results[name]["step_ms"] = round(statistics.median(times[name]), 3)
        results[name]["steps_ms"] = [round(t, 3) for t in times[name]]
        if device.type == "cuda" and name != "full_ac":
            results[name] |= trace_copies(variant, x_BLD)
    base = results["full_ac"]["step_ms"]
    for result in results.values():
        result["step_over_full_ac"] = round(result["step_ms"] / base - 1, 5)
    return results


def most_tokens(
    variant: Variant, hidden: int, dtype: torch.dtype, sequence: int, guess: int
) -> dict[str, int]:
    """The largest number of sequences of ``sequence`` tokens of which a step fits.

    Sequences are short to save time: attention's memory is linear in tokens, so one
    long sequence takes the same.
    """

    def fits(batch: int) -> bool:
        empty_caches(torch.device("cuda"))
        try:
            variant.step(
                torch.ones(batch, sequence, hidden, device="cuda", dtype=dtype)
            )
            torch.cuda.synchronize()
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            # Autograd holds what is left of a failed graph until the next backward.
            torch.ones(1, device="cuda", requires_grad=True).sum().backward()
            empty_caches(torch.device("cuda"))

    batch = guess
    if fits(batch):
        while fits(batch + 1):
            batch += 1
    else:
        while batch > 1 and not fits(batch := batch - 1):
            pass
    return {"sequences": batch, "tokens": batch * sequence}


def longest(args: argparse.Namespace, shape: dict, blocks, scale) -> dict[str, Any]:
    """Most tokens with and without offload, ``--depth`` applications of the blocks."""
    blocks = [blocks[i % len(blocks)] for i in range(args.depth)]
    total = torch.cuda.get_device_properties(0).total_memory
    sequence, result = 8192, {}
    for name, checkpointing in (
        ("full_ac", FullAC.Config().build()),
        ("offload_1.0", MeasuredOffload(FullACOffload.Config(max_host_gib=100.0))),
    ):
        variant = Variant(blocks, scale, checkpointing)
        peaks = []
        for batch in (2, 4):  # the peak is linear in tokens: two points give the line
            x_BLD = torch.ones(
                batch, sequence, shape["hidden"], device="cuda", dtype=scale.dtype
            )
            peaks.append(
                measure_memory(variant, x_BLD, x_BLD.device)["peak_reserved_bytes"]
            )
            del x_BLD
        slope = (peaks[1] - peaks[0]) / 2
        guess = max(1, int((total - GIB - peaks[0]) / slope) + 2)
        result[name] = most_tokens(
            variant, shape["hidden"], scale.dtype, sequence, guess
        ) | {"bytes_per_token": round(slope / sequence), "first_guess": guess}
        del variant, checkpointing
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl", type=Path, help="TRL's trl/models/activation_offloading.py")
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--depth", type=int, default=16, help="with --longest")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    shape = TOY if args.smoke else SHAPE
    if args.smoke:
        args.layers, args.tokens = 4, [64, 128]

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16
    # cuDNN's attention fails on some hosts, and the math one is quadratic in memory.
    ScaledDotProductAttention.sdpa_backends = (
        [SDPBackend.FLASH_ATTENTION] if on_gpu else [SDPBackend.MATH]
    )

    torch.manual_seed(0)
    blocks = []
    for _ in range(args.layers):
        with torch.device("meta"):
            block = build_block(shape, max(args.tokens))
        block.to_empty(device=device)
        with torch.no_grad(), device:
            block.init_states(buffer_device=device)
        for parameter in block.parameters():  # buffers stay in float32
            parameter.data = parameter.data.to(dtype)
        blocks.append(block.train())
    scale = nn.Parameter(torch.ones(shape["hidden"], device=device, dtype=dtype))

    report: dict[str, Any] = {
        "arguments": {
            k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()
        },
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "shape": shape,
        "parameters": sum(p.numel() for b in blocks for p in b.parameters()),
    }
    if args.longest:
        report["longest"] = longest(args, shape, blocks, scale)
    else:
        report["tokens"] = {}
        for tokens in args.tokens:
            # New ones each time: pools keep what the last length has used.
            variants = build_variants(blocks, scale, args.trl, on_gpu)
            if "trl_streams" not in variants:
                report["trl_streams"] = "not installed"
            x_BLD = torch.randn(1, tokens, shape["hidden"], device=device, dtype=dtype)
            expected = (args.layers - 1) * tokens * shape["hidden"] * dtype.itemsize
            report["tokens"][tokens] = {
                "offloaded_bytes_by_formula": expected,
                **compare(variants, x_BLD, device, args.rounds),
            }
            del x_BLD, variants
            empty_caches(device)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
