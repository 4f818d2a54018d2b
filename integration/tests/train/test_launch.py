"""Starting, following and ending torchrun, with a process that stands for it and its ranks."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from integration.ground import processes
from integration.patchset.overlay import Overlay
from integration.train import launch
from integration.train.run import Job, Run


class StandIn(launch.Launch):
    """A start of the Python code in the job's options."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", *self.job.options, f"--dump_folder={self.run.folder}"]


def _start(folder: Path, code: str) -> StandIn:
    job = Job("mini", "", "/tokenizer", (code,), ())
    return StandIn(run=Run(folder), job=job, patched=Overlay(None, (), ""), ranks=3, vocab=7)


@pytest.fixture(autouse=True)
def _handlers():
    """Handlers are this process's: none may stay."""
    before = {s: signal.getsignal(s) for s in launch.STOPS}
    yield
    assert {s: signal.getsignal(s) for s in launch.STOPS} == before


IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"


@pytest.mark.parametrize("signum", launch.STOPS)
def test_a_signal_before_the_first_step_ends_all(tmp_path, signum, monkeypatch):
    """Also where nothing can be printed."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.print", full)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # ``say`` gives it up
    timer = threading.Timer(1, os.kill, (os.getpid(), signum))
    timer.start()
    begin = time.monotonic()
    ended = launch.launch(_start(tmp_path, IGNORES), show=launch.Show.NOTHING)
    assert ended == launch.Ended(-signal.SIGKILL, signum)
    assert time.monotonic() - begin < 30
    assert processes.of_run(tmp_path) == []


def test_what_is_ignored_stays_ignored(tmp_path):
    """As by ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        ended = launch.launch(_start(tmp_path, "import sys; sys.exit(3)"), show=launch.Show.NOTHING)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended == launch.Ended(3, None)


def test_a_meeting_that_waits_is_said_once(tmp_path, capsys):
    log = launch._Log(tmp_path, 0, launch.Show.TITAN)
    log.read()
    assert not capsys.readouterr().out
    log.started -= launch.MEETING_SECONDS + 1
    log.read()
    log.read()
    said = capsys.readouterr().out
    assert said.startswith("no rank has started yet, after 20 s: torchrun waits")
    assert said.count("\n") == 1


def test_a_log_in_any_encoding_is_shown(tmp_path, capsys):
    folder = tmp_path / "run" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_bytes("[titan] läuft\n".encode("latin-1") + b"[titan] half a")
    log = launch._Log(tmp_path, 0, launch.Show.TITAN)
    log.read()
    assert capsys.readouterr().out == "[titan] l\ufffduft\n"
    assert not log.begun


def test_the_ranks_environment_is_ours(tmp_path, monkeypatch):
    for name in ("PET_NNODES", "RANK", "INTEGRATION_LAYERS", "PYTHONIOENCODING"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    env = _start(tmp_path, "").environment()
    assert "PET_NNODES" not in env and "RANK" not in env and "PYTHONIOENCODING" not in env
    assert env["INTEGRATION_LAYERS"] == ""
    assert env["INTEGRATION_PARENT"] == str(os.getpid())
    assert int(env["OMP_NUM_THREADS"]) >= 1
