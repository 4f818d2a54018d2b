"""The plan of ``slice`` beside what ladders measured on GPUs (``integration/evidence``)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from integration.ground.paths import REPO
from integration.jobs.catalog import SLICE
from integration.jobs.cluster import load
from integration.plan import muon
from integration.plan.levers import Levers
from integration.plan.plan import make

LADDERS = sorted((REPO / "integration" / "evidence").glob("ladder-slice-*.json"))
# What the allocator of the GPU does not see.
OUTSIDE = ("NCCL", "CUDA context")


@pytest.mark.parametrize("file", LADDERS, ids=lambda file: file.stem)
def test_memory_and_time_of_the_full_set(file: Path, monkeypatch):
    """Within 10 per cent of the peak and 25 of the step, as README says."""
    ladder = json.loads(file.read_text())
    (full,) = (row for row in ladder["rungs"] if row["label"] == "full set")
    assert full["status"] == "ok"
    job = SLICE.cut(layers=ladder["layers"], experts=ladder["experts"]).on(ladder["ranks"])
    job = replace(job, seq_len=ladder["tokens_a_step"] // job.data_ranks)  # a sequence a rank
    if set(ladder["options"]) - {"--debug.no-deterministic"}:
        pytest.skip("the plan does not know TorchTitan's options")
    if not ladder["options"]:
        # Deterministic rungs all divide Muon's work in this way, to be compared bit by bit.
        (on_device,) = (split for split in muon.SPLITS if split.name == "on_device")
        monkeypatch.setattr(muon, "split", lambda *_: on_device)
    plan = make(job, load(job.cluster), Levers())
    planned = sum(size for item, size in plan.rank.hbm.items() if item not in OUTSIDE)
    measured = max(run["peak_allocated"] for run in full["runs"])
    assert planned == pytest.approx(measured, rel=0.10)
    assert plan.time.seconds == pytest.approx(full["median"]["step_s"], rel=0.25)
