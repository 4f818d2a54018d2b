"""The job script that ``integration launch`` writes, run by a real Slurm: two nodes, two ranks.

A rank is killed, then the job is pre-empted; it goes on from its checkpoints and ends. The command
that runs this alone, and installs Slurm where it may: ci/slurm.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.ground.paths import REPO
from integration.tests.slurm.conftest import Slurm
from integration.train.run import Run

pytestmark = pytest.mark.timeout(1800)

STEPS, INTERVAL = 16, 4
PATIENCE = 500  # seconds for a start, of 15 on two free cores; several suites may share them


class Job:
    """One submitted job and its run's folder."""

    def __init__(self, slurm: Slurm, number: str, run: Run) -> None:
        self.slurm, self.number, self.run = slurm, number, run

    def logs(self, *, restart: int, attempt: int, stream: str = "stdout") -> list[Path]:
        """Return the ranks' logs of torchrun's ``attempt`` in Slurm's ``restart`` of the job."""
        folder = self.run.folder / "logs" / f"{self.number}-{restart}"
        return sorted(folder.glob(f"node-*/*/attempt_{attempt}/0/{stream}.log"))

    def losses(self, *, restart: int, attempt: int) -> dict[int, str]:
        """Return step -> loss as printed, of the first rank that has printed any."""
        for log in self.logs(restart=restart, attempt=attempt):
            if found := re.findall(r"step:\s+(\d+)\s+loss:\s+(\S+)", log.read_text()):
                return {int(step): loss for step, loss in found}
        return {}

    def starts_at(self, *, restart: int, attempt: int) -> set[int]:
        text = "".join(log.read_text() for log in self.logs(restart=restart, attempt=attempt))
        return {int(step) for step in re.findall(r"Training starts at step (\d+)", text)}

    def rank_pids(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().decode().split("\0")
                names = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            mine = f"--dump_folder={self.run.folder}" in line
            if mine and any(name.startswith("RANK=") for name in names):
                found.append(int(folder.name))
        return found

    def wait_for(self, what: Callable[[], bool], name: str) -> None:
        end = time.monotonic() + PATIENCE
        look = 0.0
        while not what():
            if time.monotonic() > look:  # asked less often: the ranks need the cores
                look = time.monotonic() + 5
                state = self.slurm.job(self.number)["JobState"]
                working = state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
                assert (working or what()) and look < end, f"{name}: {state}\n{self.output()}"
            time.sleep(0.1)

    def output(self) -> str:
        logs = [*self.run.folder.glob("logs/slurm-*.out"), *self.run.folder.rglob("stderr.log")]
        return "\n".join(f"== {log}\n{log.read_text()[-4000:]}" for log in sorted(logs))


def submit(slurm: Slurm, outputs: Path, *options: str) -> Job:
    command = [sys.executable, "-m", "integration", "launch", "mini", "--nodes=2", "--submit"]
    done = subprocess.run(
        [*command, f"--cluster={slurm.cluster}", "--", *options],
        cwd=REPO,
        env={**slurm.environment, "INTEGRATION_OUTPUTS": str(outputs)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    number = re.search(r"^job: (\d+)", done.stdout, re.MULTILINE)
    folder = re.search(r"^run: (.+)$", done.stdout, re.MULTILINE)
    assert number and folder, done.stdout
    return Job(slurm, number[1], Run(Path(folder[1])))


@pytest.mark.slow
def test_a_killed_rank_and_a_pre_emption_cost_no_more_than_the_steps_since_a_checkpoint(
    slurm, tmp_path
):
    job = submit(
        slurm,
        tmp_path / "my outputs",
        f"--training.steps={STEPS}",
        f"--checkpoint.interval={INTERVAL}",
        "--training.seq_len=64",
    )

    # A rank dies, one step or more after a checkpoint.
    job.wait_for(lambda: len(job.losses(restart=0, attempt=0)) > INTERVAL, "the first checkpoint")
    before = job.losses(restart=0, attempt=0)
    pids = job.rank_pids()
    assert len(pids) == 2
    os.kill(max(pids), signal.SIGKILL)
    job.wait_for(lambda: len(job.starts_at(restart=0, attempt=1)) == 1, "torchrun's restart")
    (resumed,) = job.starts_at(restart=0, attempt=1)
    assert resumed - 1 in range(INTERVAL, STEPS, INTERVAL)  # a checkpoint's step

    # Slurm signals the job, as it does before the time limit and at pre-emption.
    job.wait_for(lambda: len(job.losses(restart=0, attempt=1)) >= 3, "steps after the restart")
    slurm.ask("scancel", "--signal=USR1", job.number)
    job.wait_for(lambda: len(job.starts_at(restart=1, attempt=0)) == 1, "Slurm's requeue")
    (requeued,) = job.starts_at(restart=1, attempt=0)
    again = job.losses(restart=0, attempt=1)
    assert requeued == max(again) + 1  # no step is done twice
    assert "Stopped by SIGUSR1 after step" in "".join(
        log.read_text() for log in job.logs(restart=0, attempt=1)
    )
    # The steps that were lost are the same ones the second time.
    repeated = before.keys() & again.keys()
    assert repeated
    assert {step: again[step] for step in repeated} == {step: before[step] for step in repeated}

    job.wait_for(lambda: slurm.job(job.number)["JobState"] == "COMPLETED", "the end")
    assert (end := job.run.end()) is not None
    assert (end["step"], end["stopped"]) == (STEPS, False)
    assert job.run.checkpoints()[-1] == STEPS
    assert slurm.job(job.number)["Restarts"] == "1"
    assert not job.rank_pids()
    print(
        f"\nkilled after step {max(before)}, went on at {resumed}; "
        f"pre-empted after step {max(again)}, went on at {requeued}; ended at {STEPS}"
    )
