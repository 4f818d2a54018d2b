"""A look at the machine informs, or is silent."""

import subprocess

import pytest

from integration.evidence import record


@pytest.mark.parametrize(
    "fails",
    [
        FileNotFoundError("nvidia-smi"),
        PermissionError("nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 60),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_tool_that_fails_counts_no_gpus(monkeypatch, fails):
    def run(*args, **kwargs):
        raise fails

    monkeypatch.setattr(subprocess, "run", run)
    assert record.machine()["gpus"] == 0


@pytest.mark.parametrize(
    ("answer", "gpus"), [("", {"gpus": 0}), ("A, 1\n\nA, 1\n", {"gpus": 2, "gpu": "A, 1"})]
)
def test_gpus_are_counted(monkeypatch, answer, gpus):
    done = subprocess.CompletedProcess([], 0, answer, "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    found = record.machine()
    assert {name: value for name, value in found.items() if name.startswith("gpu")} == gpus
