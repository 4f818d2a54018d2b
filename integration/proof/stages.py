"""What is run for each contribution, and what must come out of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from integration.ground.errors import UserError, nearest
from integration.ground.paths import REPO

if TYPE_CHECKING:
    from integration.patchset.patch import Contribution


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
    contributions: tuple[str, ...] | None = field(default=())  # None: the full set

    @property
    def title(self) -> str:
        return f"{self.name} · {self.stage.value}"

    @property
    def file_name(self) -> str:
        return f"{self.name}.{self.stage.name.lower()}"


def plan(
    contributions: Sequence["Contribution"],
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
        for contribution in contributions:
            if not names or contribution.name in names:
                suites.append(_suite(contribution, stage))
    if project:
        tests = REPO / "integration" / "tests"
        parts = sorted(p for p in tests.iterdir() if p.is_dir() and any(p.rglob("test_*.py")))
        suites += [Suite(f"project/{p.name}", Stage.PROJECT, (p,)) for p in parts]
        suites += [Suite("project", Stage.PROJECT, tuple(sorted(tests.glob("test_*.py"))))]
    return [s for s in suites if s.tests]


def _suite(contribution: "Contribution", stage: Stage) -> Suite:
    tests = tuple(sorted(contribution.folder.glob("test_*.py")))
    if not tests:
        raise UserError(
            f"{contribution.name} has no test: {contribution.folder} holds no test_*.py"
        )
    which: dict[Stage, tuple[str, ...] | None] = {
        Stage.PRISTINE: (),
        Stage.ALONE: (contribution.name,),
        Stage.FULL: None,
    }
    return Suite(contribution.name, stage, tests, which[stage])
