"""``integration launch``: what it refuses, prints, writes and hands to sbatch."""

import json
import subprocess
from dataclasses import replace
from unittest import mock

import pytest

from integration.cli import main
from integration.errors import UserError
from integration.job.slurm import submit
from integration.job.slurm.submit import Request
from integration.patchset.overlay import Overlay

REQUEST = Request(
    config="mini",
    scheduler="slurm",
    cluster="leonardo",
    nodes=2,
    ranks=None,
    spares=0,
    account="me",
    time=None,
    max_restarts=3,
    max_ctas=None,
    max_p2p_channels=None,
    data=None,
    tokenizer=None,
    without=(),
    options=("--training.steps=5", "it's $(id)"),
    dry=False,
    submit=False,
)


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """The folder of runs. Overlay, data and tokenizer are not built: they are not the subject."""
    folder = tmp_path / "outputs"
    monkeypatch.setenv("INTEGRATION_OUTPUTS", str(folder))
    monkeypatch.setattr(submit.overlay, "build", lambda names: Overlay(None, (), ""))
    data = mock.Mock()
    data.folders.return_value = (tmp_path / "tokenizer", tmp_path / "data")
    data.tokenizer_size.return_value = 4096
    monkeypatch.setattr(submit, "job_data", data)
    return folder


def commands(tmp_path, monkeypatch, sbatch: str | None) -> None:
    """Leave one command on the PATH, or none."""
    folder = tmp_path / "bin"
    folder.mkdir()
    if sbatch is not None:
        (folder / "sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")
        (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"config": "mimi"}, r"unknown config mimi; did you mean mini\?"),
        ({"scheduler": "pbs"}, r"unknown scheduler pbs; known: slurm"),
        ({"cluster": "leonard"}, r"unknown cluster 'leonard'; did you mean leonardo\?"),
        ({"nodes": 0}, r"--nodes must be at least 1, got 0"),
        ({"ranks": 9}, r"--ranks-per-node 9 is more than the 4 GPUs"),
        ({"account": "a b"}, r"--account must be"),
        ({"dry": True, "submit": True}, r"--dry only prints .* give one of them"),
        ({"submit": True, "account": None}, r"--submit needs the account .* --account NAME"),
        ({"without": ("cpu_devise",)}, r"did you mean cpu_device\?"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(outputs, changes, sentence, monkeypatch):
    monkeypatch.setattr(submit.shutil, "which", lambda name: name)
    with pytest.raises(UserError, match=sentence) as caught:
        submit.launch_job(replace(REQUEST, **changes))
    assert "\n" not in str(caught.value)
    assert not outputs.exists()


def test_the_command_line_says_it_on_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "mini", "--nodes", "0"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --nodes must be at least 1")
    assert error.count("\n") == 1


def test_dry_prints_a_script_and_leaves_nothing(outputs, capsys):
    submit.launch_job(replace(REQUEST, dry=True))
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n")
    assert text.rstrip().endswith("fi")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert not outputs.exists()


def test_a_run_gets_a_folder_with_the_script_and_what_was_asked(outputs, capsys):
    submit.launch_job(REQUEST)
    (script,) = outputs.glob("mini/*/job.sh")
    assert f"submit with: sbatch {script}" in capsys.readouterr().out
    assert f'#SBATCH --output="{script.parent}/logs/slurm-%j.out"' in script.read_text()
    assert (script.parent / "logs").is_dir()  # or Slurm could not open its log
    job = json.loads((script.parent / "job.json").read_text())
    assert job["options"] == list(REQUEST.options)


def test_submit_hands_the_script_to_sbatch(outputs, tmp_path, monkeypatch, capsys):
    commands(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; echo "4711;leonardo"')
    submit.launch_job(replace(REQUEST, submit=True))
    (script,) = outputs.glob("mini/*/job.sh")
    assert (tmp_path / "asked").read_text() == f"--parsable {script}\n"
    shown = capsys.readouterr().out
    assert f"job: 4711; its log: {script.parent}/logs/slurm-4711.out; end it: scancel 4711" in shown


def test_what_sbatch_refuses_is_passed_on(outputs, tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, 'echo "sbatch: error: Invalid account" >&2; exit 1')
    with pytest.raises(UserError, match=r"sbatch refused the job: sbatch: error: Invalid account"):
        submit.launch_job(replace(REQUEST, submit=True))


def test_submit_without_slurm_says_where_to_do_it(outputs, tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, None)
    with pytest.raises(UserError, match=r"--submit needs sbatch, .* on a login node"):
        submit.launch_job(replace(REQUEST, submit=True))
    assert not outputs.exists()
