"""A whole run, resuming it, and loading it on another number of ranks."""

import json
import shutil

import pytest

from integration.tests.training.conftest import Trainer, Training, losses

# The first of several trainings waits for the default data to be built.
pytestmark = pytest.mark.timeout(600)


def _copy_at_step_30(uninterrupted: Training, trainer: Trainer) -> None:
    """Make the state of a run that was cut off after step 30: its schedule still ends at 60."""
    shutil.copytree(uninterrupted.outputs, trainer.outputs)
    (folder,) = trainer.outputs.glob("mini/*")
    shutil.rmtree(folder / "checkpoint" / "step-60")
    shutil.rmtree(folder / "tb")


def test_the_default_run_learns_and_ends_with_the_table(uninterrupted):
    values = losses(uninterrupted)
    assert list(values) == list(range(1, 61))
    assert values[60] <= 0.75 * values[1]
    output = uninterrupted.output
    assert "step: 60  loss: " in output
    assert "Traceback" not in output
    for row in (
        f"first loss       │ {values[1]:.4f} (step 1)",
        f"last loss        │ {values[60]:.4f} (step 60)",
        "tokens/s",
        "seconds a step",
        "peak host memory",
        "contributions    │ ",
        "TensorBoard",
    ):
        assert row in output
    assert uninterrupted.run.checkpoints() == [30, 60]
    assert (
        len(json.loads((uninterrupted.run.folder / "end.json").read_text())["peak_host_bytes"]) == 2
    )


def test_resuming_at_30_gives_bitwise_the_same_losses(uninterrupted, trainer):
    _copy_at_step_30(uninterrupted, trainer)
    resumed = trainer.train("--resume")
    before, after = losses(uninterrupted), losses(resumed)
    assert after == {step: before[step] for step in range(31, 61)}
    assert "Training starts at step 31" in resumed.output


def test_a_checkpoint_of_two_ranks_loads_on_one(uninterrupted, trainer):
    """EP 2 to EP 1: everything comes back but the data position, which is said."""
    _copy_at_step_30(uninterrupted, trainer)
    resumed = trainer.train("--resume", "--ranks", "1", "--", "--training.steps", "33")
    assert "saved by 2 data-parallel ranks and is loaded by 1" in resumed.output
    before, after = losses(uninterrupted), losses(resumed)
    assert list(after) == [31, 32, 33]
    # A fresh model is near step 1's loss. The data differs (it starts again), so no equality.
    assert max(after.values()) < 0.5 * (before[1] + before[30])


def test_resuming_a_finished_run_trains_nothing_and_says_so(uninterrupted, trainer):
    shutil.copytree(uninterrupted.outputs, trainer.outputs)
    resumed = trainer.train("--resume")
    assert "none: the run was already at its last step" in resumed.output


def test_resuming_goes_on_from_the_newest_whole_checkpoint(uninterrupted, trainer):
    """A shard of 0 bytes, as a crashed file system leaves it: the older one is taken, and said."""
    shutil.copytree(uninterrupted.outputs, trainer.outputs)
    (folder,) = trainer.outputs.glob("mini/*")
    shutil.rmtree(folder / "tb")
    shard = folder / "checkpoint" / "step-60" / "__1_0.distcp"
    shard.write_bytes(b"")
    resumed = trainer.train("--resume", "--", "--training.steps", "31")
    assert "checkpoint of step 60 is damaged (__1_0.distcp has 0 bytes of " in resumed.output
    assert "Training starts at step 31" in resumed.output
    assert list(losses(resumed)) == [31]


def test_a_wrong_option_harms_no_run(uninterrupted, trainer):
    shutil.copytree(uninterrupted.outputs, trainer.outputs)
    (job,) = trainer.outputs.glob("mini/*/job.json")
    before = job.read_text()
    refused = trainer.train("--resume", "--", "--training.stpes", "70", expected=2)
    assert "did you mean --training.steps?" in refused.output
    refused = trainer.train("--resume", "--", "--training.steps", "10", expected=2)
    assert "--training.steps 10 ends before step 60" in refused.output
    assert job.read_text() == before
    assert trainer.train("--resume").run.checkpoints() == [30, 60]
