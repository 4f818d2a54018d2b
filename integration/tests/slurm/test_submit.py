"""``integration launch``: what it refuses, prints, writes and hands to sbatch."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from integration.cli.main import main
from integration.ground.errors import UserError
from integration.jobs.cluster import load
from integration.patchset.overlay import Overlay
from integration.slurm import submit
from integration.slurm.submit import Request

real, overlay_build = submit.options.accepted, submit.overlay.build
REQUEST = Request(
    config="mini",
    cluster="leonardo",
    nodes=2,
    account="me",
    data=Path("data"),
    tokenizer=Path("tokenizer"),
    options=("--training.steps=5", "it's $(id)"),
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
    monkeypatch.setattr(submit.options, "accepted", lambda asked: None)
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
        ({"cluster": "leonard"}, r"unknown cluster 'leonard'; did you mean leonardo\?"),
        ({"nodes": 0}, r"--nodes must be at least 1, got 0"),
        ({"ranks_per_node": 9}, r"--ranks-per-node 9 is more than the 4 GPUs"),
        ({"account": "a b"}, r"--account must be"),
        ({"data": None, "config": "leonardo_1t"}, r"expected --data and --tokenizer .* no --data;"),
        (
            {"data": None, "tokenizer": None, "config": "jupiter_1t_hsdp"},
            r"with jupiter_1t_hsdp, got no --data and no --tokenizer; .* nothing was written",
        ),
        ({"cluster": None}, r"expected --cluster with mini, which is planned for h200"),
        ({"submit": True, "account": None}, r"--submit needs the account .* --account NAME"),
        (
            {"cluster": "jupiter", "nodes": 96},
            r"mini cannot run: efsdp 192 x ep 2 ranks outnumber the 8 experts",
        ),
        (
            {"config": "leonardo_1t_fp8", "nodes": 128},
            r"the A100 64GB of leonardo has none .* as --cluster jupiter",
        ),
        (
            {"config": "leonardo_1t_fp8", "nodes": 128, "options": ("--parallelism.x=1",)},
            r"the A100 64GB of leonardo has none",
        ),
        (
            {"config": "leonardo_1t", "nodes": 4096},
            r"has 16384 ranks, one a GPU, and leonardo has 13824 GPUs",
        ),
        ({"without": ("cpu_devise",)}, r"did you mean cpu_device\?"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(outputs, changes, sentence, monkeypatch):
    monkeypatch.setattr(submit.shutil, "which", lambda name: name)
    with pytest.raises(UserError, match=sentence) as caught:
        submit.launch_job(replace(REQUEST, **changes))
    assert "\n" not in str(caught.value)
    assert not outputs.exists()


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(outputs, monkeypatch):
    monkeypatch.setattr(submit.job_data, "tokenizer_size", lambda folder: 200_000)
    with pytest.raises(UserError, match="has 200000 tokens and leonardo_small a vocabulary of 128"):
        submit.launch_job(replace(REQUEST, config="leonardo_small", nodes=16))
    assert not outputs.exists()


def test_the_command_line_says_it_on_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "mini", "--cluster", "leonardo", "--nodes", "0"])
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


def test_what_the_user_set_for_sbatch_changes_nothing(outputs, tmp_path, monkeypatch, capsys):
    """Each replaces an option of the script: its environment, its time limit, its threads."""
    for name in ("SBATCH_EXPORT", "SBATCH_TIMELIMIT", "SLURM_HINT", "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    commands(tmp_path, monkeypatch, f"export > {tmp_path}/seen; echo 1")
    submit.launch_job(replace(REQUEST, submit=True))
    seen = re.findall(r"\b((?:SBATCH|SLURM)_\w+)=", (tmp_path / "seen").read_text())
    assert seen == ["SLURM_CONF"]
    capsys.readouterr()
    submit.launch_job(REQUEST)
    assert "submit with: env -u SBATCH_EXPORT -u SBATCH_TIMELIMIT -u SLURM_HINT sbatch /" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("name", ["leonardo", "jupiter"])
def test_the_cluster_is_the_configs_own(outputs, capsys, name):
    config = f"{name}_1t"
    request = replace(REQUEST, config=config, cluster=None, nodes=None, dry=True)
    submit.launch_job(request)
    assert f" node(s) of {name}, " in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_titans_own_parser_judges_its_options_before_a_script(outputs, monkeypatch):
    """For the config in FP8 too, which is refused itself where there is no such GPU."""
    asked = []
    monkeypatch.setattr(submit.options, "accepted", lambda each: asked.append(each) or real(each))
    monkeypatch.setattr(submit.overlay, "build", overlay_build)
    request = replace(REQUEST, config="leonardo_1t_fp8", cluster="jupiter", nodes=128)
    with pytest.raises(UserError, match=r"Unrecognized options: --no\.such\.option, 5; nothing"):
        submit.launch_job(replace(request, options=("--no.such.option", "5")))
    assert (asked[0].job.config, asked[0].ranks) == ("leonardo_1t", 512)
    assert not outputs.exists()


def test_what_sbatch_refuses_is_passed_on(outputs, tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, 'echo "sbatch: error: Invalid account" >&2; exit 1')
    with pytest.raises(UserError, match=r"sbatch refused the job: sbatch: error: Invalid account"):
        submit.launch_job(replace(REQUEST, submit=True))


def test_submit_without_slurm_says_where_to_do_it(outputs, tmp_path, monkeypatch):
    commands(tmp_path, monkeypatch, None)
    with pytest.raises(UserError, match=r"--submit needs sbatch, .* on a login node"):
        submit.launch_job(replace(REQUEST, submit=True))
    assert not outputs.exists()


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"config": "jupiter_1t", "cluster": "jupiter", "nodes": 96}, ""),
        ({"config": "leonardo_1t", "nodes": 128}, ""),
        (
            {"config": "jupiter_1t", "cluster": "jupiter", "nodes": 10},
            "warning: jupiter_1t does not fit by its plan, which leaves TorchTitan's options out: "
            "rank 0 needs 398.0 GiB on the host, which has 108.0 GiB; see: integration plan "
            "jupiter_1t --cluster jupiter --ranks 40\n",
        ),
        (
            {"config": "jupiter_1t", "cluster": "jupiter", "without": ("activation_offload",)},
            "on the GPU, which has 95.0 GiB; see: integration plan jupiter_1t --cluster jupiter "
            "--ranks 384 --without activation_offload\n",
        ),
    ],
)
def test_what_does_not_fit_by_its_plan_is_written_with_a_warning(outputs, capsys, changes, warning):
    request = replace(REQUEST, nodes=None, dry=True)
    submit.launch_job(replace(request, **changes))
    said = capsys.readouterr()
    assert said.out.startswith("#!/bin/bash\n")  # the script alone
    assert said.err.endswith(warning) and bool(said.err) == bool(warning)


def test_a_layout_of_the_users_own_is_titans_to_judge(outputs, capsys):
    options = ("--parallelism.expert_parallel_degree=1",)
    submit.launch_job(replace(REQUEST, cluster="jupiter", nodes=96, options=options))
    assert not capsys.readouterr().err


SLURM = """
[slurm]
partition = "p"
account = "a"
cores = 64
time_limit = "1:00:00"
interface = "ib0"
"""


def test_a_cluster_file_without_hardware_is_not_planned(outputs, tmp_path, capsys):
    """Only the layout is looked at: 40 ranks would not fit JUPITER."""
    file = tmp_path / "cluster.toml"
    file.write_text(f'name = "jupiter"\ngpus_a_node = 4\n{SLURM}')
    request = replace(REQUEST, config="jupiter_1t", cluster=str(file), nodes=10)
    submit.launch_job(request)
    assert not capsys.readouterr().err
    with pytest.raises(UserError, match="jupiter_1t cannot run: "):
        submit.launch_job(replace(request, nodes=1, ranks_per_node=3))


def test_a_file_of_ones_own_is_planned_with_its_own_hardware(outputs, tmp_path, capsys):
    known = load("jupiter").file.read_text()
    file = tmp_path / "ours.toml"
    file.write_text(known.replace("memory_gib = 108.0", "memory_gib = 60.0"))
    submit.launch_job(replace(REQUEST, config="jupiter_1t", cluster=str(file), nodes=96))
    said = capsys.readouterr().err
    assert "GiB on the host, which has 60.0 GiB" in said
    assert f"--cluster {file} " in said


def test_a_cluster_without_a_scheduler_cannot_be_launched_on(outputs):
    with pytest.raises(UserError, match=r"h200 has no table \[slurm\] in .*h200.toml: jobs can be"):
        submit.launch_job(replace(REQUEST, cluster="h200"))
    assert not outputs.exists()
