"""Which checkpoints are whole, on checkpoints that DCP itself has written."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from integration.ground.errors import UserError
from integration.jobs import checkpoints


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    state = {"weight": torch.arange(64.0), "optimizer": {"step": 3, "lr": [0.1]}, "data": b"x" * 99}
    dcp.save(state, checkpoint_id=str(folder / "step-1"), no_dist=True)
    return folder / "step-1"


@pytest.fixture
def run(tmp_path, written) -> Path:
    for step in (8, 16, 24):
        shutil.copytree(written, tmp_path / f"step-{step}")
    return tmp_path


def _shard(checkpoint: Path) -> Path:
    (shard,) = checkpoint.glob("*.distcp")
    return shard


def test_a_checkpoint_as_written_is_whole(written):
    assert checkpoints.damage(written) is None


def test_every_shorter_shard_is_damaged(run):
    shard = _shard(run / "step-24")
    size = shard.stat().st_size
    for left in (size - 1, size // 2, 1, 0):
        with open(shard, "rb+") as file:
            file.truncate(left)
        assert checkpoints.damage(run / "step-24") == f"{shard.name} has {left} bytes of {size}"
    shard.unlink()
    assert checkpoints.damage(run / "step-24") == f"{shard.name} is missing"


@pytest.mark.parametrize("data", [b"", b"x", b"\x80\x04."])
def test_metadata_that_cannot_be_read_is_damage(run, data):
    (run / "step-24" / ".metadata").write_bytes(data)
    assert ".metadata cannot be read" in (checkpoints.damage(run / "step-24") or "")


def test_reading_metadata_runs_nothing(run):
    """As pickle would: the file may come from anywhere."""
    import pickle

    class Run:
        def __reduce__(self):
            return (Path.touch, (run / "ran",))

    (run / "step-24" / ".metadata").write_bytes(pickle.dumps(Run()))
    assert checkpoints.damage(run / "step-24") is not None
    assert not (run / "ran").exists()


def test_the_newest_whole_one_is_left_as_the_newest(run):
    _shard(run / "step-24").write_bytes(b"")
    _shard(run / "step-16").unlink()
    sentences = checkpoints.set_damaged_aside(run)
    assert "step 24 is damaged" in sentences[0] and "has 0 bytes of" in sentences[0]
    assert "step 16 is damaged" in sentences[1] and "is missing" in sentences[1]
    assert all("newest whole one is of step 8" in sentence for sentence in sentences)
    # TorchTitan takes whatever has `step-N` in its name for a checkpoint of step N.
    assert sorted(f.name for f in run.iterdir()) == ["damaged-16", "damaged-24", "step-8"]
    assert checkpoints.set_damaged_aside(run) == []


def test_a_run_without_a_whole_one_is_refused_and_left_alone(run):
    for step in (8, 16, 24):
        _shard(run / f"step-{step}").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole \(step-24: .* is missing"):
        checkpoints.set_damaged_aside(run)
    assert checkpoints.complete(run) == [8, 16, 24]


def test_only_cut_off_checkpoints_are_removed(run):
    (run / "step-24" / ".metadata").unlink()
    exported = run / "step-32"
    exported.mkdir()
    (exported / "model.safetensors.index.json").write_text("{}")
    assert checkpoints.remove_cut_off(run) == ["step-24"]
    assert exported.exists()
    assert checkpoints.complete(run) == [8, 16]
