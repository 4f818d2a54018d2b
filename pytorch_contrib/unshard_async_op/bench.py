"""Memory and step time of FSDP2 with `set_unshard_async_op` off and on.

    python bench.py                        # two GPUs, NCCL
    python bench.py --pristine             # the installed torch as well, for comparison
    python bench.py --smoke                # two gloo ranks on the CPU, no memory figures

PYTHONPATH says which torch is measured (`integration env NAME` prints it); `--pristine` adds a run
without it. The process that is started by hand only launches `torchrun`; one run measures both
settings of the flag, interleaved.

A run trains a stack of large layers, so that one layer's all-gather buffer is a visible share of
memory, first without a memory cap and then with a cap half-way between what the two settings
reserved. Prints one JSON object. Units: bytes, seconds.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

CONTRIBUTION = "unshard_async_op"


def set_unshard_async_op(model: nn.Module, async_op: bool) -> None:
    if hasattr(model, "set_unshard_async_op"):
        model.set_unshard_async_op(async_op)
    else:  # the pristine torch
        model._set_unshard_async_op(async_op)


class Layer(nn.Module):
    """Pre-norm attention and MLP: 12 * dim**2 parameters."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(b, s, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(b, s, d))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


def build_model(args: argparse.Namespace) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(
            *(Layer(args.dim, args.dim // 128 or 1) for _ in range(args.layers))
        )
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        )
        if args.device == "cpu":  # gloo has no average reduction
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=args.device)
    torch.manual_seed(dist.get_rank())
    for name, param in model.named_parameters():
        local = param.to_local().detach()
        local.fill_(1) if "norm" in name else local.normal_(
            std=args.dim**-0.5 / args.layers
        )
    # The default's implicit prefetch and this one overlap alike, so set it for both settings
    for layer, next_layer in zip(model, list(model)[1:], strict=False):
        layer.set_modules_to_forward_prefetch([next_layer])
    return model


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = build_model(args)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        shape = (1, args.tokens, args.dim)
        self.x = torch.randn(shape, device=args.device, dtype=torch.bfloat16)

    def step(self, update: bool = True) -> torch.Tensor:
        loss = self.model(self.x).float().square().mean()
        loss.backward()
        if update:
            self.optim.step()
        return loss.detach()

    def parity(self) -> bool:
        """Loss and gradients with the flag off and on, from the same weights, bitwise."""
        found = []
        torch.use_deterministic_algorithms(True)  # else attention's backward varies
        for async_op in (False, True):
            set_unshard_async_op(self.model, async_op)
            self.model.zero_grad()
            loss = self.step(update=False)
            grads = [
                p.grad.to_local().clone().cpu() for p in self.model[0].parameters()
            ]
            found.append([loss.cpu(), *grads])
        torch.use_deterministic_algorithms(False)
        self.model.zero_grad()
        return all(torch.equal(off, on) for off, on in zip(*found, strict=True))

    def measure(self, async_op: bool) -> dict[str, Any]:
        """Time `steps` steps and find the memory of each stream's pool at its peak."""
        cuda = self.args.device == "cuda"
        set_unshard_async_op(self.model, async_op)
        self.model.zero_grad()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats()["num_alloc_retries"] if cuda else 0
        times = []
        for i in range(self.args.warmup + self.args.steps):
            dist.barrier()
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            self.step()
            self.model.zero_grad()
            if cuda:
                torch.cuda.synchronize()
            if i >= self.args.warmup:
                times.append(time.perf_counter() - start)
        result: dict[str, Any] = {"async_op": async_op, "step_seconds": times}
        if cuda:
            stats = torch.cuda.memory_stats()
            result["alloc_retries"] = stats["num_alloc_retries"] - retries
            result["peak_reserved"] = stats["reserved_bytes.all.peak"]
            result["peak_active"] = stats["active_bytes.all.peak"]
            result["pools"] = self.pools_at_peak()
        return result

    def pools_at_peak(self) -> dict[str, dict[str, int]]:
        """One more step, with a snapshot at each layer's backward; keeps the largest."""
        ctx = self.model._get_fsdp_state()._comm_ctx
        names = {0: "compute", torch.cuda.current_stream().cuda_stream: "compute"}
        for name in (
            "all_gather_copy_in",
            "all_gather",
            "reduce_scatter",
            "all_reduce",
        ):
            names[getattr(ctx, f"{name}_stream").cuda_stream] = name
        largest: dict[str, dict[str, int]] = {}

        def snapshot(*_: Any) -> None:
            nonlocal largest
            pools: dict[str, dict[str, int]] = {}
            for segment in torch.cuda.memory_snapshot():
                pool = pools.setdefault(
                    names.get(segment["stream"], "other"), {"reserved": 0, "active": 0}
                )
                pool["reserved"] += segment["total_size"]
                pool["active"] += segment["active_size"]
            if sum(p["active"] for p in pools.values()) > sum(
                p["active"] for p in largest.values()
            ):
                largest = pools

        def before_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(snapshot)

        handles = [layer.register_forward_hook(before_backward) for layer in self.model]
        self.step()
        for handle in handles:
            handle.remove()
        self.model.zero_grad()
        return largest


def summary(arms: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one setting over its rounds; memory is the worst round's."""
    times = [t for arm in arms for t in arm["step_seconds"]]
    result: dict[str, Any] = {
        "step_seconds_median": statistics.median(times),
        "step_seconds_min": min(times),
        "step_seconds_max": max(times),
        "num_steps": len(times),
    }
    if "pools" in arms[0]:
        worst = max(arms, key=lambda arm: arm["peak_reserved"])
        pools = worst["pools"]
        reserved = sum(pool["reserved"] for pool in pools.values())
        all_gather = ("all_gather_copy_in", "all_gather")
        held = sum(pools.get(name, {"reserved": 0})["reserved"] for name in all_gather)
        result |= {
            "peak_reserved": worst["peak_reserved"],
            "peak_active": worst["peak_active"],
            "peak_reserved_minus_active": worst["peak_reserved"] - worst["peak_active"],
            "pools_at_peak": pools,
            "all_gather_pools_share_of_reserved": held / reserved,
            "alloc_retries": [arm["alloc_retries"] for arm in arms],
        }
    return result


def run_phase(trainer: Trainer, rounds: int) -> dict[str, Any]:
    arms = [trainer.measure(on) for _ in range(rounds) for on in (False, True)]
    return {"off": summary(arms[::2]), "on": summary(arms[1::2])}


def worker(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # One attention kernel everywhere: whether cuDNN's is taken depends on its version.
        torch.backends.cuda.enable_cudnn_sdp(False)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    trainer = Trainer(args)
    result: dict[str, Any] = {
        "torch_git": torch.version.git_version,
        "patched": hasattr(FSDPModule, "set_unshard_async_op"),
    }
    result["parity_bitwise"] = trainer.parity()
    result["uncapped"] = uncapped = run_phase(trainer, args.rounds)
    if args.device == "cuda":
        total = torch.cuda.get_device_properties().total_memory
        arms = (uncapped["off"], uncapped["on"])
        between = sum(arm["peak_reserved"] for arm in arms) / 2
        needed = 1.02 * max(arm["peak_active"] for arm in arms)  # with some room
        cap = args.cap_gib * 2**30 or max(between, needed)
        # One cap for all ranks: ranks reserve a little differently
        cap_tensor = torch.tensor(cap, device=args.device, dtype=torch.float64)
        dist.all_reduce(cap_tensor, dist.ReduceOp.MAX)
        result["cap"] = int(cap_tensor)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(result["cap"] / total)
        result["capped"] = run_phase(trainer, args.rounds)
    if dist.get_rank() == 0:
        Path(args.out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def launch(pythonpath: str | None) -> dict[str, Any]:
    env = dict(os.environ)
    if pythonpath is not None:
        env["PYTHONPATH"] = pythonpath
    env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # which deterministic algorithms need
    # torchrun would set it to 1
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", __file__, *sys.argv[1:], "--out", str(out)]
        subprocess.run(command, env=env, check=True)
        return json.loads(out.read_text())


def gpu_name() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dim", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2, help="of off and on")
    parser.add_argument("--warmup", type=int, default=2, help="steps")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--cap-gib", type=float, default=0, help="memory cap; 0: half-way"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument(
        "--pristine", action="store_true", help="also run without PYTHONPATH"
    )
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.device, args.dim, args.layers, args.tokens = "cpu", 64, 3, 16
        args.rounds, args.warmup, args.steps = 1, 1, 2
    if args.out:
        worker(args)
        return

    record: dict[str, Any] = {
        "contribution": CONTRIBUTION,
        "date": date.today().isoformat(),
        "command": " ".join(["python", Path(__file__).name, *sys.argv[1:]]),
        "machine": {
            "processor": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "gpus": torch.cuda.device_count(),
            "gpu": gpu_name(),
        },
        "torch": version("torch"),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version()))
        if torch.cuda.is_available()
        else None,
        "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "config": {k: v for k, v in vars(args).items() if k != "out"},
        "patched": launch(None),
    }
    if not record["patched"]["patched"]:
        sys.exit(
            f"expected a torch with {CONTRIBUTION}, got one without it, so nothing was compared; "
            f'first run: eval "$(python -m integration env {CONTRIBUTION})"'
        )
    if args.pristine:
        record["pristine"] = launch("")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
