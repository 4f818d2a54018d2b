"""A rung's end: its figures, its failure, its hanging; nothing is left running."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from integration.ladder import measure
from integration.patchset.overlay import Overlay
from integration.train.launch import Launch
from integration.train.run import Job, Run

# Stands for torchrun: a rank in a session of its own, which never ends by itself.
PARENT = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], start_new_session=True)
print(rank.pid, flush=True)
{then}
"""
RANK = """
import faulthandler, pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
(folder / "logs/run/attempt_0/0").mkdir(parents=True)
faulthandler.register(signal.SIGUSR2, file=open(folder / "logs/run/attempt_0/0/stderr.log", "w"))
def endless():
    time.sleep(1000)
{then}
endless()
"""


class StandIn(Launch):
    """A start of ``PARENT``."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", *self.job.options, f"--dump_folder={self.run.folder}"]


def _run(folder: Path, *, rank: str = "", then: str = "time.sleep(1000)", timeout: float = 60):
    rank = RANK.format(folder=str(folder), then=rank)
    job = Job("mini", "", "", (PARENT.format(then=then), rank), ())
    start = StandIn(run=Run(folder), job=job, patched=Overlay(None, (), ""), ranks=1, vocab=1)
    return measure._run(start, dict(os.environ), timeout)


def _rank_pid(folder: Path) -> int:
    return int((folder / "logs" / "torchrun.log").read_text().split()[0])


def _gone(pid: int) -> bool:
    """A killed orphan stays a zombie until the first process has looked."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_rung_ends_when_its_figures_are_there(tmp_path):
    write = "(folder / 'measured.json').write_text('{\"step_s\": [1.0]}')"
    begin = time.monotonic()
    assert _run(tmp_path, rank=write) == {"step_s": [1.0]}
    assert time.monotonic() - begin < 30
    assert _gone(_rank_pid(tmp_path))


def test_what_rank_0_left_is_kept_under_the_name_of_the_rung(tmp_path):
    folder, traces = tmp_path / "full-set", tmp_path / "traces"
    folder.mkdir()
    measure._keep(folder, traces)
    assert not traces.exists()  # as on a CPU
    (folder / "trace-0.json").write_text("trace")
    (folder / "snapshot-0.pickle").write_text("history")
    (folder / "trace-1.json").write_text("of another rank")
    measure._keep(folder, traces)
    kept = {f.name: gzip.decompress(f.read_bytes()) for f in traces.iterdir()}
    assert kept == {"full-set.json.gz": b"trace", "full-set.snapshot.pickle.gz": b"history"}


def test_a_rung_that_hangs_is_killed_and_says_where(tmp_path):
    with pytest.raises(
        measure.RungFailedError,
        match=r"killed after 3 s \(--timeout\) without an end, rank 0 in endless",
    ):
        _run(tmp_path, timeout=3)
    assert _gone(_rank_pid(tmp_path))


def test_a_rung_that_fails_says_why(tmp_path):
    with pytest.raises(measure.RungFailedError, match="ValueError: it was this"):
        _run(tmp_path, then="raise ValueError('it was this')")


def test_out_of_memory_is_a_result_of_its_own():
    words = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
    assert measure._reason(words) == f"out of memory: {words}"
    assert measure._reason("ValueError: no") == "ValueError: no"


def test_only_a_process_that_catches_the_signal_is_asked():
    line = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert not measure._is_rank(process.pid)
    finally:
        process.kill()
        process.wait()


def test_figures_are_as_they_were_written(tmp_path):
    figures = {"loss": [8.354312896728516], "pools": {}}
    write = f"(folder / 'measured.json').write_text({json.dumps(figures)!r})"
    assert _run(tmp_path, rank=write) == figures
