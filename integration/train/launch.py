"""Start TorchTitan's trainer under torchrun, show a rank's log, pass signals on, say how it ended.

Torchrun gets a session of its own, so that Ctrl-C at the terminal reaches only this process: it
asks the ranks to stop once, as a scheduler would, and they save. A second Ctrl-C ends them.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

from integration.ground.errors import UserError
from integration.ground.machine import cores
from integration.ground.paths import REPO, cache_dir
from integration.jobs.handover import (
    EXPERTS_VARIABLE,
    LAYERS_VARIABLE,
    TOKENIZER_VARIABLE,
    VOCAB_VARIABLE,
)
from integration.patchset.overlay import Overlay
from integration.train.failure import diagnose, rank_folder
from integration.train.run import Job, Run

# Seconds that ranks have, once asked to stop, for the step they are in and a checkpoint. Torchrun
# kills them after that. Below a minute, so that survivors of a dead peer do not linger.
SHUTDOWN_SECONDS = 45
AGENT_LOG = "torchrun.log"
JOB_MODULE = "integration.ranks"
FULL_DISK_BYTES = 2**20
# Ctrl-C, and what schedulers send.
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TITAN_LINE = re.compile(r"^\[titan\] ")
# Said at every start, or of no use without a GPU.
QUIET = ("lspci", "Peak FLOPS", "Peak flops", "[GC]", "Sleeping 2 seconds", "structured_logger")


class Show(Enum):
    """How much of the shown rank's output reaches the terminal."""

    NOTHING = 0
    TITAN = 1  # TorchTitan's own log
    EVERYTHING = 2


@dataclass(frozen=True, slots=True)
class Ended:
    """How the ranks ended: torchrun's exit code, and the signal that asked them to stop, if any."""

    code: int
    asked_by: signal.Signals | None


def command(
    run: Run,
    job: Job,
    *,
    ranks: int,
    port: int,
    color: bool,
    module: str = JOB_MODULE,
    shutdown_seconds: int = SHUTDOWN_SECONDS,
) -> list[str]:
    """Return the torchrun command line. The user's TorchTitan options come last, so they win.

    ``module`` is where TorchTitan finds the config.
    """
    line = [sys.executable, "-m", "torch.distributed.run"]
    line += [f"--nproc-per-node={ranks}", "--max-restarts=0"]
    line += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run"]
    line += ["--local-addr=127.0.0.1", f"--shutdown-timeout={shutdown_seconds}"]
    line += [f"--log-dir={run.folder / 'logs'}", "--redirects=3"]
    return [*line, *trainer_arguments(run, job, color=color, module=module)]


def trainer_arguments(run: Run, job: Job, *, color: bool, module: str = JOB_MODULE) -> list[str]:
    """Return what follows torchrun's own options: TorchTitan's trainer and its arguments."""
    line = ["-m", "torchtitan.train", f"--module={module}", f"--config={job.config}"]
    line += [f"--dump_folder={run.folder}", f"--hf_assets_path={job.tokenizer}"]
    line += [f"--dataloader.dataset_path={job.data}"]
    if not color:
        line.append("--metrics.disable_color_printing")
    return [*line, *job.options]


def environment(
    patched: Overlay,
    *,
    ranks: int,
    vocab: int,
    tokenizer: str,
    layers: int | None = None,
    experts: int | None = None,
) -> dict[str, str]:
    """Return the ranks' environment: the overlay first, no network, one address."""
    return {
        # torchrun would give each of several ranks one thread.
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        # Not those of a run that started this one.
        LAYERS_VARIABLE: "",
        EXPERTS_VARIABLE: "",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        **{
            name: value
            for name, value, _ in rank_variables(
                patched, vocab=vocab, tokenizer=tokenizer, layers=layers, experts=experts
            )
        },
    }


def rank_variables(
    patched: Overlay,
    *,
    vocab: int,
    tokenizer: str,
    layers: int | None = None,
    experts: int | None = None,
) -> list[tuple[str, str, str]]:
    """Return name, value and reason of what ranks need wherever they run."""
    behind = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    return [
        ("PYTHONPATH", patched.pythonpath(behind), "the overlay of the patches first"),
        ("PYTHONUNBUFFERED", "1", "a log holds all that a rank said before it died"),
        ("HF_HUB_OFFLINE", "1", "a tokenizer is a folder: no rank goes to the network"),
        ("HF_DATASETS_OFFLINE", "1", "data is a folder too"),
        ("HF_DATASETS_CACHE", str(cache_dir() / "hf"), "what --data is converted to, once"),
        (VOCAB_VARIABLE, str(vocab), "the model's vocabulary is the tokenizer's"),
        (TOKENIZER_VARIABLE, tokenizer, "the tokenizer's folder"),
        *([(LAYERS_VARIABLE, str(layers), "of the cut model")] if layers else []),
        *([(EXPERTS_VARIABLE, str(experts), "of the cut model")] if experts else []),
    ]


def launch(
    run: Run, line: Sequence[str], env: dict[str, str], *, show: Show, shown_rank: int = 0
) -> Ended:
    """Run ``line`` to its end, showing one rank's output meanwhile; pass signals on."""
    logs = run.folder / "logs"
    logs.mkdir(exist_ok=True)
    started = time.time()
    with open(logs / AGENT_LOG, "w") as agent_log:
        torchrun = subprocess.Popen(
            line, env=env, stdout=agent_log, stderr=subprocess.STDOUT, start_new_session=True
        )
    asked: list[signal.Signals] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        asked.append(signal.Signals(signum))
        if len(asked) == 1:
            print("\nasked to stop: finishing the step and saving …", flush=True)
            torchrun.send_signal(signal.SIGTERM)
        else:
            os.killpg(torchrun.pid, signal.SIGKILL)

    before = {s: signal.signal(s, pass_on) for s in STOPS}
    done = threading.Event()
    follower = threading.Thread(target=_follow, args=(logs, shown_rank, started, done, show))
    follower.start()
    try:
        code = torchrun.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        done.set()
        follower.join()
    return Ended(code, asked[0] if asked else None)


def _follow(logs: Path, rank: int, started: float, done: threading.Event, show: Show) -> None:
    """Print the lines of ``rank`` as they come, until ``done`` and nothing is left."""
    names = {
        Show.NOTHING: (),
        Show.TITAN: ("stdout.log",),
        Show.EVERYTHING: ("stdout.log", "stderr.log"),
    }
    positions: dict[Path, int] = {}
    while True:
        last_look = done.is_set()
        folder = rank_folder(logs, rank)
        if folder is not None and folder.stat().st_mtime >= started - 1:
            for name in names[show]:
                _print_new(folder / name, positions, show)
        if last_look:
            return
        done.wait(0.2)


def _print_new(path: Path, positions: dict[Path, int], show: Show) -> None:
    if not path.exists():
        return
    with open(path, errors="replace") as file:
        file.seek(positions.get(path, 0))
        while (line := file.readline()).endswith("\n"):
            positions[path] = file.tell()
            wanted = TITAN_LINE.match(line) and not any(word in line for word in QUIET)
            if show is Show.EVERYTHING or wanted:
                print(line, end="", flush=True)


def explain(run: Run, ended: Ended) -> UserError | None:
    """Return what to tell the user, or None where training came to its end.

    Cut-off checkpoints are removed; the last good one is named with the command that goes on.
    """
    end = run.end()
    if ended.asked_by is not None:
        return _explain_stop(run, ended.asked_by, end)
    if ended.code == 0 and end is not None:
        return None
    # Looked at before room is made. The logs may be on the full disk too, and say nothing.
    full = shutil.disk_usage(run.folder).free < FULL_DISK_BYTES
    run.remove_incomplete()
    agent_output = (run.folder / "logs" / AGENT_LOG).read_text(errors="replace")
    why = "the disk is full" if full else diagnose(run.folder / "logs", agent_output).sentence
    return UserError(f"{why}; {_go_on(run)}; logs: {run.folder / 'logs'}", exit_code=1)


def _explain_stop(run: Run, asked_by: signal.Signals, end: dict | None) -> UserError:
    code = 128 + asked_by
    if end is None:
        run.remove_incomplete()
        return UserError(
            f"stopped by {asked_by.name} before it could save; {_go_on(run)}", exit_code=code
        )
    return UserError(
        f"stopped by {asked_by.name} after step {end['step']}; {_go_on(run)}", exit_code=code
    )


def _go_on(run: Run) -> str:
    steps = run.checkpoints()
    if not steps:
        return "no checkpoint was written"
    config = run.folder.parent.name
    return (
        f"the last good checkpoint is {run.checkpoint(steps[-1])}, "
        f"go on with: integration train {config} --resume"
    )
