"""What is run for each contribution, what must come out of it, and what came."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from integration.ground.errors import UserError, nearest
from integration.ground.paths import REPO
from integration.patchset.patch import Contribution
from integration.proof.parity import Parity
from integration.testing.suite import Outcome


class Stage(StrEnum):
    """Which patches are on while a contribution's tests run."""

    PRISTINE = "pristine"  # none: at least one test must fail
    ALONE = "alone"  # this one and what it requires: all must pass
    FULL = "full set"  # every one: all must pass
    PROJECT = "project"  # the project's own tests, on the pristine pins


@dataclass(frozen=True, slots=True)
class Suite:
    """One run of pytest: whose tests, under which contributions."""

    name: str
    stage: Stage
    tests: tuple[Path, ...]
    contributions: tuple[str, ...] | None = ()  # None: the full set

    @property
    def title(self) -> str:
        return f"{self.name} · {self.stage.value}"

    @property
    def file_name(self) -> str:
        return f"{self.name}.{self.stage.name.lower()}"


def plan(
    contributions: Sequence[Contribution],
    names: Sequence[str],
    *,
    prove: bool,
    full: bool,
    project: bool,
) -> list[Suite]:
    """Return the suites to run, in the order of the report.

    Raises:
        UserError: an unknown name, or a contribution without test files.
    """
    known = [c.name for c in contributions]
    for name in names:
        if name not in known:
            raise UserError(f"unknown contribution {name}{nearest(name, known)}")
    suites = []
    for stage in [Stage.ALONE, *[Stage.FULL] * full, *[Stage.PRISTINE] * prove]:
        for c in contributions:
            if names and c.name not in names:
                continue
            tests = tuple(sorted(c.folder.glob("test_*.py")))
            if not tests:
                raise UserError(f"{c.name} has no test: {c.folder} holds no test_*.py")
            own = () if stage is Stage.PRISTINE else (c.name,)
            suites.append(Suite(c.name, stage, tests, None if stage is Stage.FULL else own))
    if project:
        tests = REPO / "integration" / "tests"
        parts = sorted(p for p in tests.iterdir() if p.is_dir() and any(p.rglob("test_*.py")))
        suites += [Suite(f"project/{p.name}", Stage.PROJECT, (p,)) for p in parts]
        suites += [Suite("project", Stage.PROJECT, tuple(sorted(tests.glob("test_*.py"))))]
    return [s for s in suites if s.tests]


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
