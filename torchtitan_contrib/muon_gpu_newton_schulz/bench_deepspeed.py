# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

"""DeepSpeed's Muon with optimizer offload on the matrices of ``bench.py``.

    PYTHONPATH=FOLDER python bench_deepspeed.py        # FOLDER: pip install --target deepspeed

DeepSpeed owns its state, so it cannot share the memory of ``bench.py`` and runs in a
process of its own, in the same session on the same machine. One rank, ZeRO stage 2,
bfloat16 weights on the GPU, float32 state pinned on the host. Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.nn as nn


class Matrices(nn.Module):
    def __init__(self, count: int, rows: int, columns: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.full((columns, rows) if i % 3 == 1 else (rows, columns), 0.02)
            for i in range(count)
        )
        for weight in self.weights:
            weight.use_muon = True

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return sum((weight * scale).sum() for weight in self.weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrices", type=int, default=222)
    parser.add_argument("--rows", type=int, default=1792)
    parser.add_argument("--columns", type=int, default=6144)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }.items():
        os.environ.setdefault(name, value)
    import deepspeed

    model = Matrices(args.matrices, args.rows, args.columns)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "Muon", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
            },
        },
    )
    seconds = []
    for _ in range(1 + args.rounds):
        loss = engine(torch.tensor(1e-3, device="cuda", dtype=torch.bfloat16))
        engine.backward(loss)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    print(
        json.dumps(
            {
                "arguments": vars(args),
                "deepspeed": deepspeed.__version__,
                "threads": torch.get_num_threads(),
                "seconds_first_excluded": statistics.median(seconds[1:]),
                "all_seconds": seconds,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
