"""What a training inherits, and that its processes end with the one that started them."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from integration.ground import processes

LEFT = ("PET_NNODES", "PET_RDZV_CONF", "TORCHELASTIC_MAX_RESTARTS", "RANK", "LOCAL_RANK")
LEFT += ("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOGLEVEL")
LEFT += ("PYTHONHOME", "PYTHONINSPECT", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONIOENCODING")
LEFT += ("PYTHONSAFEPATH", "PYTHONSTARTUP", "OMP_PROC_BIND", "KMP_AFFINITY", "LOG_RANK")
OURS = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHON", "OMP_NUM_THREADS", "NCCL_DEBUG", "CC")
OURS += ("TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "MY_RANK", "PATH")


@pytest.mark.parametrize(("names", "kept"), [(LEFT, False), (OURS, True)])
def test_what_the_environment_may_decide(monkeypatch, names, kept):
    for name in names:
        monkeypatch.setenv(name, "3")
    assert {name for name in names if name in processes.environment()} == set(names if kept else ())


CHILD = """
import signal, sys, time
from integration.ground import processes
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True) or {then})
processes.end_with_parent(1.0)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
PARENT = """
import os, subprocess, sys, time
os.environ["INTEGRATION_PARENT"] = str({parent})
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(child.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("then", ["sys.exit()", "None"], ids=["ends when asked", "does not"])
@pytest.mark.parametrize("parent", ["os.getpid()", "1"], ids=["parent killed", "gone before"])
def test_a_process_ends_with_its_parent(then, parent):
    line = [sys.executable, "-c", PARENT.format(parent=parent), CHILD.format(then=then)]
    started = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    child = psutil.Process(int(started.stdout.readline()))
    assert started.stdout.readline() in ("ready\n", "asked\n")
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    _, alive = psutil.wait_procs([child], timeout=20)
    assert not alive
    assert "asked" in started.stdout.read() or parent == "1"


def test_processes_of_a_run_are_found_and_ended(tmp_path):
    line = [sys.executable, "-c", "import time; time.sleep(100)", f"--dump_folder={tmp_path}"]
    run, other = subprocess.Popen(line), subprocess.Popen([*line[:-1], f"{line[-1]}2"])
    try:
        time.sleep(0.2)
        found = processes.of_run(tmp_path)
        assert [process.pid for process in found] == [run.pid]
        processes.end(found)
        assert run.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
