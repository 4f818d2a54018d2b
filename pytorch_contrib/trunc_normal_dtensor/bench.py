"""nn.init.trunc_normal_ of a sharded stack of experts, pristine against patched.

Each run is a process of its own, with its own PYTHONPATH, that starts the ranks.
Pristine and overlay alternate; medians over the runs are reported. On two gloo ranks,
and on two GPUs:

    python bench.py --pristine --overlay OVERLAY --patch trunc_normal_dtensor.patch \\
        --out evidence/gloo2.json
    python bench.py --pristine --overlay OVERLAY --patch trunc_normal_dtensor.patch \\
        --backend nccl --shape 384 1792 6144 --out evidence/nccl2.json

OVERLAY is a folder with a patched torch, to be put first on PYTHONPATH. The default
stack (48 x 1792 x 6144, fp32) is 2.1 GB in all, and pristine needs 4 to 8 times that.
Measured on each rank, of which the largest value counts:

collective_bytes  elements x element size of what each functional collective returns,
                  seen by a dispatch mode in a call that is not timed
seconds           one call, between barriers, device synchronised
extra_bytes       peak memory in that call beyond what was in use before it: resident
                  set size on the CPU (VmHWM, reset first), allocated memory on a GPU
"""

import argparse
import collections
import hashlib
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pristine", action="store_true", help="measure without overlay"
    )
    parser.add_argument(
        "--overlay", type=pathlib.Path, help="measure with this overlay"
    )
    parser.add_argument(
        "--patch", type=pathlib.Path, help="its sha256 goes to the JSON"
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", type=int, nargs=3, default=(48, 1792, 6144))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--std", type=float, default=0.02)
    parser.add_argument("--bounds", type=float, nargs=2, default=(-0.06, 0.06))
    parser.add_argument(
        "--runs", type=int, default=3, help="processes for each variant"
    )
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON here")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.worker and not (args.pristine or args.overlay):
        parser.error("nothing to measure: give --pristine, --overlay PATH, or both")
    return args


# ---- one rank ----------------------------------------------------------------------


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def run_rank(rank: int, args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor, DTensor, Shard
    from torch.utils._python_dispatch import TorchDispatchMode

    class CollectiveBytes(TorchDispatchMode):
        # CUDA random ops of a DTensor arrive as run_dtensor_rng_op
        supports_higher_order_operators = True

        def __init__(self) -> None:
            super().__init__()
            self.calls: collections.Counter[str] = collections.Counter()
            self.bytes: collections.Counter[str] = collections.Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(t, DTensor) for t in types):
                return NotImplemented  # collectives are below the DTensor
            out = func(*args, **(kwargs or {}))
            if not isinstance(func, torch._ops.OpOverload):
                return out
            namespace, name = func._schema.name.split("::")
            if namespace == "_c10d_functional" and not name.startswith(
                ("wait", "_wrap")
            ):
                self.calls[name] += 1
                self.bytes[name] += out.numel() * out.element_size()
            return out

    cuda = args.backend == "nccl"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.ranks))
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        args.backend,
        init_method=f"file://{args.worker}.rendezvous",
        rank=rank,
        world_size=args.ranks,
    )
    mesh = init_device_mesh(device.type, (args.ranks,))
    dtype = getattr(torch, args.dtype)

    def init(dtensor: DTensor) -> None:
        torch.nn.init.trunc_normal_(
            dtensor, std=args.std, a=args.bounds[0], b=args.bounds[1]
        )

    def empty(*shape: int) -> DTensor:
        meta = torch.empty(shape, dtype=dtype, device="meta")
        dtensor = distribute_tensor(meta, mesh, [Shard(0)])
        return torch.empty_like(dtensor, device=device).fill_(0)

    torch.manual_seed(0)
    init(empty(args.ranks, 64, 64))  # caches, connections, the library's own buffers
    weight = empty(*args.shape)

    def synchronise() -> None:
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()

    synchronise()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS
        before = _status("VmRSS")
    torch.manual_seed(1)
    start = time.perf_counter()
    init(weight)
    synchronise()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if cuda else _status("VmHWM")

    local = weight.to_local()
    digest = hashlib.sha256(local.flatten()[::1009].cpu().numpy().tobytes()).hexdigest()
    torch.manual_seed(1)
    with CollectiveBytes() as counted:
        init(weight)
    result = {
        "seconds": seconds,
        "extra_bytes": peak - before,
        "local_bytes": local.numel() * local.element_size(),
        "collective_calls": dict(counted.calls),
        "collective_bytes": dict(counted.bytes),
        "sample_sha256": digest,
        "torch": torch.__version__,
        "torch_file": torch.nn.init.__file__,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
    }
    pathlib.Path(f"{args.worker}.{rank}").write_text(json.dumps(result))
    dist.destroy_process_group()


# ---- all of them -------------------------------------------------------------------


def run_variant(args: argparse.Namespace, overlay: pathlib.Path | None) -> list[dict]:
    """The ranks' results of one run in a fresh process."""
    env = dict(os.environ, PYTHONPATH=str(overlay.resolve()) if overlay else "")
    with tempfile.TemporaryDirectory() as folder:
        stem = pathlib.Path(folder, "run")
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(stem)]
        subprocess.run(command, env=env, check=True)
        results = [
            json.loads(pathlib.Path(f"{stem}.{rank}").read_text())
            for rank in range(args.ranks)
        ]
    inside = (
        overlay is not None
        and overlay.resolve()
        in pathlib.Path(results[0].pop("torch_file")).resolve().parents
    )
    if overlay is not None and not inside:
        raise SystemExit(
            f"expected torch.nn.init from {overlay}, got another one: the overlay does "
            "not patch it, and the numbers would be pristine's. Rebuild the overlay."
        )
    return results


def summarise(runs: list[list[dict]]) -> dict:
    """Medians over runs of the largest value among the ranks."""

    def median(field: str) -> float:
        return statistics.median(max(rank[field] for rank in run) for run in runs)

    first = runs[0][0]
    return {
        "seconds": median("seconds"),
        "seconds_of_runs": [max(rank["seconds"] for rank in run) for run in runs],
        "extra_bytes": median("extra_bytes"),
        "extra_over_local": round(median("extra_bytes") / first["local_bytes"], 3),
        **{
            k: first[k] for k in ("local_bytes", "collective_calls", "collective_bytes")
        },
        "sample_sha256": [rank["sample_sha256"] for rank in runs[0]],
    }


def main() -> None:
    args = parse_args()
    if args.worker:
        import torch.multiprocessing as mp

        mp.spawn(run_rank, (args,), nprocs=args.ranks)
        return

    variants: dict[str, pathlib.Path | None] = {}
    if args.pristine:
        variants["pristine"] = None
    if args.overlay:
        variants["patched"] = args.overlay
    runs: dict[str, list[list[dict]]] = {name: [] for name in variants}
    for i in range(args.runs):
        for name, overlay in variants.items():
            runs[name].append(run_variant(args, overlay))
            slowest = max(rank["seconds"] for rank in runs[name][-1])
            print(
                f"run {i + 1} of {args.runs}, {name}: {slowest:.2f} s", file=sys.stderr
            )

    rank = next(iter(runs.values()))[0][0]
    shown = [a for a in sys.argv[1:]]
    for flag, value in (("--overlay", "OVERLAY"), ("--patch", None), ("--out", None)):
        if flag in shown:
            at = shown.index(flag) + 1
            shown[at] = value or pathlib.Path(shown[at]).name
    report = {
        "command": " ".join(["python", "bench.py", *shown]),
        "patch_sha256": (
            hashlib.sha256(args.patch.read_bytes()).hexdigest() if args.patch else None
        ),
        "versions": {"torch": rank["torch"], "python": platform.python_version()},
        "machine": {
            "device": rank["device"],
            "cores": len(os.sched_getaffinity(0)),
            "load_average_at_end": os.getloadavg(),
        },
        "shape": list(args.shape),
        "dtype": args.dtype,
        "ranks": args.ranks,
        "backend": args.backend,
        "results": {name: summarise(r) for name, r in runs.items()},
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
