"""Options of a run that goes on, and what TorchTitan's parser says of them before ranks start."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.ground.errors import UserError
from integration.jobs.handover import VOCAB_VARIABLE
from integration.patchset import overlay
from integration.train import options
from integration.train.launch import Launch
from integration.train.run import Job, Run


@pytest.mark.parametrize(
    ("before", "now", "both"),
    [
        ("--training.steps 9", "--training.steps=4", "--training.steps=4"),
        ("--a.list x y --b.c 1", "--a.list z", "--b.c 1 --a.list z"),
        ("--checkpoint.no-load_only", "--checkpoint.load-only", "--checkpoint.load-only"),
        ("--training.seq_len 8", "--training.seq-len 16", "--training.seq-len 16"),
        ("--training.steps -3", "", "--training.steps -3"),
        ("--x.a 1", "--x.ab 2", "--x.a 1 --x.ab 2"),
        ("", "", ""),
    ],
)
def test_a_later_value_replaces_the_earlier(before, now, both):
    assert options.merged(before.split(), now.split()) == tuple(both.split())


@given(st.lists(st.tuples(st.sampled_from(["--a.b", "--a.c", "--d.e_f"]), st.integers(0, 9))))
def test_merging_step_by_step_is_the_last_value_of_each(pairs):
    merged: tuple[str, ...] = ()
    for name, value in pairs:
        merged = options.merged(merged, (name, str(value)))
    found = dict(zip(merged[::2], map(int, merged[1::2]), strict=True))
    assert found == dict(pairs)
    assert len(merged) == 2 * len(found)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--training.stpes 70", r"--training.stpes, 70 \(did you mean --training.steps\?\)"),
        ("--training.steps -3", "--training.steps must be at least 1, got -3"),
        ("--training.seq_len 0", "--training.seq_len must be at least 1, got 0"),
        ("--training.steps many", "Error parsing --training.steps: invalid literal for int"),
        ("--training.steps 7 --metrics.log_freq=2", ""),
    ],
)
def test_options_are_judged_by_titans_parser(tmp_path, given, says):
    job = Job("mini", "/data", "/tokenizer", tuple(given.split()), ())
    start = Launch(run=Run(tmp_path), job=job, patched=overlay.build(), ranks=2, vocab=4096)
    assert start.environment()[VOCAB_VARIABLE] == "4096"
    if not says:
        assert options.accepted(start)["training.steps"] == 7
        return
    with pytest.raises(UserError, match=says) as refused:
        options.accepted(start)
    assert len(str(refused.value)) < 250
    assert "has no effect" not in str(refused.value)


def test_fewer_steps_than_a_run_has_done_are_refused():
    with pytest.raises(UserError, match=r"--training.steps 10 ends before step 30, .*/step-30"):
        options.refuse_shorter(10, 30, Path("run/step-30"))
    options.refuse_shorter(30, 30, Path("run/step-30"))
