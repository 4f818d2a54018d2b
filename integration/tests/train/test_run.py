"""A run's folder: one a run, found again only where a complete checkpoint is."""

import pytest

from integration.ground.errors import UserError
from integration.train.run import Job, Run

JOB = Job("mini", "/data", "/tokenizer", ("--training.steps", "3"), ("cpu_device",))


@pytest.fixture(autouse=True)
def _outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("INTEGRATION_OUTPUTS", str(tmp_path))


def _checkpoint(run: Run, step: int, *, complete: bool) -> None:
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"x")
    if complete:
        (folder / ".metadata").write_bytes(b"x")


def test_runs_of_one_second_get_folders_of_their_own():
    assert len({Run.new("mini").folder for _ in range(5)}) == 5


def test_what_was_asked_comes_back():
    run = Run.new("mini")
    run.write(JOB)
    assert run.job() == JOB


def test_resume_skips_runs_without_a_complete_checkpoint():
    old, new = Run.new("mini"), Run.new("mini")
    for run in (old, new):
        run.write(JOB)
    _checkpoint(old, 30, complete=True)
    _checkpoint(new, 30, complete=False)
    assert Run.latest("mini") == old


def test_resume_without_any_says_what_to_do():
    with pytest.raises(UserError, match="start one with: integration train mini"):
        Run.latest("mini")


def test_checkpoints_are_ordered_by_number_not_by_name():
    run = Run.new("mini")
    for step in (100, 30, 9):
        _checkpoint(run, step, complete=True)
    assert run.checkpoints() == [9, 30, 100]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"config": "mini"}'])
def test_an_unreadable_job_file_is_one_sentence(text):
    run = Run.new("mini")
    (run.folder / "job.json").write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        run.job()
