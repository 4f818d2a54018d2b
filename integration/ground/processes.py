"""Processes that the project starts: what they inherit, and how they end."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

# Set for a child: the id of the process that starts it.
PARENT_VARIABLE = "INTEGRATION_PARENT"
LOOK_SECONDS = 0.5
# A killed process's memory, the GPU's above all, is free once the process is gone.
GONE_SECONDS = 30

# What a user's shell, a scheduler or an outer torchrun may have left in the environment, and what
# would decide about ranks in the place of our command line: torchrun's options and its ranks'
# variables, the level of its log (which ``failure`` reads), and the binding of threads to cores,
# which would put all ranks of a machine on the same ones.
_NOT_OURS = re.compile(
    r"PET_.*|TORCHELASTIC_.*|TORCH_ELASTIC_.*|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|"
    r"MASTER_(ADDR|PORT)|LOGLEVEL|LOG_RANK|NGPU|OMP_PROC_BIND|OMP_PLACES|GOMP_CPU_AFFINITY|"
    r"KMP_AFFINITY|"
    # All of Python's own, except those that change neither what code means nor what it prints.
    r"PYTHON(?!(PATH|DONTWRITEBYTECODE|PYCACHEPREFIX|FAULTHANDLER|UNBUFFERED|HASHSEED)$)[A-Z0-9]+"
)


def environment() -> dict[str, str]:
    """Return this process's environment without what would steer a training from outside.

    The settings of NCCL, Gloo, CUDA, OpenMP and of PyTorch's compiler and allocator stay: they
    describe the machine, which its owner knows best.
    """
    return {name: value for name, value in os.environ.items() if not _NOT_OURS.fullmatch(name)}


def end_with_parent(grace: float, each_look: Callable[[], None] = lambda: None) -> None:
    """Send this process SIGTERM once its parent is gone, however that ended.

    ``grace`` seconds later the process is ended. A thread looks; it also calls ``each_look``.
    """
    parent = int(os.environ.get(PARENT_VARIABLE) or os.getppid())

    def look() -> None:
        while os.getppid() == parent:
            each_look()
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=look, name="end-with-parent", daemon=True).start()


def of_run(folder: Path) -> list[psutil.Process]:
    """Return torchrun and the ranks of the run in ``folder``, and what they have started."""
    mark = f"--dump_folder={folder}"
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in (process.info["cmdline"] or ()) and process.pid != os.getpid():
            found[process.pid] = process
            with suppress(psutil.Error):
                found |= {child.pid: child for child in process.children(recursive=True)}
    return list(found.values())


def end(processes: Sequence[psutil.Process], patience: float = 0.0) -> None:
    """Wait ``patience`` seconds for ``processes`` to end, kill what is left, wait for that too."""
    alive = _outlive(processes, patience)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    _outlive(alive, GONE_SECONDS)


def _outlive(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return those of ``processes`` that have not ended after ``seconds``.

    Not ``psutil.wait_procs``, which takes the exit code of a child from whoever waits for it.
    """
    until = time.monotonic() + seconds
    while alive := [process for process in processes if _alive(process)]:
        if time.monotonic() >= until:
            break
        time.sleep(0.05)
    return alive


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
