"""README's tables of one GPU say what the ladders that it links to have measured."""

import json
import re

import pytest

from integration.ground.paths import REPO

GIB = 2**30
EVIDENCE = REPO / "integration" / "evidence"
README = (REPO / "README.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| \[.*\]\((?P<file>integration/evidence/ladder-\S+\.json)\).* \| (?P<tokens>[\d,]+) "
    r"\| (?P<mfu>[\d.]+) % \| (?P<peak>[\d.]+) \|$",
    re.MULTILINE,
)
ROWS = list(ROW.finditer(README))
RUNG = re.compile(
    r"^\| (?P<label>(?:pristine|full set).*?) \| (?P<tokens>[\d,]+) \| (?P<step>[\d.]+) "
    r"\| (?P<peak>[\d.]+) \|$",
    re.MULTILINE,
)
RUNGS = list(RUNG.finditer(README))


def test_there_are_tables_while_there_is_evidence():
    """Evidence goes when a patch changes and no GPU is at hand, and its tables with it."""
    assert len(ROWS) == len(list(EVIDENCE.glob("ladder-slice-65536*-h200x1.json")))
    assert len(RUNGS) == 8 * (EVIDENCE / "ladder-slice-h200x1.json").is_file()


@pytest.mark.parametrize("row", RUNGS, ids=lambda row: row["label"])
def test_a_rung_is_what_was_measured(row: re.Match):
    name = "slice-newton-schulz" if "Newton" in row["label"] else "slice"
    ladder = json.loads((EVIDENCE / f"ladder-{name}-h200x1.json").read_text())
    (rung,) = (rung for rung in ladder["rungs"] if rung["label"] == row["label"])
    assert row["tokens"] == f"{rung['median']['tokens_s_gpu']:,.0f}"
    assert row["step"] == f"{rung['median']['step_s']:.3f}"
    assert row["peak"] == _peak(rung)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"].rpartition("/")[2])
def test_a_row_is_what_was_measured(row: re.Match):
    ladder = json.loads((REPO / row["file"]).read_text())
    (full,) = ladder["rungs"]
    assert row["tokens"] == f"{full['median']['tokens_s_gpu']:,.0f}"
    assert row["mfu"] == f"{full['median']['mfu']:.1%}"[:-1]
    assert row["peak"] == _peak(full)


@pytest.mark.skipif(not ROWS, reason="no table")
def test_forward_and_backward_alone():
    full = json.loads((REPO / ROWS[-1]["file"]).read_text())["rungs"][0]["median"]
    alone = full["mfu"] * full["step_s"] / (full["forward_s"] + full["backward_s"])
    assert f"backward alone reach {alone:.0%}".replace("%", " %") in " ".join(README.split())


def _peak(rung: dict) -> str:
    return f"{max(run['peak_allocated'] for run in rung['runs']) / GIB:.1f}"
