"""``integration ladder`` as it is called: mistakes, and two rungs of real training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration.cli.main import main
from integration.ground.paths import REPO
from integration.jobs import catalog
from integration.ladder import run
from integration.tests.ladder.made import measured


def _run(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "integration", "ladder", *arguments]
    return subprocess.run(line, cwd=REPO, capture_output=True, text=True, env={**os.environ, **env})


@pytest.mark.parametrize(
    "half",
    ["--resume x/ladder.json --retry", "--stop-after 1.1", "--resume=x", "--stop-after=2 --retry"],
)
def test_the_kept_command_makes_the_whole_ladder(half):
    command = f"integration ladder slice --steps 4 {half} --traces -- --debug.no-deterministic"
    whole = "integration ladder slice --steps 4 --traces -- --debug.no-deterministic"
    assert run.Request(command=command).whole_command == whole


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("mimi",), "did you mean mini?"),
        (("mini", "--layers", "2"), "cut the config slice, and mini was asked for"),
        (("mini", "--names", "shared_rop_cache"), "did you mean shared_rope_cache?"),
        (("mini", "--names", "cpu_device,"), "unknown contribution ''"),
        (("mini", "--resume", "/nowhere"), "/nowhere cannot be read"),
        (("mini", "--", "--training.steps=5"), "decided by --steps"),
        (("mini", "--", "--checkpoint.no-enable"), "saves no weights"),
        (("leonardo_mini",), "has 2 of them"),
        (("mini", "--only", "remove"), "--only"),
        (("mini", "--label", "a/b"), "hyphens"),
        (("mini", "--retry"), "expected --resume FILE with --retry"),
        (("mini", "--timeout", "nan"), "--timeout must be at least 1, got nan"),
        (("mini", "--stop-after", "-1"), "--stop-after must be at least 0, got -1"),
    ],
)
def test_a_mistake_is_answered_in_words_and_with_an_exit_code(arguments, hint):
    answer = _run(*arguments)
    assert answer.returncode != 0
    assert hint in answer.stderr
    assert "Traceback" not in answer.stderr


def test_the_length_of_a_sequence_is_titans_option():
    mini = catalog.find("mini")
    options = ("--training.seq_len=64", "--training.seq-len", "128", "--a.b", "7")
    assert run._with_seq_len(mini, options).seq_len == 128
    assert run._with_seq_len(mini, ("--training.steps", "9")) is mini


@pytest.mark.parametrize("after", [0, 1])
def test_ctrl_c_says_how_to_go_on(after, tmp_path, monkeypatch, capsys):
    rungs = iter(range(after))

    def measure(*arguments: object) -> dict:
        if next(rungs, None) is None:
            raise KeyboardInterrupt
        return measured()

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run.machine, "gpu_count", lambda: 0)
    monkeypatch.setattr(run.signal, "signal", lambda *arguments: None)
    monkeypatch.setenv("INTEGRATION_OUTPUTS", str(tmp_path))
    monkeypatch.setenv("INTEGRATION_DEBUG", "")
    with pytest.raises(SystemExit) as stop:
        main(["ladder", "mini", "--only", "full", "--rounds", "2", "--traces"])
    told = capsys.readouterr()
    assert stop.value.code == 130
    if after:
        (file,) = tmp_path.rglob("ladder.json")
        assert told.err.endswith(f"with the same command and --resume {file}\n")
    else:
        assert told.err == "interrupted\n"
    assert "1 rung(s), 2 rank(s)" in told.out
    assert "--traces keeps nothing here" in told.out


@pytest.mark.timeout(600)
def test_two_rungs_are_trained_and_compared_and_gone_on_with(tmp_path):
    arguments = ("mini", "--only", "add", "--names", "shared_rope_cache", "--steps", "2")
    short = ("--warmup", "1", "--ranks", "2")
    first = _run(*arguments, *short, "--stop-after", "0.001", INTEGRATION_OUTPUTS=str(tmp_path))
    (file,) = tmp_path.rglob("ladder.json")
    answer = _run(*arguments, *short, "--resume", str(file), INTEGRATION_OUTPUTS=str(tmp_path))
    assert answer.returncode == 0, answer.stderr + answer.stdout

    assert "no rung ran" in first.stderr  # pristine was all that there was time for
    assert "round 1  pristine:" in first.stdout
    assert "round 1  pristine:" not in answer.stdout
    record = json.loads(file.read_text())
    pristine, base, added, full = record["rungs"]
    assert pristine["status"] == "failed"
    assert "NVIDIA" in pristine["reason"]
    assert base["label"] == "pristine + cpu_device"
    assert (added["label"], added["numbers"]) == ("+ shared_rope_cache", "equal")
    assert full["label"] == "full set"
    assert full["numbers"].startswith("changes as declared: ")
    for row in (base, added, full):
        (measured,) = row["runs"]
        assert len(measured["loss"]) == len(measured["grad_norm"]) == 3
        assert len(measured["step_s"]) == 2
        phases = measured["phases"]
        parts = [phases[f"{name}_s"] for name in ("forward", "backward", "optimizer")]
        for step, *phase in zip(measured["step_s"], *parts, strict=True):
            assert min(phase) > 0
            assert sum(phase) < step
        assert phases["exposed_communication_s"] is None
        assert measured["peak_host"] > 2**28
        assert measured["start_s"] > 1
        assert row["median"]["tokens_s_gpu"] == 512 / row["median"]["step_s"]
    assert record["tokens_a_step"] == 1024
    assert [f for f in file.parent.iterdir() if f.is_dir()] == [file.parent / "pristine"]


def test_evidence_is_kept_in_the_package():
    assert Path(run.EVIDENCE).relative_to(REPO) == Path("integration/evidence")
