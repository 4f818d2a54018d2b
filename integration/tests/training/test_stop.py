"""Signals, dying ranks and full disks: the run ends in one clear line, and nothing is lost."""

import os
import signal
import subprocess
import time

import pytest

from integration.ground import processes
from integration.tests.training.conftest import losses

pytestmark = pytest.mark.timeout(600)


def _last_line(training) -> str:
    return training.output.strip().splitlines()[-1]


def test_a_stop_saves_and_goes_on_bitwise(uninterrupted, trainer):
    """SIGTERM as a scheduler sends it, then Ctrl-C's SIGINT in the resumed run."""
    first = trainer.start()
    first.wait_for_step(3)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 128 + signal.SIGTERM, first.output
    (stopped_at,) = first.run.checkpoints()
    assert 3 <= stopped_at < 30
    assert _last_line(first).startswith(f"error: stopped by SIGTERM after step {stopped_at}; ")
    assert _last_line(first).endswith("go on with: integration train mini --resume")

    second = trainer.start("--resume")
    second.wait_for_step(stopped_at + 2)
    second.process.send_signal(signal.SIGINT)
    assert second.wait() == 128 + signal.SIGINT, second.output
    assert "stopped by SIGINT after step" in _last_line(second)
    expected = losses(uninterrupted)
    assert losses(second) == {step: expected[step] for step in losses(second)}
    assert max(losses(second)) > stopped_at + 1
    assert "Traceback" not in first.output + second.output


def _end_of(training) -> None:
    """Wait until nothing of a run is left."""
    end = time.monotonic() + 120
    while left := processes.of_run(training.run.folder):
        assert time.monotonic() < end, left
        time.sleep(0.2)


def test_a_closed_terminal_saves_and_says_so_to_nobody(trainer):
    """SIGHUP, with the reader of standard output gone and an encoding that lacks our characters.

    What an outer torchrun has left in the environment decides nothing.
    """
    left = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "RANK": "7", "LOGLEVEL": "none"}
    training = trainer.start(PYTHONIOENCODING="ascii", **left)
    training.wait_for_step(2)
    training.process.send_signal(signal.SIGHUP)
    assert training.wait() == 128 + signal.SIGHUP, training.output
    assert "stopped by SIGHUP after step" in _last_line(training)
    assert len(training.run.checkpoints()) == 1
    assert "UnicodeEncodeError" not in training.output
    _end_of(training)


@pytest.mark.parametrize("torchrun_too", [False, True], ids=["launcher", "launcher and torchrun"])
def test_a_killed_launcher_leaves_a_checkpoint_and_no_process(trainer, torchrun_too):
    training = trainer.start("--", "--checkpoint.enable_first_step_checkpoint")
    training.wait_for_step(2)
    found = processes.of_run(training.run.folder)
    (torchrun,) = (p for p in found if "integration.train.agent" in p.cmdline())
    ranks = training.rank_pids()
    for rank in ranks:  # held, or they might have saved before the next start has looked
        os.kill(rank, signal.SIGSTOP)
    training.process.kill()
    if torchrun_too:
        torchrun.kill()
    training.process.wait()
    # While its ranks save, nobody joins.
    refused = trainer.train("--resume", expected=2)
    assert "in use by ranks on" in refused.output
    assert f"outlive process {training.process.pid}" in refused.output
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    _end_of(training)
    saved = training.run.checkpoints()
    assert saved[0] == 1 and saved[-1] >= 2
    resumed = trainer.train("--resume", "--", "--training.steps", str(saved[-1] + 1))
    assert f"Training starts at step {saved[-1] + 1}" in resumed.output


def test_a_stop_before_the_first_step_ends_at_once(trainer):
    """There is nothing to save, and ranks that start cannot agree on a step."""
    training = trainer.start("--ranks", "4")
    training.wait_for(lambda t: "run: " in t.output)
    training.wait_for(lambda t: len(processes.of_run(t.run.folder)) == 5)
    training.process.send_signal(signal.SIGTERM)
    assert training.wait(30) == 128 + signal.SIGTERM, training.output
    assert "stopped by SIGTERM before it could save; no checkpoint was written" in training.output
    assert processes.of_run(training.run.folder) == []


def test_a_dead_rank_ends_the_others_without_a_checkpoint(trainer):
    """Survivors get torchrun's SIGTERM as well: they must not take it for a scheduler's stop."""
    training = trainer.start()
    training.wait_for_step(2)
    survivor, victim = training.rank_pids()
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    assert training.wait(60) == 1, training.output
    assert time.monotonic() - killed < 60
    assert "rank 1 was killed by signal 9" in _last_line(training)
    assert "no checkpoint was written" in _last_line(training)
    assert training.run.checkpoints() == []
    assert not os.path.exists(f"/proc/{survivor}")
    assert "Traceback" not in training.output


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own that holds one checkpoint of mini (86 MiB) and not two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=130m", "tmpfs", str(folder)], capture_output=True
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_the_last_good_checkpoint(trainer, small_disk):
    trainer.outputs = small_disk / "outputs"
    options = ("--", "--training.steps", "9", "--checkpoint.interval", "3")
    training = trainer.train(*options, expected=1)
    assert "the disk is full; the last good checkpoint is " in _last_line(training)
    assert training.run.checkpoints() == [3]
    # The half-written one is gone: it could not be loaded, and it took the room.
    assert [f.name for f in (training.run.folder / "checkpoint").iterdir()] == ["step-3"]
    resumed = trainer.train("--resume", "--", "--training.steps", "4", "--checkpoint.load_only")
    assert "Training starts at step 4" in resumed.output
