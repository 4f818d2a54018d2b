"""Inputs made for tests alone: a ladder as `integration ladder` writes it, and profiles."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from integration.report import memory

GIB = 2**30
MACHINE = {"processor": "x86_64", "cores": 32, "gpus": 2, "gpu": "NVIDIA H200, 580.0"}


def ladder(**changed: Any) -> dict[str, Any]:
    """Return a ladder of four rungs; the last but one ran out of memory."""
    rungs = [
        _rung("pristine + cpu_device", "base", None, 0.9),
        _rung("+ shared_rope_cache", "add", "shared_rope_cache", 0.85),
        _rung("+ activation_offload", "add", "activation_offload", 0.5),
        _failed("full set - activation_offload", "activation_offload"),
        _rung("full set - embedding_skip_backward_gather", "without", "x", 0.52),
    ]
    return {
        "kind": "ladder", "config": "slice", "command": "integration ladder slice --rounds 2",
        "date": "2026-11-30", "machine": MACHINE, "torch": "2.14.1", "torchtitan": "0.3.0",
        "patches": {}, "ranks": 2, "tokens_a_step": 65536, "steps": 4, "warmup": 2, "rounds": 2,
        "published": [
            {"label": "start", "tokens_s_gpu": [90, 90]},
            {"label": "async unshard", "tokens_s_gpu": [996, 1210]},
            {"label": "end", "tokens_s_gpu": [1300, 1300]},
        ],
        "rungs": rungs,
    } | changed  # fmt: skip


def alone(label: str, step: float, *options: str, **changed: Any) -> dict[str, Any]:
    """Return a ladder of the full set alone, as `--only full --label LABEL -- OPTIONS` makes it."""
    rung = _rung("full set", "add", None, step)
    rung["median"]["mfu"] = 0.2 / step
    command = f"integration ladder slice --only full --label {label} -- {' '.join(options)}"
    return ladder(
        rungs=[rung], label=label, options=list(options), command=command, **changed
    )  # fmt: skip


def long(rungs: int = 24) -> dict[str, Any]:
    """Return a ladder of many rungs, on a CPU."""
    added = [_rung(f"+ patch_{n}", "add", f"patch_{n}", 1.0 + n / 50) for n in range(rungs)]
    machine = {"processor": "x86_64", "cores": 2, "gpus": 0}
    return ladder(config="mini", rungs=added, machine=machine, command="integration ladder mini")


def benches(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let two contributions have evidence of a benchmark that took pools apart, and no others."""
    held = {
        "default": {"active": 20 * GIB, "reserved": 23 * GIB},
        "all_gather_copy_in": {"active": 2 * GIB, "reserved": 8 * GIB},
    }
    arms = {arm: {"pools_at_peak": held} for arm in ("off", "on")}
    torches = {"pristine": {"uncapped": arms}, "patched": {"uncapped": arms}}
    files = {
        name: [write(folder / "benches" / name / "bench.json", torches)]
        for name in ("unshard_async_op", "unshard_async_h2d")
    }
    patch.setattr(memory, "kept", lambda contribution: files.get(contribution.name, []))


def _rung(label: str, kind: str, name: str | None, step: float) -> dict[str, Any]:
    pools = {
        "default stream": {"live": 20 * GIB, "cached": 3 * GIB},
        "all-gather stream": {"live": 2 * GIB, "cached": 6 * GIB},
    }
    run = {
        "loss": [9.0 - 0.3 * n for n in range(6)], "grad_norm": [1.0] * 6, "step_s": [step] * 4,
        "phases": {"forward_s": [step * 0.3] * 4}, "peak_allocated": 60 * GIB,
        "peak_reserved": 70 * GIB, "alloc_retries": 1, "pools": pools, "peak_host": 40 * GIB,
    }  # fmt: skip
    median = {
        "tokens_s_gpu": 32768 / step, "step_s": step, "forward_s": 0.3 * step,
        "backward_s": 0.5 * step, "optimizer_s": 0.2 * step, "exposed_communication_s": None,
    }  # fmt: skip
    return {
        "label": label, "kind": kind, "contribution": name, "set": [], "also_removed": [],
        "status": "ok", "reason": "", "runs": [run, run], "median": median,
        "spread": {"step_s": [step * 0.97, step * 1.05]}, "numbers": "equal",
    }  # fmt: skip


def _failed(label: str, name: str) -> dict[str, Any]:
    return _rung(label, "without", name, 1.0) | {
        "status": "failed", "reason": "out of GPU memory: 2.00 GiB were asked for, 0.4 are free",
        "runs": [], "median": {}, "spread": {}, "numbers": "not compared",
    }  # fmt: skip


def profile(optimizer_on_gpu: bool = True, kernels: int = 400) -> dict[str, Any]:
    """Return a profile of two steps as torch.profiler writes it: host events, streams, metadata."""
    chance = random.Random(0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7 "}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 20, "args": {"name": "stream 20 "}},
        {"ph": "M", "name": "thread_name", "pid": 9, "tid": 9, "args": {"name": "python"}},
        {"ph": "s", "id": 1, "pid": 9, "tid": 9, "ts": 1.0, "cat": "ac2g", "name": "ac2g"},
    ]

    def add(cat: str, name: str, ts: float, dur: float, tid: int = 7, pid: int = 0) -> None:
        args = {"stream": tid, "correlation": len(events), "grid": [1, 2, 3]}
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts}
        events.append(event | {"dur": dur, "args": args})

    for step in range(2):
        start = 5e6 + step * 200_000.0
        add("user_annotation", f"ProfilerStep#{step + 3}", start, 200_000.0, 9, 9)
        add("user_annotation", "Optimizer.step#DistMuon.step", start + 150_000, 45_000.0, 9, 9)
        for n in range(kernels):
            at = start + n * 150_000 / kernels
            add("cpu_op", "aten::mm", at, 20.0, 9, 9)
            name = "void cutlass::Kernel<" + "float, " * 20 + f"{n % 5}>"
            add("kernel", name, at, 140_000 / kernels * chance.uniform(0.7, 1.0))
        for n in range(20):
            at = start + n * 7000
            add("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", at, 4000.0, 20)
        if optimizer_on_gpu:
            add("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", start + 151_000, 20_000.0, 20)
            add("kernel", "newton_schulz", start + 160_000, 25_000.0)
            add("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", start + 170_000, 20_000.0, 20)
    return {"schemaVersion": 1, "traceEvents": events}


def write(path: Path, record: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return path
