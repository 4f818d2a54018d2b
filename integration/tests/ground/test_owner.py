"""A folder has one owner, on this host and on a shared file system."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from integration.ground import owner
from integration.ground.errors import UserError

HOLD = """
import sys, time
from pathlib import Path
from integration.ground import owner
held = owner.take(Path(sys.argv[1]))
child = {child}
print("held", flush=True)
time.sleep(100)
"""
CHILD = "__import__('subprocess').Popen(['sleep', '100'], pass_fds=[held.descriptor])"


@pytest.fixture
def holder(tmp_path):
    """Start a process that owns the folder; with a child that shares its hold, if asked."""
    started = []

    def start(child: str = "None") -> subprocess.Popen:
        line = [sys.executable, "-c", HOLD.format(child=child), str(tmp_path)]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_living_owner_is_named_and_a_dead_one_holds_nothing(tmp_path, holder):
    process = holder()
    with pytest.raises(UserError, match=rf"process {process.pid} on .*: kill {process.pid}$"):
        owner.take(tmp_path)
    process.kill()
    process.wait()
    owner.take(tmp_path).close()


def test_processes_that_outlive_the_owner_still_hold(tmp_path, holder):
    """Ranks that save after their launcher was killed."""
    process = holder(CHILD)
    process.kill()
    process.wait()
    with pytest.raises(UserError, match=rf"ranks on .* that outlive process {process.pid}, which"):
        owner.take(tmp_path)


def test_a_rank_that_joins_holds_too(tmp_path):
    held = owner.take(tmp_path)
    rank = owner.join(tmp_path)
    assert rank is not None
    held.close()
    with pytest.raises(UserError, match="a process that has not left its name"):
        owner.take(tmp_path)
    rank.close()
    owner.take(tmp_path).close()


def test_nobody_owns_what_nobody_took(tmp_path):
    assert owner.join(tmp_path) is None


@pytest.fixture(params=["local locks", "no locks"])
def locks(request, monkeypatch):
    """A shared file system that does not lock between hosts, in both forms."""

    def none(descriptor, kind):
        raise OSError(95, "Operation not supported")

    if request.param == "no locks":
        monkeypatch.setattr(fcntl, "flock", none)
    return request.param


def _leave(folder: Path, age: float, **told) -> None:
    path = folder / owner.FILE
    path.write_text(json.dumps(told))
    os.utime(path, (time.time() - age,) * 2)


def test_another_host_holds_as_long_as_it_renews(tmp_path, locks):
    _leave(tmp_path, 5, name="", host="elsewhere", pid=17, started=1.0)
    with pytest.raises(UserError, match="process 17 on elsewhere; "):
        owner.take(tmp_path)
    _leave(tmp_path, owner.STALE_SECONDS + 5, name="", host="elsewhere", pid=17, started=1.0)
    owner.take(tmp_path).close()


def test_without_locks_the_process_is_looked_for(tmp_path, monkeypatch, holder):
    process = holder()
    monkeypatch.setattr(owner, "_lock", lambda descriptor, kind: None)
    with pytest.raises(UserError, match=f"process {process.pid} on"):
        owner.take(tmp_path)
    process.kill()
    process.wait()
    owner.take(tmp_path).close()


def test_a_job_that_is_requeued_keeps_its_folder_and_others_do_not_get_it(tmp_path):
    command = [sys.executable, "-m", "integration.ground.owner", str(tmp_path)]
    for name, code in (("Slurm job 7", 0), ("Slurm job 7", 0), ("Slurm job 8", 1)):
        done = subprocess.run([*command, name], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    assert re.search("error: .* is in use by Slurm job 7 on ", done.stderr)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"host": 5, "pid": "x"}'])
def test_an_unreadable_name_holds_nothing_for_long(tmp_path, text):
    (tmp_path / owner.FILE).write_text(text)
    os.utime(tmp_path / owner.FILE, (0, 0))
    owner.take(tmp_path).close()
