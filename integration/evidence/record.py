"""Evidence files: what was measured, on which patch, where, and by which command."""

import gzip
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from integration.ground import files
from integration.ground.machine import look
from integration.patchset.patch import Contribution


def write(contribution: Contribution, name: str, command: str, results: dict) -> Path:
    """Write ``evidence/<name>.json``, bound to the patch by its sha256; return the path."""
    path = contribution.folder / "evidence" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    files.write_json(path, record(contribution, command, results), indent=1)
    return path


def record(contribution: Contribution, command: str, results: dict) -> dict:
    """Return ``results`` after what they hold for; nothing in them takes the place of that."""
    captured = {
        "contribution": contribution.name,
        "patch_sha256": contribution.sha256,
        "date": date.today().isoformat(),
        "command": command,
        "machine": machine(),
        "torch": version("torch"),
        "torchtitan": version("torchtitan"),
    }
    return captured | {key: value for key, value in results.items() if key not in captured}


def unpacked(file: Path) -> bytes:
    """Return what is in ``file``, decompressed where it is gzipped."""
    data = file.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def differing(run: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the first step at which two runs' losses or gradient norms differ, bit by bit."""
    for key, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
        if len(run[key]) != len(other[key]):
            return f"{what}: expected {len(other[key])} steps, got {len(run[key])}"
        for step, (got, expected) in enumerate(zip(run[key], other[key], strict=True), start=1):
            if got != expected:
                return f"{what} of step {step}: expected {expected!r}, got {got!r}"
    return ""


def machine() -> dict[str, str | int]:
    """Describe what figures depend on: GPUs, processor and cores; no names."""
    found: dict[str, str | int] = {
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }
    gpus = look(_gpus, [])
    return found | {"gpus": len(gpus)} | ({"gpu": gpus[0]} if gpus else {})


def short(machine: Mapping[str, str | int], gpus: int | None = None) -> str:
    """Return how a file's name tells the machine: ``cpu``, or ``h200x2`` for two ``gpus`` of it."""
    if not machine.get("gpus"):
        return "cpu"
    model = str(machine["gpu"]).partition(",")[0].lower()
    words = [word for word in re.split(r"[\s-]+", model) if re.search(r"\d", word)]
    return f"{words[0] if words else 'gpu'}x{gpus or machine['gpus']}"


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
