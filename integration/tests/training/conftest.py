"""Real trainings on gloo ranks, ``mini`` on two of them, as a user starts them: by the command."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.ground.paths import REPO
from integration.train import launch, summary
from integration.train.run import Run

# A start takes 15 s on two free cores, and several suites may share them.
PATIENCE = 500


@dataclass
class Training:
    """One ``integration train``, running or ended."""

    process: subprocess.Popen
    log: Path
    outputs: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def run(self) -> Run:
        (folder,) = self.outputs.glob("*/*")
        return Run(folder)

    def wait(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def wait_for(self, what: Callable[["Training"], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not what(self):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda t: any(f"step: {s:2}  " in t.output for s in range(step, 100)))

    def rank_pids(self) -> list[int]:
        """Return the ranks' process ids, in rank order."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().decode().split("\0")
                env = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if "torchtitan.train" in line and f"--dump_folder={self.run.folder}" in line:
                rank = next((e[5:] for e in env if e.startswith("RANK=")), None)
                if rank is not None:
                    found[int(rank)] = int(folder.name)
        return [found[rank] for rank in sorted(found)]


def _as_from_a_terminal() -> None:
    """Heed all signals: a shell ignores SIGINT for `make test &`, and a run keeps what is so."""
    for signum in launch.STOPS:
        signal.signal(signum, signal.SIG_DFL)


@dataclass
class Trainer:
    """Starts trainings whose outputs go to a folder of the test's own."""

    outputs: Path
    started: list[Training]

    def start(self, *arguments: str, **env: str) -> Training:
        self.outputs.mkdir(parents=True, exist_ok=True)
        log = self.outputs.parent / f"{len(self.started)}.log"
        with open(log, "w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "integration", "train", *arguments],
                cwd=REPO,
                env={**os.environ, "INTEGRATION_OUTPUTS": str(self.outputs), **env},
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_as_from_a_terminal,
            )
        self.started.append(Training(process, log, self.outputs))
        return self.started[-1]

    def train(self, *arguments: str, expected: int = 0, **env: str) -> Training:
        training = self.start(*arguments, **env)
        assert training.wait() == expected, training.output
        return training


@pytest.fixture
def trainer(tmp_path):
    made = Trainer(tmp_path / "outputs", [])
    yield made
    for training in made.started:
        if training.process.poll() is None:  # the test failed: leave no rank behind
            training.process.send_signal(signal.SIGTERM)
            try:
                training.wait(60)
            except subprocess.TimeoutExpired:
                training.process.kill()


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Training:
    """The default run, as ``make train`` does it: 60 steps, a checkpoint at 30 and at 60."""
    trainer = Trainer(tmp_path_factory.mktemp("uninterrupted") / "outputs", [])
    return trainer.train()


def losses(training: Training) -> dict[int, float]:
    return summary.scalars(training.run.folder / "tb", summary.LOSS)
