"""How many ranks a job gets, and what is refused before anything is built."""

import os

import pytest

from integration.ground import owner
from integration.ground.errors import UserError
from integration.jobs import catalog
from integration.patchset import repository
from integration.train import start
from integration.train.run import Job, Run


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


def _request(
    *,
    layers: int | None = None,
    experts: int | None = None,
    resume: bool = True,
    without: tuple[str, ...] = (),
) -> start.Request:
    return start.Request(
        config="slice",
        layers=layers,
        experts=experts,
        resume=resume,
        data=None,
        tokenizer=None,
        ranks=None,
        without=without,
        options=(),
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
    names = repository.without(("dist_muon_any_device",))
    assert names is not None
    assert not {"dist_muon_any_device", "flex_shard_muon", "flex_shard_split_fused"} & set(names)
    # The overlay, which adds what is required, puts none of them back.
    assert names == tuple(c.name for c in repository.select(repository.load(), names))
    said = capsys.readouterr()
    assert said.err.startswith("left out too, as they require dist_muon_any_device: ")
    assert "flex_shard_split_fused" in said.err
    assert said.err.count("\n") == 1
    assert not said.out  # where `launch --dry` prints its script


def test_nothing_is_said_where_nothing_else_goes(capsys):
    names = repository.without(("shared_rope_cache",))
    assert names is not None
    assert len(names) == len(repository.load()) - 1
    assert not capsys.readouterr().err
    assert repository.without(()) is None


class BuiltError(Exception):
    """Stands for the overlay: what comes after it is not the subject. Carries the set's names."""


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A machine without a GPU; return what set ``start.train`` asks of the overlay."""
    monkeypatch.setenv("INTEGRATION_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(start.machine, "gpu_count", lambda: 0)

    def build(names):
        raise BuiltError(names)

    monkeypatch.setattr(start.overlay, "build", build)

    def names(request: start.Request) -> list[str]:
        with pytest.raises(BuiltError) as asked:
            start.train(request)
        return list(asked.value.args[0] or ())

    return names


def _run_of(names: list[str]) -> Run:
    run = Run.new("slice")
    run.write(Job("slice", "/data", "/tokenizer", (), tuple(names), None, None))
    run.checkpoint(10).mkdir(parents=True)
    (run.checkpoint(10) / ".metadata").touch()
    return run


def test_a_run_goes_on_with_the_set_it_had(built, capsys):
    every = [c.name for c in repository.load()]
    less = [name for name in every if name != "shared_rope_cache"]
    _run_of([*less, "dropped_since"])
    assert built(_request()) == less
    assert capsys.readouterr().err == (
        "left out, as in the run that goes on (--without names others): shared_rope_cache\n"
    )


def test_a_run_goes_on_with_another_set_where_one_is_asked_for(built, capsys):
    every = [c.name for c in repository.load()]
    _run_of([name for name in every if name != "shared_rope_cache"])
    names = built(_request(without=("moe_combine_memory",)))
    assert names == [name for name in every if name != "moe_combine_memory"]
    assert not capsys.readouterr().err


def test_a_run_of_the_full_set_goes_on_without_a_word(built, capsys):
    every = [c.name for c in repository.load()]
    _run_of(every)
    assert built(_request()) == every
    assert not capsys.readouterr().err


def test_a_cpu_needs_cpu_device(built, tmp_path, monkeypatch):
    request = _request(resume=False, without=("cpu_device",))
    with pytest.raises(UserError, match="training on a CPU needs cpu_device, which is left out"):
        start.train(request)
    assert not list(tmp_path.iterdir())  # no empty run
    monkeypatch.setattr(start.machine, "gpu_count", lambda: 1)
    monkeypatch.setattr(start.machine, "require_compiler", lambda: None)
    assert "cpu_device" not in (built(request) or ["cpu_device"])


def test_a_run_that_is_alive_is_not_joined(built, tmp_path):
    """``built`` reaches the overlay: what is refused is refused before it."""
    run = _run_of([c.name for c in repository.load()])
    alive = owner.take(run.folder)
    with pytest.raises(
        UserError, match=rf"in use by process {os.getpid()} on .* kill {os.getpid()}"
    ):
        start.train(_request())
    alive.close()
    built(_request())


def test_more_ranks_than_cores_is_said(monkeypatch, capsys):
    monkeypatch.setattr(start.machine, "cores", lambda: 2)
    assert start.choose_ranks(catalog.find("mini"), 64, 0) == 64
    assert "64 ranks share 2 cores" in capsys.readouterr().err
    start.choose_ranks(catalog.find("mini"), 2, 0)
    start.choose_ranks(catalog.find("mini"), 64, 64)
    assert not capsys.readouterr().err


def test_the_default_data_of_a_run_is_built_again(monkeypatch, tmp_path):
    """After ``make clean``, also where the cache has moved; a user's own is never replaced."""
    built = (tmp_path / "new" / "pins-0" / "tokenizer", tmp_path / "new" / "pins-0" / "dataset")
    monkeypatch.setattr(start.job_data, "default_folders", lambda: built)
    gone = tmp_path / "old" / "pins-0"
    before = Job("slice", str(gone / "dataset"), str(gone / "tokenizer"), (), ())
    job = start._continued(_request(), before)
    assert (job.tokenizer, job.data) == tuple(map(str, built))
    own = Job("slice", "/my/dataset", str(gone / "tokenizer"), (), ())
    assert start._continued(_request(), own).data == "/my/dataset"
    other = Job("slice", str(tmp_path / "pins-1" / "dataset"), str(gone / "tokenizer"), (), ())
    assert start._continued(_request(), other).data == other.data  # of other pins
