"""Prepare a pull request, and stop there: a person reads, owns and submits it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from integration.ground import paths
from integration.patchset import overlay, repository
from integration.patchset import pins as pins_module
from integration.patchset.patch import Contribution
from integration.testing.suite import Outcome, run_pytest
from integration.upstream import branch as branch_module
from integration.upstream import text
from integration.upstream.branch import Branch, Linted


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is there to be read."""

    branch: Branch
    linted: tuple[Linted, ...]
    text: Path


def prepare(
    name: str,
    clone: Path,
    base: str | None = None,
    *,
    test: bool = True,
    tell: Callable[[str], None] = lambda words: None,
) -> Prepared:
    """Make the branch in ``clone``, run its linters and the tests, and write ``pr.md``.

    Where that ends early (Ctrl-C, a full disk), the branch is removed again: it would be in the
    way of the next call.

    Args:
        test: run the contribution's tests on the pin, without the patch and with it, for the
            counts; else the text says that they are to be run.
        tell: called with each step that begins once the branch is made.
    """
    (contribution,) = repository.find(repository.load(), [name])
    branch = branch_module.make(clone, contribution.name, base)
    try:
        return _describe(contribution, clone, branch, test, tell)
    except BaseException:
        branch_module.remove(clone, branch)
        raise


def _describe(
    contribution: Contribution,
    clone: Path,
    branch: Branch,
    test: bool,
    tell: Callable[[str], None],
) -> Prepared:
    tell(f"Running the linters of the clone on {branch.name}")
    linted = tuple(branch_module.lint(clone, branch))
    outcomes: dict[str, Outcome] = {}
    folder = paths.cache_dir() / "pr" / contribution.name
    folder.mkdir(parents=True, exist_ok=True)
    for stage, names in (("pristine", []), ("patched", [contribution.name])) if test else ():
        tell(f"Running the tests of {contribution.name}, {stage}")
        outcomes[stage] = run_pytest(
            [contribution.folder / file for file, _ in contribution.tests],
            patched=overlay.build(names),
            report=folder / f"{stage}.xml",
            log=folder / f"{stage}.log",
        )
    pin = pins_module.load()[contribution.upstream]
    file = folder / "pr.md"
    file.write_text(text.write(contribution, pin, branch, linted, outcomes), encoding="utf-8")
    return Prepared(branch, linted, file)
