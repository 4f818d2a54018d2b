"""What the ladder prints."""

from dataclasses import replace

import pytest
from rich.console import Console

from integration.ladder import table
from integration.ladder.result import Ladder
from integration.tests.ladder.made import CHAIN, PLACE, measured
from integration.tests.ladder.test_result import CLIMBED, LADDER

GPU = {
    "peak_allocated": 3 * 2**30,
    "peak_reserved": 4 * 2**30,
    "alloc_retries": 5,
    "pools": {
        "default stream": {"live": 2**30, "cached": 2**29},
        "all-gather stream": {"live": 0, "cached": 2**31},
    },
}


def _printed(ladder: Ladder) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    table.show(ladder, CLIMBED, console)
    return console.export_text()


@pytest.fixture
def ladder() -> Ladder:
    made = replace(LADDER, rungs=[], tokens_a_step=1024)
    made.arrange(CLIMBED)
    made.row(CLIMBED[0]).fail("RuntimeError: no NVIDIA driver")
    for rung in CLIMBED[1:-1]:
        loss = 2.0 if rung.kind == "add" and rung.contribution != "a" else 3.0
        made.row(rung).add(measured(loss=[9.0, 5.0, loss]), ranks=2)
    made.compare(CLIMBED, CHAIN, PLACE)
    return made


def _line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip("│ ").startswith(start))


def _unpadded(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def test_a_row_has_its_figures_and_its_verdict(ladder):
    line = _line(_printed(ladder), "+ changing")
    for cell in ("512", "1.000", "1.000-1.000", "0.100", "0.500", "0.200", "9.0"):
        assert f" {cell} " in line
    assert "changes as declared" in line


def test_tokens_a_step_are_told_once_a_rung_has_run(ladder):
    assert "mini on 2 rank(s), 1,024 tokens a step\n" in _unpadded(_printed(ladder))
    ladder.tokens_a_step = 0
    assert "mini on 2 rank(s)\n" in _unpadded(_printed(ladder))


def test_reasons_stand_below_the_table(ladder):
    text = _printed(ladder)
    assert "cannot run" in _line(text, "pristine  ")
    assert "pristine: cannot run; RuntimeError: no NVIDIA driver" in text
    assert "+ changing: changes as declared: changing: sums in another order" in text
    assert "not yet" in _line(text, "full set - b")
    assert "full set - a: DIFFER (against + b: loss of step 3: expected 2.0, got 3.0)" in text


def test_on_a_cpu_there_are_no_columns_of_a_gpu(ladder):
    text = _printed(ladder)
    for heading in ("exposed", "reserved", "retries", "pool"):
        assert heading not in text.replace("numbers:", "")


def test_on_a_gpu_memory_is_told_by_stream(ladder):
    ladder.row(CLIMBED[1]).add(measured(**GPU), ranks=2)
    text = _printed(ladder)
    line = _line(text, "pristine + cpu_device")
    assert " 3.00 " in line
    assert " 4.00 " in line
    assert " 5 " in line
    assert "1.00 + 0.50" in text
    assert "all-gather stream" in text


def test_what_goes_with_a_contribution_is_in_its_row(ladder):
    ladder.row(CLIMBED[-2]).also_removed = ["dependant"]
    assert "- dependant" in _printed(ladder)


def test_the_published_ladder_is_said_to_be_of_another_machine(ladder):
    text = " ".join(_printed(ladder).split())
    for figures in ("90", "370 to 508", "441 to 597", "996 to 1,210", "1,300"):
        assert figures in text
    assert "of another machine (384 GH200)" in text
    assert "each pair is before and after" in text
