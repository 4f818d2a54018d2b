"""Turn outcomes into one verdict each, and the closing line."""

from dataclasses import dataclass

from integration.proof.parity import Parity
from integration.proof.stages import Stage, Suite
from integration.testing.suite import Outcome


@dataclass(frozen=True, slots=True)
class Verdict:
    """A suite's outcome against what its stage demands."""

    suite: Suite
    outcome: Outcome

    @property
    def good(self) -> bool:
        """On the pristine pins at least one test must fail; everywhere else none may."""
        if self.suite.stage is Stage.PRISTINE:
            return self.outcome.ran and self.outcome.failed > 0
        return self.outcome.green

    @property
    def words(self) -> str:
        if self.suite.stage is not Stage.PRISTINE:
            return "passes" if self.good else "FAILS"
        return "fails, as it must" if self.good else "PASSES WITHOUT THE PATCH: proves nothing"


def closing_line(verdicts: list[Verdict], parities: list[Parity]) -> str:
    """Return ``N passed, M failed``; a pristine suite and a parity count as one test each."""
    passed = sum(parity.equal is True for parity in parities)
    failed = sum(parity.equal is False for parity in parities)
    for verdict in verdicts:
        if verdict.suite.stage is Stage.PRISTINE:
            passed, failed = passed + verdict.good, failed + (not verdict.good)
        else:
            passed += verdict.outcome.passed
            failed += verdict.outcome.failed
    return f"{passed} passed, {failed} failed"
