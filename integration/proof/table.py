"""The proof of the set: one table, contribution by check. A reviewer reads it first."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from integration.evidence import readme
from integration.evidence import record as evidence
from integration.evidence.check import DIGITS
from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset import check
from integration.patchset.finding import Finding
from integration.patchset.patch import Contribution
from integration.proof.parity import Parity
from integration.proof.stages import Stage, Verdict

COLUMNS = (
    "alone", "fails without it", "with requirements", "both orders", "full set", "bitwise parity",
    "evidence fresh",
)  # fmt: skip
_FAILS = "FAILS"
_NOT_DUE = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """One contribution; a cell for each of ``COLUMNS``."""

    name: str
    sha256: str
    cells: tuple[str, ...]

    @property
    def good(self) -> bool:
        return _FAILS not in self.cells


def rows(
    contributions: Sequence[Contribution],
    verdicts: Sequence[Verdict],
    parities: Sequence[Parity],
    findings: Sequence[Finding],
    everything: Sequence[Contribution],
) -> list[Row]:
    """Put the outcomes together.

    Args:
        findings: what `integration patches check` found wrong, anywhere.
        everything: all contributions, which may be more than those of the table.
    """
    stages = {(v.suite.name, v.suite.stage): v for v in verdicts}
    equal = {p.name: p for p in parities}
    meetings = check.meetings(everything)
    others = len(everything) - 1
    result = []
    for c in contributions:

        def tests(stage: Stage, name: str = c.name) -> str:
            verdict = stages[name, stage]
            # The pristine run stops at its first failure: there is nothing to count.
            count = "yes" if stage is Stage.PRISTINE else str(verdict.outcome.passed)
            return count if verdict.good else _FAILS

        wrong = [f for f in findings if c.name in f.patch.replace(",", " ").split()]
        stale = [f for f in wrong if f.verdict == "stale evidence"]
        kept = len(list((c.folder / "evidence").glob("*.json")))
        alone = tests(Stage.ALONE)
        parity = {True: "equal", False: _FAILS, None: _NOT_DUE}[equal[c.name].equal]
        cells = (
            _NOT_DUE if c.requires else alone,
            tests(Stage.PRISTINE),
            alone if c.requires else _NOT_DUE,
            _FAILS if len(wrong) > len(stale) else f"{meetings[c.name]} of {others}",
            tests(Stage.FULL),
            parity,
            _FAILS if stale else str(kept) if kept else _NOT_DUE,
        )
        result.append(Row(c.name, c.sha256, cells))
    return result


def legend(parities: Sequence[Parity]) -> str:
    """Say what the numbers count, and why a parity was not due."""
    words = (
        "Alone, with requirements, full set: tests that pass. Fails without it: a test fails on "
        "the pristine pins, where the run stops. Both orders: how many of the other patches change "
        "a file that it changes, and were applied before it and after it with the same result. "
        "Bitwise parity: ten steps of mini_adamw, which runs neither Muon nor CPU offload. "
        "Evidence fresh: files measured on this very patch, whatever its words were"
    )
    reasons = [f"{p.name}: no parity: {p.words}" for p in parities if p.equal is None]
    return ". ".join([words, *reasons]) + "."


def write(table: Sequence[Row], parities: Sequence[Parity]) -> None:
    """Put the table into CONTRIBUTING.md, with date, machine and the patches' hashes."""
    machine = ", ".join(f"{key} {value}" for key, value in evidence.machine().items())
    lines = [f"| contribution | {' | '.join(COLUMNS)} | patch |", "|---" * (len(COLUMNS) + 2) + "|"]
    lines += [f"| {r.name} | {' | '.join(r.cells)} | `{r.sha256[:DIGITS]}` |" for r in table]
    told = f"`integration test --prove --full --record`, {datetime.date.today()}, {machine}."
    body = "\n".join([*lines, "", f"{told} {legend(parities)}"])
    file = paths.REPO / readme.PROOF_FILE
    text = file.read_text(encoding="utf-8")
    new = readme.with_body(text, readme.PROOF_BEGIN, readme.PROOF_END, lambda: body)
    if new is None:
        raise UserError(
            f"expected the lines {readme.PROOF_BEGIN} and {readme.PROOF_END} in "
            f"{readme.PROOF_FILE}, found none; the proof has no place there: add them where a "
            f"reviewer looks first"
        )
    file.write_text(new, encoding="utf-8")
