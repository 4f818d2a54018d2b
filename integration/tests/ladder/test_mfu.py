"""Model FLOP utilisation: the plan's FLOP, over what the GPU's data sheet allows."""

from dataclasses import replace

import pytest

from integration.jobs.catalog import SLICE
from integration.ladder.result import mfu, peak_flops

H200 = {"gpus": 2, "gpu": "NVIDIA H200, 580.1"}
TOKENS = 65_536
JOB = replace(SLICE, shape=SLICE.shape.cut(layers=2, experts=8), seq_len=TOKENS)


def test_the_peak_is_the_data_sheets():
    assert peak_flops(H200) == 989e12
    assert peak_flops({"gpus": 1, "gpu": "NVIDIA Unheard-of, 1"}) is None
    assert peak_flops({"gpus": 0}) is None


def test_useful_flop_over_the_peaks():
    """Two layers: 398.0 M parameters meet a token, 2 FLOP each; attention, half masked, 2 s d a
    token; the head; all of it once forward and twice as much backward."""
    shape = JOB.shape
    layer = 2 * 398.0e6 + 2 * TOKENS * shape.heads * shape.head_dim
    flops = 3 * TOKENS * (2 * layer + 2 * shape.vocab * shape.hidden)
    assert mfu(JOB, H200, TOKENS, 2.0) == pytest.approx(flops / 2.0 / 989e12, rel=2e-3)


def test_sequences_of_one_step_are_all_useful():
    """Accumulated over micro-batches, or in one: twice the tokens in twice the time."""
    assert mfu(JOB, H200, 2 * TOKENS, 4.0) == pytest.approx(mfu(JOB, H200, TOKENS, 2.0))


def test_an_unknown_gpu_has_none():
    assert mfu(JOB, {"gpus": 1, "gpu": "NVIDIA Unheard-of, 1"}, TOKENS, 2.0) is None
