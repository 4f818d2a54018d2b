"""What of a ladder is kept as evidence, and what binds it to its patches."""

import gzip
import json
import pickle
from dataclasses import replace

import pytest

from integration.evidence import record, snapshot
from integration.evidence.check import stale
from integration.ladder import run, rungs
from integration.tests.evidence.test_snapshot import made_snapshot
from integration.tests.ladder.made import CHAIN, PLACE, measured
from integration.tests.ladder.test_result import LADDER

KERNEL = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0}


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        ({"gpus": 0}, "cpu"),
        ({"gpus": 2, "gpu": "NVIDIA H200, 580.159.04"}, "h200x2"),
        ({"gpus": 2, "gpu": "NVIDIA A100-SXM4-64GB, 535.1"}, "a100x2"),
    ],
)
def test_evidence_is_named_by_where_it_comes_from(machine, name):
    assert record.short(machine, LADDER.ranks) == name


def test_the_lowest_and_the_full_set_keep_what_they_did(tmp_path):
    patches = {c.name: c.sha256 for c in CHAIN}
    ladder = replace(LADDER, rungs=[], patches=patches, machine={"gpus": 1, "gpu": "NVIDIA H200"})
    ladder = replace(ladder, label="long")
    wanted = rungs.climb(CHAIN, PLACE)
    ladder.arrange(wanted)
    traces, folder = tmp_path / "traces", tmp_path / "integration/evidence"
    traces.mkdir()
    for number, rung in enumerate(wanted):
        row = ladder.row(rung)
        if number == 0:
            row.fail("no driver")
            continue
        row.add(measured(), ranks=1)
        recorded = json.dumps({"traceEvents": [KERNEL]}).encode()
        (traces / f"{rung.slug}.json.gz").write_bytes(gzip.compress(recorded))
        history = pickle.dumps(made_snapshot(), protocol=4)
        (traces / f"{rung.slug}.snapshot.pickle.gz").write_bytes(gzip.compress(history))

    kept = run.keep(ladder, wanted, traces, folder)

    sets = [rung for rung in wanted if rung.kind in rungs.SETS]
    low, full = sets[1], max(sets, key=lambda rung: len(rung.names))
    name = f"ladder-{ladder.config}-long-h200x{ladder.ranks}"
    assert [file.name for file in kept] == [
        f"{name}.json",
        f"trace-{name}-{low.slug}.json.gz",
        f"{name}.{low.slug}.snapshot.pickle.gz",
        f"trace-{name}-{full.slug}.json.gz",
        f"{name}.{full.slug}.snapshot.pickle.gz",
    ]
    assert sorted(folder.iterdir()) == sorted(kept)
    trace = json.loads(gzip.decompress(kept[1].read_bytes()))
    assert trace["patches"] == {c: patches[c] for c in low.names}
    assert trace["command"].endswith(low.label)
    assert snapshot.peak(snapshot.read(kept[2])) == snapshot.peak(made_snapshot())
    (tmp_path / "README.md").touch()
    assert list(stale(tmp_path, CHAIN)) == []
    kept[0].unlink()
    assert {f.file.rpartition("/")[2] for f in stale(tmp_path, CHAIN)} == {
        kept[2].name,
        kept[4].name,
    }


def test_a_ladder_without_traces_is_kept_alone(tmp_path):
    ladder = replace(LADDER, rungs=[], machine={"gpus": 0})
    wanted = rungs.climb(CHAIN, PLACE)
    ladder.arrange(wanted)
    ladder.row(wanted[0]).add(measured(), ranks=1)
    (kept,) = run.keep(ladder, wanted, tmp_path / "none", tmp_path)
    assert json.loads(kept.read_text())["kind"] == "ladder"
