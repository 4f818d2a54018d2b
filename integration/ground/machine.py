"""What the launcher must know of the machine. Torch is asked only where there is a GPU driver."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from integration.ground.errors import UserError

T = TypeVar("T")


def look(at: Callable[[], T], otherwise: T) -> T:
    """Return what ``at`` finds, or ``otherwise`` where it fails, in whatever way.

    A look at the machine that only informs goes through here: a file of ``/proc`` that is missing,
    unreadable or of another format, or a tool that hangs, ends no run.
    """
    try:
        return at()
    except Exception:
        return otherwise


def gpu_count() -> int:
    """Return how many CUDA devices torch can use: the driver's presence alone proves nothing.

    Without a driver the answer is 0 at once; else torch is asked in a process of its own (3 s),
    so that ``CUDA_VISIBLE_DEVICES`` and a driver too old for this torch both count.
    """
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/dev/nvidiactl").exists():
        return 0
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    # The last word: a sitecustomize of the user's may print as well.
    words = answer.stdout.split() if answer.returncode == 0 else []
    return int(words[-1]) if words and words[-1].isdigit() else 0


def require_compiler() -> None:
    """FlexAttention is compiled by Triton, whose launcher is built with the host's C compiler.

    Raises:
        UserError: none is there.
    """
    compilers = [os.environ.get("CC"), "cc", "gcc", "clang"]
    if not any(shutil.which(c) for c in compilers if c):
        raise UserError(
            "a GPU run compiles its attention kernels and needs a C compiler, and neither cc, gcc, "
            "clang nor $CC is on the PATH; install gcc, or set CC"
        )


def cores() -> int:
    """Return the cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def peak_resident_set() -> int:
    """Return this process's peak resident set in bytes, as far as the kernel says.

    ``VmHWM``; where a kernel has none, what ``getrusage`` says, whose peak survives ``exec``: a
    rank then reports its launcher's, if that is larger.
    """

    def high_water_mark() -> int:
        status = Path("/proc/self/status").read_text()
        kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(kib) * 1024

    return look(high_water_mark, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
