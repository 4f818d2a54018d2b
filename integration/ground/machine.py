"""What the launcher must know of the machine. Torch is asked only where there is a GPU driver."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from integration.ground.errors import UserError


def gpu_count() -> int:
    """Return how many CUDA devices torch can use: the driver's presence alone proves nothing.

    Without a driver the answer is 0 at once; else torch is asked in a process of its own (3 s),
    so that ``CUDA_VISIBLE_DEVICES`` and a driver too old for this torch both count.
    """
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/dev/nvidiactl").exists():
        return 0
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(answer.stdout.strip() or 0) if answer.returncode == 0 else 0


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


def free_port(asked: int | None) -> int:
    """Return ``asked`` or any free TCP port of 127.0.0.1.

    Raises:
        UserError: it is taken, or none is free.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", asked or 0))
        except (OSError, OverflowError) as error:
            what = (
                f"port {asked} of 127.0.0.1 cannot be used"
                if asked
                else "no free port on 127.0.0.1"
            )
            raise UserError(f"{what} ({error}); name another one with --port") from None
        return probe.getsockname()[1]


def cores() -> int:
    """Return the cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def peak_resident_set() -> int:
    """Return this process's peak resident set in bytes.

    Not ``getrusage``, whose peak survives ``exec``: a rank would report its launcher's.
    """
    status = Path("/proc/self/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kib) * 1024
