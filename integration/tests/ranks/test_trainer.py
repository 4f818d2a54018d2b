"""Where a stopped run saves, and where it must not: no rank, no model, the decision alone."""

import signal
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest

from integration.ground.errors import UserError
from integration.ranks import trainer as trainer_module
from integration.ranks.trainer import JobTrainer


@pytest.mark.parametrize(
    ("start", "step", "saves"),
    [
        (0, 7, True),
        (0, 30, False),  # the interval's checkpoint was just written
        # Stopped right after a resume: step 37's checkpoint is the one that was loaded. Written
        # over and cut off, it would be lost.
        (37, 37, False),
        (37, 38, True),
        (0, 0, False),
    ],
)
def test_a_stop_never_writes_over_the_checkpoint_it_came_from(start, step, saves):
    trainer = SimpleNamespace(
        step=step,
        _start_step=start,
        _stop_asked=signal.SIGTERM,
        config=SimpleNamespace(
            checkpoint=SimpleNamespace(enable=True, interval=30, enable_first_step_checkpoint=False)
        ),
        checkpointer=mock.Mock(last_save_model_only=True),
    )
    JobTrainer._save_where_stopped(cast(JobTrainer, trainer))
    assert trainer.checkpointer.save.called is saves
    assert trainer.checkpointer.last_save_model_only is not saves  # all of the state, or nothing


def _folder(path, monkeypatch) -> SimpleNamespace:
    monkeypatch.setattr(trainer_module.dist, "get_rank", lambda: 0)
    checkpoint = SimpleNamespace(folder="saved")
    return SimpleNamespace(
        config=SimpleNamespace(dump_folder=str(path), checkpoint=checkpoint), _control=None
    )


def test_an_attempt_clears_what_the_last_one_left(tmp_path, monkeypatch):
    """Also under a scheduler, where no launcher of ours has looked."""
    cut_off = tmp_path / "saved" / "step-8"
    cut_off.mkdir(parents=True)
    (tmp_path / "end.json").write_text("{}")
    JobTrainer._clear_folder(cast(JobTrainer, _folder(tmp_path, monkeypatch)))
    assert not cut_off.exists()
    assert not (tmp_path / "end.json").exists()


def test_an_attempt_without_a_whole_checkpoint_does_not_start_anew(tmp_path, monkeypatch):
    damaged = tmp_path / "saved" / "step-8"
    damaged.mkdir(parents=True)
    (damaged / ".metadata").touch()
    with pytest.raises(UserError, match=r"step-8: its .metadata cannot be read"):
        JobTrainer._clear_folder(cast(JobTrainer, _folder(tmp_path, monkeypatch)))
    assert damaged.exists()
