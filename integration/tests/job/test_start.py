"""How many ranks a job gets, and what is refused before anything is built."""

import pytest

from integration.errors import UserError
from integration.job import catalog, start
from integration.job.run import Job
from integration.patchset import repository


@pytest.mark.parametrize(
    ("name", "asked", "gpus", "ranks"),
    [
        ("mini", None, 0, 2),
        ("mini", None, 4, 4),
        ("mini", 3, 0, 3),
        ("slice", None, 1, 1),
        ("leonardo_mini", None, 0, 8),
        ("leonardo_mini", 16, 0, 16),
        ("leonardo_small", None, 64, 64),
    ],
)
def test_ranks(name, asked, gpus, ranks):
    assert start.choose_ranks(catalog.find(name), asked, gpus) == ranks


@pytest.mark.parametrize(
    ("name", "asked", "gpus", "words"),
    [
        ("mini", 3, 2, "--ranks 3 needs as many GPUs, one a rank, and torch sees 2"),
        ("leonardo_mini", None, 2, "leonardo_mini is written for 8 ranks and needs as many GPUs"),
        ("jupiter_1t", None, 0, "written for 384 ranks, one a GPU, and torch sees no GPU here"),
        ("jupiter_1t", None, 8, "integration plan jupiter_1t"),
    ],
)
def test_more_ranks_than_gpus(name, asked, gpus, words):
    with pytest.raises(UserError) as refused:
        start.choose_ranks(catalog.find(name), asked, gpus)
    assert words in str(refused.value)


def _request(*, layers: int | None = None, experts: int | None = None) -> start.Request:
    return start.Request(
        config="slice",
        layers=layers,
        experts=experts,
        resume=True,
        data=None,
        tokenizer=None,
        ranks=None,
        port=None,
        without=(),
        options=(),
        debug=False,
    )


def test_a_run_goes_on_with_the_model_it_had():
    before = Job("slice", "/data", "/tokenizer", (), (), 2, None)
    assert start._continued(_request(), before).layers == 2
    assert start._continued(_request(layers=2), before).layers == 2
    with pytest.raises(UserError, match="a run of 2 layers, and --layers 3 makes another model"):
        start._continued(_request(layers=3), before)
    with pytest.raises(UserError, match="the default number of experts, and --experts 8 makes"):
        start._continued(_request(experts=8), before)


def test_what_requires_a_contribution_that_is_left_out_goes_too(capsys):
    names = start.contributions(("dist_muon_any_device",))
    assert names is not None
    assert not {"dist_muon_any_device", "flex_shard_muon", "flex_shard_split_fused"} & set(names)
    # The overlay, which adds what is required, puts none of them back.
    assert names == [c.name for c in repository.select(repository.load(), names)]
    said = capsys.readouterr()
    assert said.err.startswith("left out too, as they require dist_muon_any_device: ")
    assert "flex_shard_split_fused" in said.err
    assert said.err.count("\n") == 1
    assert not said.out  # where `launch --dry` prints its script


def test_nothing_is_said_where_nothing_else_goes(capsys):
    names = start.contributions(("shared_rope_cache",))
    assert names is not None
    assert len(names) == len(repository.load()) - 1
    assert not capsys.readouterr().err
    assert start.contributions(()) is None
