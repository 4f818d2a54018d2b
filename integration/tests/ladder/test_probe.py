"""The stopwatch in the ranks, as far as it goes without ranks; ``test_command.py`` has the rest."""

import pickle
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torchtitan.config.manager import ConfigManager

from integration.ladder import config_registry, probe


def test_memory_is_told_by_the_stream_that_holds_it(monkeypatch):
    segments = [
        {"stream": 0, "allocated_size": 10, "total_size": 16},
        {"stream": 0, "allocated_size": 0, "total_size": 4},
        {"stream": 77, "allocated_size": 1, "total_size": 8},
        {"stream": 99, "allocated_size": 0, "total_size": 64},
        {"stream": 55, "allocated_size": 2, "total_size": 2},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(probe, "_fsdp_streams", lambda model: {77: "all-gather stream"})
    assert probe.pools(torch.nn.Linear(1, 1)) == {
        "stream 1": {"live": 0, "cached": 64},
        "default stream": {"live": 10, "cached": 10},
        "all-gather stream": {"live": 1, "cached": 7},
        "stream 2": {"live": 2, "cached": 0},
    }


def test_a_model_without_fsdp_has_no_named_streams():
    assert probe._fsdp_streams(torch.nn.Linear(1, 1)) == {}


@pytest.fixture
def allocator(monkeypatch) -> list:
    """Stand for the CUDA allocator; return what it is asked for."""
    asked: list = []
    memory = torch.cuda.memory
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda enabled, **_: asked.append(enabled)
    )
    monkeypatch.setattr(memory, "_snapshot", lambda: asked.append("snapshot") or {"segments": []})
    monkeypatch.setattr(probe, "_fsdp_streams", lambda model: {77: "all-gather stream"})
    return asked


def test_the_allocator_is_recorded_during_the_step_alone(tmp_path, allocator):
    file = tmp_path / "snapshot.pickle"
    with probe.recorded(file, torch.nn.Linear(1, 1)):
        allocator.append("step")
    assert allocator == ["all", "step", "snapshot", None]
    names = {0: "default stream", 77: "all-gather stream"}
    assert pickle.loads(file.read_bytes()) == {"segments": [], "stream_names": names}


def test_recording_ends_where_the_step_fails(tmp_path, allocator):
    file = tmp_path / "snapshot.pickle"
    with pytest.raises(ValueError, match="out of"), probe.recorded(file, torch.nn.Linear(1, 1)):
        raise ValueError("out of memory")
    assert allocator == ["all", None]
    assert not file.exists()


def test_the_recorded_step_comes_after_all_others(monkeypatch):
    trainer = object.__new__(probe.MeasuredTrainer)
    training = SimpleNamespace(steps=4)
    trainer.config = cast(probe.MeasuredTrainer.Config, SimpleNamespace(training=training))
    trainer._warmup, trainer._last_measured, trainer._last = 1, 3, 5
    monkeypatch.setattr(
        probe.JobTrainer, "should_continue_training", lambda self: self.step < training.steps
    )
    kinds = []
    trainer.step = 0
    while trainer.should_continue_training():
        trainer.step += 1
        kinds.append(trainer._kind)
    assert kinds == ["warmup", "measured", "measured", "profiled", "recorded"]


def test_the_measured_job_is_the_job(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = config_registry.mini()
    plain = config_registry.job_registry.mini()
    assert config.training == plain.training
    assert config.optimizer == plain.optimizer
    assert config.debug.deterministic
    assert not config.checkpoint.enable
    with pytest.raises(AttributeError, match="no config mimi"):
        config_registry.mimi  # noqa: B018


def test_options_reach_the_measured_job(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = ["--module=integration.ladder", "--config=mini", "--warmup=3", "--profiled=1"]
    parsed = ConfigManager().parse_args([*line, "--recorded=1", "--debug.no-deterministic"])
    config = cast(probe.MeasuredTrainer.Config, parsed)
    assert (config.warmup, config.profiled, config.recorded) == (3, 1, 1)
    assert not config.debug.deterministic


def _config(
    muon: dict, *, offload: bool, deterministic: bool = True
) -> probe.MeasuredTrainer.Config:
    made = SimpleNamespace(
        optimizer=SimpleNamespace(optimizer_factory_kwargs_by_name=muon),
        training=SimpleNamespace(enable_cpu_offload=offload),
        debug=SimpleNamespace(deterministic=deterministic),
    )
    return cast(probe.MeasuredTrainer.Config, made)


@pytest.mark.parametrize(
    ("device", "offload", "muon", "expected"),
    [
        ("cuda", True, {"Muon": {}}, {"Muon": {"update_split": "on_device"}}),
        ("cuda", False, {"Muon": {}}, {"Muon": {}}),
        ("cpu", True, {"Muon": {}}, {"Muon": {}}),
        ("cuda", True, {}, {}),
    ],
)
def test_offloaded_muon_divides_its_work_alike_on_all_rungs(
    monkeypatch, device, offload, muon, expected
):
    def dist_muon(params: object, *, update_split: str = "auto") -> None: ...

    monkeypatch.setattr(probe, "device_type", device)
    monkeypatch.setattr(probe, "find", lambda module, name: dist_muon)
    probe._fix_update_split(_config(muon, offload=offload))
    assert muon == expected


def test_muon_divides_its_work_as_it_likes_where_no_numbers_are_compared(monkeypatch):
    def dist_muon(params: object, *, update_split: str = "auto") -> None: ...

    monkeypatch.setattr(probe, "device_type", "cuda")
    monkeypatch.setattr(probe, "find", lambda module, name: dist_muon)
    muon: dict = {"Muon": {}}
    probe._fix_update_split(_config(muon, offload=True, deterministic=False))
    assert muon == {"Muon": {}}


def test_muon_without_that_option_is_left_alone(monkeypatch):
    def pinned(params: object) -> None: ...

    monkeypatch.setattr(probe, "device_type", "cuda")
    monkeypatch.setattr(probe, "find", lambda module, name: pinned)
    muon: dict = {"Muon": {}}
    probe._fix_update_split(_config(muon, offload=True))
    assert muon == {"Muon": {}}
