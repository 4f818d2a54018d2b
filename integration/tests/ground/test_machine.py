import subprocess
from pathlib import Path

import pytest

from integration.ground import machine
from integration.ground.errors import UserError


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match="install gcc, or set CC"):
        machine.require_compiler()
    compiler = tmp_path / "cc"
    compiler.touch(mode=0o755)
    machine.require_compiler()


@pytest.mark.parametrize(
    "status",
    [
        OSError("no /proc"),
        "",
        "Name:\tpython\n",
        "VmHWM:\tmuch kB\n",
        ValueError("not text"),
    ],
)
def test_a_peak_that_the_kernel_does_not_tell_ends_no_run(monkeypatch, status):
    def read(path):
        if isinstance(status, Exception):
            raise status
        return status

    monkeypatch.setattr(Path, "read_text", read)
    assert machine.peak_resident_set() > 2**20


@pytest.mark.parametrize(
    ("answer", "gpus"), [("2\n", 2), ("hello from sitecustomize\n2\n", 2), ("", 0), ("no\n", 0)]
)
def test_gpus_are_counted_whatever_else_is_printed(monkeypatch, answer, gpus):
    monkeypatch.setattr(Path, "exists", lambda path: True)
    done = subprocess.CompletedProcess([], 0, answer, "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    assert machine.gpu_count() == gpus
