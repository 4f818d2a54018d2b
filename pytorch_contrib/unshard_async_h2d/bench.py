"""Step time and memory with CPUOffloadPolicy and `set_unshard_async_op` off and on.

    python bench.py --pristine                # two GPUs, NCCL
    python bench.py --pristine --gpus 1       # one GPU, whose copies have no all-gather to follow
    python bench.py --trace DIR               # also DIR/off.json.gz and on.json.gz, for Perfetto
    python bench.py --smoke                   # two gloo ranks on the CPU, no memory figures

PYTHONPATH says which torch is measured (`integration env NAME` prints it); `--pristine` adds a run
without it. The process that is started by hand only launches `torchrun`.

The layers are those of the 1T model, 6,144 wide with experts of 1,792, but fewer (16 experts, 4
layers), with activation checkpointing and without an optimizer. Tokens are dealt to the experts in
turn. One process alternates between off and on, so that both see the same machine, and takes the
median over the rounds. It also measures two floors that no order of copies can get below: the step
without any copy or collective, and the copies to the device alone. Prints one JSON object. Units:
bytes, seconds.
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
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

CONTRIBUTION = "unshard_async_h2d"
HEAD_DIM = 128


class Experts(nn.Module):
    """SwiGLU experts, each of which gets as many rows."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w3 = nn.Parameter(torch.empty(experts, dim, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [experts, rows, dim]
        hidden = nn.functional.silu(torch.bmm(x, self.w1)) * torch.bmm(x, self.w3)
        return torch.bmm(hidden, self.w2)


class Layer(nn.Module):
    """Pre-norm attention with grouped queries, then routed experts and a shared one."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        dim, self.top_k, self.experts_count = args.dim, args.top_k, args.experts
        self.heads, self.kv_heads = args.heads, args.kv_heads
        self.attention_norm = nn.RMSNorm(dim)
        self.q = nn.Linear(dim, args.heads * HEAD_DIM, bias=False)
        self.kv = nn.Linear(dim, 2 * args.kv_heads * HEAD_DIM, bias=False)
        self.out = nn.Linear(args.heads * HEAD_DIM, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.experts = Experts(args.experts, dim, args.hidden)
        self.shared = Experts(1, dim, args.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, dim]
        tokens, dim = x.shape
        h = self.attention_norm(x)
        q = self.q(h).view(1, tokens, self.heads, HEAD_DIM).transpose(1, 2)
        kv = self.kv(h).view(1, tokens, 2, self.kv_heads, HEAD_DIM)
        k, v = kv.permute(2, 0, 3, 1, 4)
        attention = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(attention.transpose(1, 2).reshape(tokens, -1))
        h = self.mlp_norm(x)
        rows = h.repeat(self.top_k, 1).view(self.experts_count, -1, dim)
        routed = self.experts(rows).view(self.top_k, tokens, dim).sum(0)
        return x + routed / self.top_k + self.shared(h[None])[0]


def build_model(args: argparse.Namespace) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(args) for _ in range(args.layers)))
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    for layer in model:
        checkpoint(layer)
    for module in (*model, model):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            offload_policy=CPUOffloadPolicy(pin_memory=args.device == "cuda"),
        )
        if args.device == "cpu":  # gloo has no average reduction
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    values = (
        torch.randn(2**22) * args.dim**-0.5
    )  # repeated: drawing them all takes a minute
    for name, param in model.named_parameters():
        local = param.to_local().detach().view(-1)
        if "norm" in name:
            local.fill_(1)
        else:
            for part in local.split(len(values)):
                part.copy_(values[: len(part)])
    # What async unshards need in forward; set for both values of the flag
    for layer, next_layer in zip(model, list(model)[1:], strict=False):
        layer.set_modules_to_forward_prefetch([next_layer])
    return model


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.cuda = args.device == "cuda"
        self.model = build_model(args)
        shape = (args.tokens, args.dim)
        self.x = torch.randn(shape, device=args.device, dtype=torch.bfloat16)

    def set_flag(self, async_op: bool) -> None:
        if hasattr(self.model, "set_unshard_async_op"):
            self.model.set_unshard_async_op(async_op)
        else:  # PyTorch has the private name only
            self.model._set_unshard_async_op(async_op)

    def step(self) -> torch.Tensor:
        # The input needs a gradient for backward to reach each layer's post-backward in time
        loss = self.model(self.x.detach().requires_grad_()).float().square().mean()
        loss.backward()
        return loss.detach()

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, fn: Callable[[], Any], times: int = 1) -> float:
        dist.barrier()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            fn()
        self.synchronize()
        return (time.perf_counter() - start) / times

    def parity(self) -> bool:
        """Loss and gradients with the flag off and on, from the same weights, bitwise."""
        found = []
        torch.use_deterministic_algorithms(True)  # else attention's backward varies
        for async_op in (False, True):
            self.set_flag(async_op)
            self.model.zero_grad()
            loss = self.step()
            grads = [p.grad.to_local().clone() for p in self.model[0].parameters()]
            found.append([loss.cpu(), *grads])
        torch.use_deterministic_algorithms(False)
        self.model.zero_grad()
        return all(torch.equal(off, on) for off, on in zip(*found, strict=True))

    def train(self) -> None:
        self.step()
        self.model.zero_grad()

    def measure(self, async_op: bool) -> dict[str, Any]:
        """Time one round and find its memory."""
        self.set_flag(async_op)
        if self.cuda:
            self.synchronize()
            torch.cuda.empty_cache()
        self.train()  # the allocator fills its pools
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        result: dict[str, Any] = {"seconds": self.seconds(self.train, self.args.steps)}
        if self.cuda:
            stats = torch.cuda.memory_stats()
            result["peak_reserved"] = stats["reserved_bytes.all.peak"]
            result["peak_active"] = stats["active_bytes.all.peak"]
            result["reserved_by_stream"] = self.reserved_by_stream()
        return result

    def reserved_by_stream(self) -> dict[str, int]:
        comm_ctx = self.model._get_fsdp_state()._comm_ctx
        names = {0: "compute"}
        for name in ("all_gather_copy_in", "all_gather", "reduce_scatter"):
            names[getattr(comm_ctx, f"{name}_stream").cuda_stream] = name
        reserved: dict[str, int] = defaultdict(int)
        for segment in torch.cuda.memory_snapshot():
            reserved[names.get(segment["stream"], "other")] += segment["total_size"]
        return dict(reserved)

    def rounds(self) -> dict[str, Any]:
        """Off and on in turn, as many times as there are rounds."""
        arms: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
        for _ in range(self.args.rounds):
            for name, found in arms.items():
                found.append(self.measure(name == "on"))
        result = {}
        for name, found in arms.items():
            seconds = [arm["seconds"] for arm in found]
            result[name] = {
                "step_seconds_median": statistics.median(seconds),
                "step_seconds": seconds,
            }
            if self.cuda:
                worst = max(found, key=lambda arm: arm["peak_reserved"])
                result[name] |= {k: v for k, v in worst.items() if k != "seconds"}
        return result

    def compute(self) -> None:
        self.step()
        for layer in self.model:
            for group in layer._get_fsdp_state()._fsdp_param_groups:
                for fsdp_param in group.fsdp_params:  # else the next step adds to it
                    fsdp_param.unsharded_accumulated_grad = None

    def copies_both_ways(
        self, copy_all: Callable[[], None], shards: list[list[torch.Tensor]]
    ) -> float:
        """The copies to the device while gradients, half as much, go to the host."""
        sizes = [t.numel() for shard in shards for t in shard]
        on_device = torch.zeros(max(sizes), device=self.args.device)
        on_host = torch.zeros(max(sizes), pin_memory=True)
        stream = torch.cuda.Stream()

        def copy_both() -> None:
            with torch.cuda.stream(stream):
                for size in sizes:
                    on_host[:size].copy_(on_device[:size], non_blocking=True)
            copy_all()

        return statistics.median(
            self.seconds(copy_both) for _ in range(self.args.rounds)
        )

    def floors(self) -> dict[str, float | None]:
        """What a step takes without copies and collectives, and the copies without it."""
        layers = list(self.model)
        shards = [
            [p.to_local().detach() for p in layer.parameters()] for layer in layers
        ]

        def copy_all() -> None:
            for shard in (*shards, *reversed(shards)):  # in forward, in backward
                for tensor in shard:
                    tensor.to(self.args.device, non_blocking=True)

        copy_all()
        copies = statistics.median(
            self.seconds(copy_all) for _ in range(self.args.rounds)
        )
        both_ways = self.copies_both_ways(copy_all, shards) if self.cuda else None
        count = sum(t.numel() * t.element_size() for shard in shards for t in shard)
        # All layers stay unsharded and gradients stay where they are
        self.model.set_reshard_after_forward(False)
        self.model.set_reshard_after_backward(False)
        self.model.set_requires_gradient_sync(False)
        self.compute()
        compute = statistics.median(
            self.seconds(self.compute) for _ in range(self.args.rounds)
        )
        return {
            "compute_seconds": compute,
            "copies_to_device_seconds": copies,
            "copies_to_device_bytes": 2 * count,
            "copies_to_device_beside_those_to_host_seconds": both_ways,
            "floor_seconds": max(compute, copies),
        }

    def trace(self, folder: Path) -> None:
        """Keep a Chrome trace of one step of each, of rank 0."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("off", "on"):
            self.set_flag(name == "on")
            self.train()
            self.synchronize()
            dist.barrier()
            with torch.profiler.profile() as profiler:
                self.train()
                self.synchronize()
            if dist.get_rank() == 0:
                profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))


def worker(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # One attention kernel everywhere: whether cuDNN's is taken depends on its version.
        torch.backends.cuda.enable_cudnn_sdp(False)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    bench = Bench(args)
    result: dict[str, Any] = {
        "torch_git": torch.version.git_version,
        "patched": is_patched(),
        "parity_bitwise": bench.parity(),
        "uncapped": bench.rounds(),
    }
    if args.trace and is_patched():
        bench.trace(Path(args.trace))
    result["floors"] = bench.floors()  # last, as it leaves the layers unsharded
    if dist.get_rank() == 0:
        Path(args.out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def is_patched() -> bool:
    return find_spec("torch.distributed.fsdp._fully_shard._fsdp_h2d") is not None


def launch(args: argparse.Namespace, pythonpath: str | None) -> dict[str, Any]:
    env = dict(os.environ)
    if pythonpath is not None:
        env["PYTHONPATH"] = pythonpath
    env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # which deterministic algorithms need
    # torchrun would set it to 1
    cores = max(1, len(os.sched_getaffinity(0)) // args.gpus)
    env.setdefault("OMP_NUM_THREADS", str(cores))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={args.gpus}", __file__, *sys.argv[1:]]
        # Standard output is the JSON object's
        subprocess.run(
            [*command, "--out", str(out)], env=env, check=True, stdout=sys.stderr
        )
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=2, help="ranks, one each")
    parser.add_argument("--dim", type=int, default=6144)
    parser.add_argument("--hidden", type=int, default=1792, help="of an expert")
    parser.add_argument("--heads", type=int, default=48)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--rounds", type=int, default=5, help="of off and on")
    parser.add_argument("--steps", type=int, default=2, help="of a round")
    parser.add_argument("--trace", metavar="DIR", help="keep a Chrome trace of each")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument(
        "--pristine", action="store_true", help="also run without PYTHONPATH"
    )
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.device, args.dim, args.hidden, args.tokens = "cpu", 64, 32, 16
        args.heads, args.kv_heads, args.experts, args.top_k = 2, 1, 4, 2
        args.layers, args.rounds, args.steps = 3, 1, 1
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
            "gpu": torch.cuda.get_device_name() if args.device == "cuda" else None,
        },
        "torch": version("torch"),
        "cuda": torch.version.cuda,
        "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF", ""),
        "config": {k: v for k, v in vars(args).items() if k not in ("out", "trace")},
        "patched": launch(args, None),
    }
    if not record["patched"]["patched"]:
        sys.exit(
            f"expected a torch with {CONTRIBUTION}, got one without it, so nothing was compared; "
            f'first run: eval "$(python -m integration env {CONTRIBUTION})"'
        )
    if args.pristine:
        record["pristine"] = launch(args, "")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
