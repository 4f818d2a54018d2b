"""The jobs as data: what they count to, and which layouts are refused in words."""

from dataclasses import replace

import pytest

from integration.ground.errors import UserError
from integration.jobs import catalog
from integration.jobs.catalog import JUPITER_1T, LEONARDO_1T, LEONARDO_SMALL, MINI
from integration.jobs.spec import Layout


def test_every_job_of_the_catalogue_can_be_laid_out():
    for job in catalog.CATALOG.values():
        job.check()


@pytest.mark.parametrize(
    ("ranks", "sequences", "ep"),
    # 3 does not divide 4: the batch grows to the next multiple. 5 and more: one sequence a rank.
    [(1, 4, 1), (2, 4, 2), (3, 6, 1), (4, 4, 2), (5, 5, 1), (8, 8, 2)],
)
def test_mini_takes_any_number_of_ranks(ranks, sequences, ep):
    job = MINI.on(ranks)
    assert job.sequences * job.data_ranks == sequences
    assert job.layout.ep == ep
    job.check()


def test_what_was_published_of_the_1t_run():
    assert JUPITER_1T.tokens == 384 * 65_536  # "about 25 M"
    assert catalog.JUPITER_1T_HSDP.tokens == 4 * JUPITER_1T.tokens
    assert JUPITER_1T.layout.efsdp(384) * JUPITER_1T.layout.ep == JUPITER_1T.shape.experts
    assert 0.995 < JUPITER_1T.shape.muon_params / JUPITER_1T.shape.params < 0.9968


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (JUPITER_1T.on(1320), "efsdp 330 x ep 4 ranks outnumber the 384 experts, so each is split"),
        (JUPITER_1T.on(2), "ep 4 must divide dp_shard 2 x tp 1 = 2 ranks"),
        (replace(JUPITER_1T, layout=Layout(ep=5), ranks=400), "ep 5 must divide the 384 experts"),
        (replace(JUPITER_1T, layout=Layout(tp=3)), "tp 3 must divide the 16 key-value heads"),
        (replace(JUPITER_1T, seq_len=131_072), "longer than the RoPE cache of 65536"),
        (replace(JUPITER_1T, loss_chunks=31), "31 loss chunks must divide the sequence"),
        (replace(MINI, layout=Layout(pp=8), ranks=8), "pp 8 needs a layer a stage"),
        (LEONARDO_SMALL.on(6), "pp 2 x dp_replicate 1 x tp 2 = 4 must divide the 6 ranks"),
    ],
)
def test_an_impossible_layout_is_named_with_axis_and_numbers(job, words):
    with pytest.raises(UserError, match="cannot run: ") as refused:
        job.check()
    assert words in str(refused.value)


def test_another_number_of_replicas_is_possible():
    replace(JUPITER_1T, layout=Layout(dp_replicate=2, ep=4), ranks=768).check()
    replace(LEONARDO_1T, layout=Layout(pp=8, tp=4, ep=16)).check()


def test_only_the_slice_is_cut():
    assert catalog.find("slice", layers=2, experts=8).shape.layers == 2
    with pytest.raises(UserError, match="cut the config slice, and mini was asked for"):
        catalog.find("mini", layers=2)
    with pytest.raises(
        UserError, match="--experts must be at least 8, as each token goes to that many"
    ):
        catalog.find("slice", experts=4)


def test_a_shape_without_sense_is_refused():
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        JUPITER_1T.shape.cut(layers=0)
    with pytest.raises(ValueError, match=r"Layout\.ep must be at least 1, got 0"):
        Layout(ep=0)
