# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""Time and memory to initialize the RoPE caches of a 1T model, without and with the patch.

Run it where ``import torchtitan`` gives the patched package by PYTHONPATH; the pristine
one is what is imported without PYTHONPATH. Each is measured in a process of its own::

    PYTHONPATH=OVERLAY python bench.py

The default of 4,096 positions needs 0.3 GB for the pristine package; the true number,
``--positions 65536``, needs 5 GB. Prints one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

NUM_LAYERS = 74
HEAD_DIM = 128
VARIANTS = ("pristine", "patched")


def read_status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def measure(num_positions: int) -> dict[str, float | int]:
    """Build on meta, allocate and initialize as the trainer does; only RoPE is large."""
    import torch

    from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.qwen3 import _build_qwen3_layers
    from torchtitan.models.qwen3.model import Qwen3Model

    torch.set_num_threads(1)  # as torchrun does
    dim, init = 8, {"weight": torch.nn.init.zeros_}
    config = Qwen3Model.Config(
        vocab_size=8,
        dim=dim,
        norm=RMSNorm.Config(normalized_shape=dim),
        tok_embeddings=Embedding.Config(
            num_embeddings=8, embedding_dim=dim, param_init=init
        ),
        lm_head=Linear.Config(in_features=dim, out_features=8, param_init=init),
        layers=_build_qwen3_layers(
            fuse_qkv=False,
            n_layers=NUM_LAYERS,
            dim=dim,
            n_heads=1,
            n_kv_heads=1,
            head_dim=HEAD_DIM,
            hidden_dim=dim,
            attn_backend="flex",
            rope=CosSinRoPE.Config(dim=HEAD_DIM, max_seq_len=num_positions),
        ),
    )
    with torch.device("meta"):
        model = config.build()
    resident = read_status("VmRSS")
    begin = time.perf_counter()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states()
    seconds = time.perf_counter() - begin
    storages = (
        layer.attention.rope.cache.untyped_storage() for layer in model.layers.values()
    )
    return {
        "seconds": seconds,
        "cache_bytes": sum({s.data_ptr(): s.nbytes() for s in storages}.values()),
        "resident_growth_bytes": read_status("VmRSS") - resident,
        "peak_growth_bytes": read_status("VmHWM") - resident,
    }


def run(variant: str, num_positions: int) -> dict[str, float | int]:
    env = dict(os.environ)
    if variant == "pristine":
        env.pop("PYTHONPATH", None)
    command = [sys.executable, __file__, "--measure", "--positions", str(num_positions)]
    out = subprocess.run(
        command, env=env, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return json.loads(out)


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.positions)))
        return

    # Interleaved, so that a change in the machine's load meets both.
    runs = {variant: [] for variant in VARIANTS}
    for _ in range(args.repeats):
        for variant in VARIANTS:
            runs[variant].append(run(variant, args.positions))
    results = {
        variant: {key: statistics.median(r[key] for r in rs) for key in rs[0]}
        | {"seconds_of_all_runs": [r["seconds"] for r in rs]}
        for variant, rs in runs.items()
    }

    from importlib.metadata import version

    report = {
        "what": "RoPE caches of the 1T shape: to_empty() and init_states() on a CPU",
        "layers": NUM_LAYERS,
        "head_dim": HEAD_DIM,
        "positions": args.positions,
        "statistic": f"median of {args.repeats} processes each, interleaved",
        "results": results,
        "command": "PYTHONPATH=OVERLAY python bench.py "
        f"--positions {args.positions} --repeats {args.repeats}",
        "torch": version("torch"),
        "torchtitan": version("torchtitan"),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count()},
    }
    print(json.dumps(report, indent=2))
    if (
        results["patched"]["cache_bytes"] * NUM_LAYERS
        != results["pristine"]["cache_bytes"]
    ):
        sys.exit(
            "bench.py: expected one shared cache by PYTHONPATH and one a layer without it"
        )


if __name__ == "__main__":
    main()
