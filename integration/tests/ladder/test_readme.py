"""README's table of one GPU says what the ladders that it links to have measured."""

import json
import re

import pytest

from integration.paths import REPO

GIB = 2**30
ROW = re.compile(
    r"^\| \[.*\]\((?P<file>integration/evidence/ladder-\S+\.json)\).* \| (?P<tokens>[\d,]+) "
    r"\| (?P<mfu>[\d.]+) % \| (?P<peak>[\d.]+) \|$",
    re.MULTILINE,
)
ROWS = list(ROW.finditer((REPO / "README.md").read_text(encoding="utf-8")))


def test_there_is_a_table():
    assert len(ROWS) == 5


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"].rpartition("/")[2])
def test_a_row_is_what_was_measured(row: re.Match):
    ladder = json.loads((REPO / row["file"]).read_text())
    (full,) = ladder["rungs"]
    assert row["tokens"] == f"{full['median']['tokens_s_gpu']:,.0f}"
    assert row["mfu"] == f"{full['median']['mfu']:.1%}"[:-1]
    assert row["peak"] == f"{max(run['peak_allocated'] for run in full['runs']) / GIB:.1f}"


def test_forward_and_backward_alone():
    full = json.loads((REPO / ROWS[-1]["file"]).read_text())["rungs"][0]["median"]
    alone = full["mfu"] * full["step_s"] / (full["forward_s"] + full["backward_s"])
    assert f"backward alone reach {alone:.0%}".replace("%", " %") in " ".join(
        (REPO / "README.md").read_text(encoding="utf-8").split()
    )
