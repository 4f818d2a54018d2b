# ruff: noqa: E501
"""The proof's table: each cell from its own check, and any one that fails is seen."""

from dataclasses import replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from integration.evidence.check import stale
from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset.finding import Finding
from integration.patchset.patch import Contribution, Trailer
from integration.proof import table
from integration.proof.parity import Parity
from integration.proof.stages import Stage, Suite, Verdict
from integration.testing.suite import Outcome


def contribution(name: str, requires: str, root: Path) -> Contribution:
    path = root / f"patches/pytorch/{name}.patch"
    trailers = (Trailer("Requires", requires, 1),)
    return Contribution(name, "pytorch", path, name.encode(), name, "", trailers, ())


def verdicts(name: str, **bad: bool) -> list[Verdict]:
    passes, fails = Outcome(3, 0, 0, 1.0, (), True), Outcome(1, 2, 0, 1.0, (), True)
    outcomes = {Stage.ALONE: passes, Stage.FULL: passes, Stage.PRISTINE: fails}
    for stage in bad:
        outcomes[Stage[stage]] = passes if stage == "PRISTINE" else fails
    return [Verdict(Suite(name, stage, ()), outcome) for stage, outcome in outcomes.items()]


def finding(patch: str, verdict: str) -> Finding:
    return Finding(patch, "file", None, "", "", verdict, "")


def test_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "REPO", tmp_path)
    one, two = contribution("one", "", tmp_path), contribution("two", "one", tmp_path)
    folder = one.folder / "evidence"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text("{}")
    ran = [*verdicts("one"), *verdicts("two")]
    parities = [Parity("one", True, "equal"), Parity("two", None, "changes numbers")]
    good = table.rows([one, two], ran, parities, [], [one, two])
    assert [(r.name, r.cells, r.good) for r in good] == [
        ("one", ("3", "yes", "-", "0 of 1", "3", "equal", "1"), True),
        ("two", ("-", "yes", "3", "0 of 1", "3", "-", "-"), True),
    ]
    assert table.legend(parities).endswith("two: no parity: changes numbers.")


@pytest.mark.parametrize(
    ("column", "bad", "parity", "found"),
    [
        ("alone", {"ALONE": True}, True, []),
        ("fails without it", {"PRISTINE": True}, True, []),
        ("full set", {"FULL": True}, True, []),
        ("bitwise parity", {}, False, []),
        ("both orders", {}, True, [finding("two after one", "surroundings changed")]),
        ("evidence fresh", {}, True, [finding("one", "stale evidence")]),
    ],
)
def test_each_failure_is_in_its_cell(
    tmp_path: Path, column: str, bad: dict, parity: bool, found: list[Finding]
) -> None:
    one = contribution("one", "", tmp_path)
    (row,) = table.rows([one], verdicts("one", **bad), [Parity("one", parity, "")], found, [one])
    failing = [c for c, cell in zip(table.COLUMNS, row.cells, strict=True) if cell == "FAILS"]
    assert (failing, row.good) == ([column], False)


def test_written_into_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "REPO", tmp_path)
    monkeypatch.setattr(table.evidence, "machine", lambda: {"cores": 2})
    readme = tmp_path / "CONTRIBUTING.md"
    readme.write_text("before\n")
    rows = [table.Row("one", "ab" * 32, ("3", "2", "-", "1", "3", "equal", "1"))]
    with pytest.raises(UserError, match="expected the lines <!-- proof:begin -->"):
        table.write(rows, [])
    readme.write_text("before\n<!-- proof:begin -->\nold\n<!-- proof:end -->\nafter\n")
    for _ in range(2):
        table.write(rows, [])
    kept = [s for s in readme.read_text().splitlines() if not s.startswith("`integration test")]
    assert_expected_inline(
        "\n".join(kept),
        """\
before
<!-- proof:begin -->
| contribution | alone | fails without it | with requirements | both orders | full set | bitwise parity | evidence fresh | patch |
|---|---|---|---|---|---|---|---|---|
| one | 3 | 2 | - | 1 | 3 | equal | 1 | `abababab` |

<!-- proof:end -->
after""",
    )


def test_stale_once_a_patch_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The placeholder is no proof and not stale; a written one is of the patches as they were."""
    monkeypatch.setattr(paths, "REPO", tmp_path)
    readme = tmp_path / "CONTRIBUTING.md"
    readme.write_text("<!-- proof:begin -->\nNot recorded yet.\n<!-- proof:end -->\n")
    one, two = (contribution(name, "", tmp_path) for name in ("one", "two"))
    assert list(stale(tmp_path, [one, two])) == []
    cells = ("3", "2", "-", "1", "3", "equal", "1")
    table.write([table.Row(c.name, c.sha256, cells) for c in (one, two)], [])
    assert list(stale(tmp_path, [one, two])) == []
    changed = replace(two, data=b"changed")
    (found,) = stale(tmp_path, [one, changed])
    assert str(found) == (
        f"(full set): stale proof\n"
        f"  at        CONTRIBUTING.md\n"
        f"  expected  two {changed.sha256[:8]}\n"
        f"  found     two {two.sha256[:8]}\n"
        f"  next      integration test --prove --full --record"
    )
    assert [f.found for f in stale(tmp_path, [one, two, replace(one, name="new")])] == [
        "none of new"
    ]
    assert [f.expected for f in stale(tmp_path, [one])] == ["two not in the set"]
    # Nor does it stand in the way of the run that writes the next one.
    (row,) = table.rows([two], verdicts("two"), [Parity("two", True, "")], [found], [two])
    assert row.good
