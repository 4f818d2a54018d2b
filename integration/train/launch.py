"""Start TorchTitan's trainer under torchrun, show a rank's log, pass signals on, say how it ended.

[Note: How a run ends]
Torchrun and each rank have a session of their own, so Ctrl-C and the end of a terminal reach only
this process. The first signal is handed to torchrun, whose ranks agree on a step, save and end
(``JobTrainer``); where no step has begun there is nothing to save, and all are killed. So they are
by a second signal. Signals come first and words after: no message that cannot be printed keeps a
signal back. Should this process itself be killed, torchrun notices that its parent is gone and does
the same, and so do ranks without torchrun: nothing is left behind.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType

from integration.ground import owner, processes, terminal
from integration.ground.errors import UserError
from integration.ground.machine import cores, look
from integration.ground.paths import REPO, cache_dir
from integration.jobs import checkpoints, handover
from integration.patchset.overlay import Overlay
from integration.train.failure import diagnose, rank_folder
from integration.train.run import Job, Run

# Seconds that ranks have, once asked to stop, for the step they are in and a checkpoint. Torchrun
# kills them after that. Below a minute, so that survivors of a dead peer do not linger.
SHUTDOWN_SECONDS = 45
# Torchrun starts its ranks once it has met all its nodes, here itself alone. Its own import takes a
# few seconds; after so many, what it waits for is worth a word.
MEETING_SECONDS = 20
AGENT_LOG = "torchrun.log"
JOB_MODULE = "integration.ranks"
FULL_DISK_BYTES = 2**20
# Ctrl-C and Ctrl-\\, the end of the terminal, and what schedulers send.
STOPS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
BEGUN = "Training starts at step"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of torchrun on this machine.

    ``module`` is where TorchTitan finds the config; ``shutdown_seconds`` are what ranks have to
    save.
    """

    run: Run
    job: Job
    patched: Overlay
    ranks: int
    vocab: int
    color: bool = False
    module: str = JOB_MODULE
    shutdown_seconds: int = SHUTDOWN_SECONDS

    def command(self) -> list[str]:
        """Return torchrun's command line. The user's TorchTitan options come last, so they win."""
        line = [sys.executable, "-m", "integration.train.agent"]
        line += ["--nnodes=1", f"--nproc-per-node={self.ranks}", "--max-restarts=0"]
        line += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=run"]
        line += ["--local-addr=127.0.0.1", f"--shutdown-timeout={self.shutdown_seconds}"]
        line += [f"--log-dir={self.run.folder / 'logs'}", "--redirects=3"]
        return line + trainer_arguments(self.run, self.job, color=self.color, module=self.module)

    def environment(self) -> dict[str, str]:
        """Return the ranks' environment: the overlay first, no network, one address."""
        inherited = processes.environment()
        ours = rank_variables(self.patched, self.job, self.vocab)
        return {
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": "lo",
            **inherited,
            # torchrun would give each of several ranks one thread.
            "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS")
            or str(max(1, cores() // self.ranks)),
            # Not those of a run that started this one.
            handover.LAYERS_VARIABLE: "",
            handover.EXPERTS_VARIABLE: "",
            handover.OVERLAY_VARIABLE: "",
            processes.PARENT_VARIABLE: str(os.getpid()),
            **{name: value for name, value, _ in ours},
        }

    def start(self, env: dict[str, str] | None = None, owned: owner.Owner | None = None):
        """Start torchrun with its output in ``AGENT_LOG``; the hold on the folder goes along."""
        logs = self.run.folder / "logs"
        logs.mkdir(exist_ok=True)
        with open(logs / AGENT_LOG, "w") as agent_log:
            return subprocess.Popen(
                self.command(),
                env=env or self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=agent_log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(owned.descriptor,) if owned else (),
            )


def trainer_arguments(run: Run, job: Job, *, color: bool, module: str = JOB_MODULE) -> list[str]:
    """Return what follows torchrun's own options: TorchTitan's trainer and its arguments."""
    line = ["-m", "torchtitan.train", f"--module={module}", f"--config={job.config}"]
    line += [f"--dump_folder={run.folder}", f"--hf_assets_path={job.tokenizer}"]
    line += [f"--dataloader.dataset_path={job.data}"]
    if not color:
        line.append("--metrics.disable_color_printing")
    return [*line, *job.options]


def rank_variables(patched: Overlay, job: Job, vocab: int) -> list[tuple[str, str, str]]:
    """Return name, value and reason of what ranks need wherever they run."""
    behind = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    cut = ((handover.LAYERS_VARIABLE, job.layers), (handover.EXPERTS_VARIABLE, job.experts))
    checked = [(handover.OVERLAY_VARIABLE, str(patched.path), "checked by each rank")]
    return [
        ("PYTHONPATH", patched.pythonpath(behind), "the overlay of the patches first"),
        ("PYTHONUNBUFFERED", "1", "a log holds all that a rank said before it died"),
        ("PYTHONUTF8", "1", "a log holds every character, whatever the locale"),
        ("HF_HUB_OFFLINE", "1", "a tokenizer is a folder: no rank goes to the network"),
        ("HF_DATASETS_OFFLINE", "1", "data is a folder too"),
        ("HF_DATASETS_CACHE", str(cache_dir() / "hf"), "what --data is converted to, once"),
        *(checked if patched.path else []),
        (handover.VOCAB_VARIABLE, str(vocab), "the model's vocabulary is the tokenizer's"),
        (handover.TOKENIZER_VARIABLE, job.tokenizer, "the tokenizer's folder"),
        *((name, str(number), "of the cut model") for name, number in cut if number),
    ]


def launch(
    asked: Launch, *, show: Show, shown_rank: int = 0, owned: owner.Owner | None = None
) -> Ended:
    """Run torchrun to its end, showing one rank's output meanwhile; see [Note: How a run ends]."""
    signals: list[signal.Signals] = []
    torchrun: subprocess.Popen | None = None

    def pass_on(signum: int, frame: FrameType | None) -> None:
        signals.append(signal.Signals(signum))
        if torchrun is not None:
            torchrun.send_signal(signal.SIGTERM)

    # A signal that is ignored stays so: `nohup` asks for that.
    handled = [s for s in STOPS if signal.getsignal(s) is not signal.SIG_IGN]
    before = {s: signal.signal(s, pass_on) for s in handled}
    try:
        log = _Log(asked.run.folder / "logs", shown_rank, show)
        torchrun = asked.start(owned=owned)
        if signals:  # one that came while it was started
            torchrun.send_signal(signal.SIGTERM)
        told = False
        while torchrun.poll() is None:
            log.read()
            if signals and (len(signals) > 1 or not log.begun):
                processes.end(processes.of_run(asked.run.folder))
            if signals and not told:
                told = True
                saves = "finishing the step and saving" if log.begun else "no step has begun"
                terminal.say(f"\nasked to stop: {saves} …")
            if owned:
                owned.renew()
            time.sleep(0.2)
        # Where torchrun was killed, its ranks notice and save.
        processes.end(processes.of_run(asked.run.folder), patience=asked.shutdown_seconds)
        log.read()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return Ended(torchrun.returncode, signals[0] if signals else None)


@dataclass(slots=True)
class _Log:
    """The shown rank's output, printed as it comes."""

    logs: Path
    rank: int
    show: Show
    begun: bool = False  # the first step
    started: float = field(default_factory=time.time)
    waited: bool = False
    positions: dict[Path, int] = field(default_factory=dict)

    def read(self) -> None:
        folder = rank_folder(self.logs, self.rank)
        # An earlier attempt's is older.
        if folder is None or folder.stat().st_mtime < self.started - 1:
            if not self.waited and time.time() - self.started > MEETING_SECONDS:
                self.waited = True
                terminal.say(
                    f"no rank has started yet, after {MEETING_SECONDS} s: torchrun waits for the "
                    f"machine, or for other nodes; its log: {self.logs / AGENT_LOG}"
                )
            return
        self._print(folder / "stdout.log")
        if self.show is Show.EVERYTHING:
            self._print(folder / "stderr.log")

    def _print(self, path: Path) -> None:
        if not path.exists():
            return
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(self.positions.get(path, 0))
            while (line := file.readline()).endswith("\n"):
                self.positions[path] = file.tell()
                self.begun = self.begun or BEGUN in line
                titan = line.startswith("[titan] ") and not any(word in line for word in QUIET)
                if self.show is Show.EVERYTHING or (titan and self.show is Show.TITAN):
                    terminal.say(line, end="")


def explain(run: Run, ended: Ended) -> UserError | None:
    """Return what to tell the user, or None where training came to its end.

    Cut-off checkpoints are removed; the last good one is named with the command that goes on.
    """
    end = run.end()
    if ended.code == 0 and end is not None and ended.asked_by is None:
        return None
    # Looked at before room is made. The logs may be on the full disk too, and say nothing.
    full = look(lambda: shutil.disk_usage(run.folder).free < FULL_DISK_BYTES, False)
    if end is None or ended.asked_by is None:
        checkpoints.remove_cut_off(run.checkpoints_folder)
    if ended.asked_by is not None:
        where = f"after step {end['step']}" if end else "before it could save"
        code = 128 + ended.asked_by
        return UserError(f"stopped by {ended.asked_by.name} {where}; {_go_on(run)}", exit_code=code)
    logs = run.folder / "logs"
    output = look(lambda: (logs / AGENT_LOG).read_text(errors="replace"), "")
    why = "the disk is full" if full else diagnose(logs, output).sentence
    if ended.code < 0:  # the ranks have ended by themselves
        why = f"torchrun was killed by signal {-ended.code}"
    return UserError(f"{why}; {_go_on(run)}; logs: {logs}", exit_code=1)


def _go_on(run: Run) -> str:
    step = checkpoints.newest_whole(run.checkpoints_folder)
    if step is None:
        damaged = checkpoints.complete(run.checkpoints_folder)
        return "no checkpoint is whole" if damaged else "no checkpoint was written"
    config = run.folder.parent.name
    return (
        f"the last good checkpoint is {run.checkpoint(step)}, "
        f"go on with: integration train {config} --resume"
    )
