"""Tensor, pipeline and expert parallelism and FSDP together, on eight gloo ranks."""

import pytest

from integration.tests.training.conftest import losses

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_leonardo_mini_learns_on_eight_ranks(trainer):
    """TP 2 x PP 2 x EP 4: the experts' ranks come from FSDP and TP."""
    training = trainer.start("leonardo_mini", "--", "--training.steps", "3")
    assert training.wait(540) == 0, training.output  # eight ranks on two cores
    values = losses(training)
    assert list(values) == [1, 2, 3]
    assert values[3] < values[2] < values[1]
    # Rank 0 is in the first stage and knows no loss; shown is a rank of the last one.
    assert f"step:  3  loss:  {values[3]:.5f}" in training.output
    assert "pp=2, dp_replicate=1, dp_shard=2, cp=1, tp=2, ep=4" in training.output
