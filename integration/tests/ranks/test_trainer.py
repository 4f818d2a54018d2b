"""Where a stopped run saves, and where it must not: no rank, no model, the decision alone."""

import signal
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest

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
