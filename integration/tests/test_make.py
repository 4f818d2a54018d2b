"""`make` builds the same .venv whatever the user has set for pip and for Python."""

import os
import subprocess
import sys

import pytest

from integration.ground.paths import REPO

ELSEWHERE = """
[global]
user = true
target = /nonexistent/target
constraint = /nonexistent/constraints.txt
timeout = 31
[install]
index-url = https://from.file/simple
extra-index-url =
    https://one.example/simple
    https://two.example/simple
"""


@pytest.mark.parametrize("variables", [{}, {"PIP_USER": "1", "PIP_PYTHON": "/nonexistent"}])
def test_pip_keeps_where_packages_come_from_and_not_where_they_go(tmp_path, variables):
    (tmp_path / "pip.conf").write_text(ELSEWHERE)
    places = ("TARGET", "PREFIX", "ROOT", "SRC", "REQUIREMENT", "CONSTRAINT", "DRY_RUN")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {f"PIP_{name}": "/nonexistent/x" for name in places} | variables
    env |= {"PIP_INDEX_URL": "https://from.variable/simple"}
    env |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_REQUIRE_VIRTUALENV": "1"}
    command = [sys.executable, str(REPO / "ci" / "pip"), "config", "list"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert found.pop(":env:.index-url") == "'https://from.variable/simple'"
    assert found.pop(":env:.extra-index-url") == (
        "'https://one.example/simple https://two.example/simple'"
    )
    assert found.pop(":env:.timeout") == "'31'"
    assert found.pop(":env:.config-file") == "'/dev/null'"
    for name in found:  # of this machine's own files, of the same kind
        assert name.removeprefix(":env:.") in ("cert", "find-links", "proxy", "trusted-host")


@pytest.mark.parametrize(
    "variable", ["PYTHONHOME", "PYTHONINSPECT", "PYTHONOPTIMIZE", "PYTHONSTARTUP", "PYTHONWARNINGS"]
)
def test_make_keeps_pythons_own_variables_out(tmp_path, variable):
    """``make -n`` would only print: an installed .venv stands for itself."""
    shown = tmp_path / "python"
    shown.write_text("#!/bin/sh\nenv\n")
    shown.chmod(0o755)
    command = ["make", "--silent", "--old-file=.venv/.installed", "train", f"INTEGRATION={shown}"]
    env = {**os.environ, variable: "/nonexistent"}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PATH=" in done.stdout
    assert f"{variable}=" not in done.stdout
