"""Run a dry run in a process of its own, on the overlay of the set that was asked for."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from integration.dryrun import compare
from integration.dryrun.request import Request
from integration.ground import processes
from integration.ground.errors import UserError
from integration.ground.paths import REPO
from integration.patchset import overlay, repository
from integration.patchset.overlay import Overlay

LOG_LINES = 12


def run(request: Request, *, debug: bool) -> dict[str, Any]:
    """Return what the dry run found, with the set's contributions; ``refused`` where it stopped.

    Raises:
        UserError: a mistake in the request, or a process that did not come to the placements.
    """
    job = request.job()
    patched = overlay.build(repository.without(request.without))
    if "cpu_device" not in patched.names:
        raise UserError(
            "--without cpu_device leaves no way to run TorchTitan on a CPU, as a dry run does; "
            "keep cpu_device"
        )
    with tempfile.TemporaryDirectory(prefix="dryrun-") as folder:
        asked, result, log = (Path(folder) / name for name in ("request", "result", "log"))
        request.write(asked)
        line = [sys.executable, "-m", "integration.dryrun.worker", str(asked), str(result)]
        with open(log, "w") as output:
            ended = subprocess.run(
                line,
                cwd=folder,
                env=_environment(patched),
                stdout=None if debug else output,
                stderr=None if debug else subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        complaint = _complaint(log)
        if not result.exists():
            raise UserError(
                f"the dry run of {request.config} ended with code {ended.returncode} before the "
                f"placements: {complaint}; see all of it with --debug",
                exit_code=1,
            )
        found = json.loads(result.read_text())
        if ended.returncode:
            found["refused"] = f"the fake step ended with code {ended.returncode}: {complaint}"
        found["contributions"] = list(patched.names)
        found["disagreements"] = compare.disagreements(job, request.rank, found)
        return found


def _environment(patched: Overlay) -> dict[str, str]:
    return {
        **processes.environment(),
        "PYTHONPATH": patched.pythonpath(str(REPO)),
        "CUDA_VISIBLE_DEVICES": "",  # fake tensors of one device kind: the CPU
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _complaint(log: Path) -> str:
    """Return the last line that is not a stack trace's."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines[-LOG_LINES:]) if line), "no message")[:400]
