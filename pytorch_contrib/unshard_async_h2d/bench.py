"""Step time with CPUOffloadPolicy and the flag off and on.

    python bench.py --pristine             # two GPUs, NCCL
    python bench.py --smoke                # two gloo ranks on the CPU

It is the benchmark of unshard_async_op, with `--offload`; see there.
"""

import os
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1] / "unshard_async_op" / "bench.py"

if __name__ == "__main__":
    options = ["--offload", "--contribution", "unshard_async_h2d", "--layers", "3"]
    os.execv(sys.executable, [sys.executable, str(BENCH), *options, *sys.argv[1:]])
