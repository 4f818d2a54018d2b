"""The ladder's figures: comparison, medians, the JSON file and going on with it."""

import json
from dataclasses import replace

import pytest

from integration.ground.errors import UserError
from integration.jobs.catalog import SLICE
from integration.ladder import rungs
from integration.ladder.result import Ladder, Row, mfu
from integration.tests.ladder.made import CHAIN, PLACE, measured

LADDER = Ladder(
    config="mini",
    layers=None,
    experts=None,
    options=[],
    ranks=2,
    steps=2,
    warmup=1,
    rounds=1,
    machine={"cores": 2, "gpus": 0},
    torch="2.14.1",
    torchtitan="0.3.0",
    patches={"a": "0" * 64, "b": "1" * 64},
    command="integration ladder mini",
    date="2026-11-30",
)
CLIMBED = rungs.climb(CHAIN, PLACE)


def _ladder(**losses: float) -> Ladder:
    """A ladder that ran: the last loss of each rung, by what it adds; 3.0 unless given."""
    ladder = replace(LADDER, rungs=[])
    ladder.arrange(CLIMBED)
    for rung in CLIMBED:
        key = f"{'without_' if rung.kind == 'without' else ''}{rung.contribution or 'base'}"
        ladder.row(rung).add(measured(loss=[9.0, 5.0, losses.get(key, 3.0)]), ranks=2)
    ladder.compare(CLIMBED, CHAIN, PLACE)
    return ladder


def _numbers(ladder: Ladder) -> dict[str, str]:
    return {row.label: row.numbers for row in ladder.rungs}


def test_equal_numbers_are_equal():
    numbers = _numbers(_ladder())
    assert numbers.pop("pristine") == "not compared"
    assert set(numbers.values()) == {"equal"}


def test_a_change_counts_once_where_it_was_declared():
    # "changing" declares a change: later rungs have the new numbers, the set without it the old.
    ladder = _ladder(changing=2.5, b=2.5, without_a=2.5, without_b=2.5, without_cpu_device=2.5)
    numbers = _numbers(ladder)
    declared = "changes as declared: changing: sums in another order"
    assert numbers["+ changing"] == declared
    assert numbers["full set - changing"] == declared
    assert numbers["+ b"] == numbers["+ a"] == numbers["full set - b"] == "equal"


def test_a_change_that_was_not_declared_differs_and_says_where():
    ladder = _ladder(a=2.5, changing=2.5, b=2.5)
    row = next(r for r in ladder.rungs if r.label == "+ a")
    assert row.numbers == "DIFFER"
    assert row.compared_with == "pristine + cpu_device"
    assert row.difference == "loss of step 3: expected 3.0, got 2.5"


def test_a_gradient_norm_differs_too():
    ladder = _ladder()
    row = next(r for r in ladder.rungs if r.label == "+ a")
    row.runs[0]["grad_norm"][1] += 1e-7
    ladder.compare(CLIMBED, CHAIN, PLACE)
    assert row.numbers == "DIFFER"
    assert row.difference.startswith("gradient norm of step 2")


def test_a_rung_that_differs_from_itself_differs():
    ladder = _ladder()
    row = next(r for r in ladder.rungs if r.label == "+ changing")
    row.add(measured(loss=[9.0, 5.0, 2.0]), ranks=2)
    ladder.compare(CLIMBED, CHAIN, PLACE)
    assert row.numbers == "DIFFER"
    assert row.difference.startswith("between its own runs")


def test_a_missing_step_differs():
    ladder = _ladder()
    row = next(r for r in ladder.rungs if r.label == "+ a")
    row.runs[0]["loss"].pop()
    ladder.compare(CLIMBED, CHAIN, PLACE)
    assert row.difference == "loss: expected 3 steps, got 2"


def test_nothing_is_compared_where_determinism_was_given_up():
    ladder = replace(_ladder(a=2.5), options=["--debug.no-deterministic"])
    ladder.compare(CLIMBED, CHAIN, PLACE)
    assert set(_numbers(ladder).values()) == {"not compared"}


def test_medians_and_spread_are_over_all_rounds():
    row = Row("x", "add", "x", ["x"], [])
    row.add(measured(step_s=[1.0, 2.0], forward=[0.1, 0.3]), ranks=2)
    row.add(measured(step_s=[2.0, 9.0], forward=[0.5, 0.7]), ranks=2)
    assert row.median["step_s"] == 2.0
    assert row.median["tokens_s_gpu"] == 1024 / 2 / 2.0
    assert row.median["forward_s"] == pytest.approx(0.4)
    assert row.median["exposed_communication_s"] is None
    assert row.spread == {"step_s": [1.0, 9.0]}
    assert row.most("peak_host") == 7
    assert row.most("peak_allocated") is None


def test_a_failure_in_a_later_round_leaves_the_figures():
    row = Row("x", "add", "x", ["x"], [])
    row.fail("out of memory")
    assert (row.status, row.reason) == ("failed", "out of memory")
    row = Row("x", "add", "x", ["x"], [])
    row.add(measured(), ranks=2)
    row.fail("out of memory")
    assert (row.status, row.reason) == ("ok", "round 2: out of memory")


def test_the_file_holds_what_was_agreed_on(tmp_path):
    path = tmp_path / "deep" / "ladder.json"
    ladder = _ladder()
    ladder.row(CLIMBED[0]).runs.clear()
    ladder.row(CLIMBED[0]).fail("no GPU")
    ladder.save(path)
    record = json.loads(path.read_text())
    assert record["kind"] == "ladder"
    assert record["patches"] == LADDER.patches
    assert record["published"][2] == {"label": "activation offload", "tokens_s_gpu": [370, 508]}
    first, second = record["rungs"][:2]
    assert (first["status"], first["reason"], first["runs"]) == ("failed", "no GPU", [])
    assert second["set"] == ["cpu_device"]
    assert {"loss", "grad_norm", "step_s", "phases", "pools", "peak_host"} <= set(second["runs"][0])
    assert {"tokens_s_gpu", "step_s", "forward_s"} <= set(second["median"])
    assert not list(tmp_path.rglob("*.part"))


def test_a_rung_that_has_not_run_is_not_in_the_file(tmp_path):
    ladder = replace(LADDER, rungs=[])
    ladder.arrange(CLIMBED)
    ladder.row(CLIMBED[1]).add(measured(), ranks=2)
    ladder.save(tmp_path / "x.json")
    record = json.loads((tmp_path / "x.json").read_text())
    assert [row["label"] for row in record["rungs"]] == ["pristine + cpu_device"]


def test_a_saved_ladder_goes_on_where_it_was(tmp_path):
    path = tmp_path / "ladder.json"
    ladder = replace(LADDER, rungs=[])
    ladder.row(CLIMBED[1]).add(measured(), ranks=2)
    ladder.save(path)
    again = replace(LADDER, rungs=[], rounds=3, command="another")
    again.go_on_from(path, retry=False)
    again.arrange(CLIMBED)
    assert [row.label for row in again.rungs] == [rung.label for rung in CLIMBED]
    assert len(again.row(CLIMBED[1]).runs) == 1
    assert again.row(CLIMBED[2]).status == "open"
    assert not again.complete


@pytest.mark.parametrize(("retry", "status"), [(False, "failed"), (True, "open")])
def test_what_could_not_run_is_tried_again_where_asked_for(retry, status, tmp_path):
    path = tmp_path / "ladder.json"
    ladder = replace(LADDER, rungs=[])
    ladder.row(CLIMBED[0]).fail("killed")
    ladder.row(CLIMBED[1]).add(measured(), ranks=2)
    ladder.save(path)
    again = replace(LADDER, rungs=[])
    again.go_on_from(path, retry=retry)
    again.arrange(CLIMBED)
    assert again.row(CLIMBED[0]).status == status
    assert again.row(CLIMBED[1]).status == "ok"


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 5},
        {"options": ["--training.seq_len", "512"]},
        {"machine": {"cores": 4, "gpus": 0}},
        {"patches": {"a": "0" * 64, "b": "2" * 64}},
    ],
)
def test_two_jobs_are_not_mixed_in_one_ladder(change, tmp_path):
    LADDER.save(tmp_path / "x.json")
    with pytest.raises(UserError, match=next(iter(change))) as error:
        replace(LADDER, **change).go_on_from(tmp_path / "x.json", retry=False)
    assert "a': '0" not in str(error.value)  # only the patch that differs


def test_a_ladder_of_reworded_patches_goes_on_and_says_so(tmp_path):
    path = tmp_path / "ladder.json"
    LADDER.save(path)
    record = json.loads(path.read_text())
    assert "measured_patches" not in record
    path.write_text(json.dumps(record | {"measured_patches": {"a": "9" * 64}}))
    again = replace(LADDER, rungs=[])
    again.go_on_from(path, retry=False)
    again.save(path)
    assert json.loads(path.read_text())["measured_patches"] == {"a": "9" * 64}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"kind": "plan"}', '{"kind": "ladder"}'])
def test_another_file_is_refused(text, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match="expects the JSON file of a ladder"):
        Ladder.load(path)


def test_utilisation_is_of_the_median_step_and_kept(tmp_path):
    machine = {"gpus": 2, "gpu": "NVIDIA H200, 580.1"}
    ladder = replace(_ladder(), ranks=2, tokens_a_step=600, machine=machine)
    ladder.utilise(SLICE)
    row = ladder.rungs[0]
    assert row.median["mfu"] == (mfu(SLICE, machine, 300, row.median["step_s"] or 0) or 0) > 0
    ladder.save(tmp_path / "ladder.json")
    assert Ladder.load(tmp_path / "ladder.json").rungs[0].median["mfu"] == row.median["mfu"]
