"""Prepare a pull request, and stop there: a person reads, owns and submits it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset import overlay, repository
from integration.patchset import pins as pins_module
from integration.patchset.patch import Contribution
from integration.testing.suite import Outcome, run_pytest
from integration.upstream import branch as branch_module
from integration.upstream import dropwhen, text
from integration.upstream.branch import Branch, Linted
from integration.upstream.since import Since, since_pin


@dataclass(frozen=True, slots=True)
class Look:
    """What upstream has done at the commit where the branch is to begin."""

    since: Since
    drop_when: str  # the verdict of the test, or why it was not run

    @property
    def lines(self) -> tuple[str, ...]:
        """Return what stands on the terminal and in ``pr.md``, a line each."""
        where = f"on {self.since.base[:12]} without the patch"
        return (*self.since.lines, f"Its Drop-when test {where}: {self.drop_when}.")


def look(
    name: str,
    clone: Path,
    base: str | None = None,
    *,
    test: bool = True,
    tell: Callable[[str], None] = lambda words: None,
) -> Look:
    """Tell what upstream has done since the pin to the lines of ``name``; nothing changes.

    Args:
        test: run the ``Drop-when`` test there, in a throwaway environment.

    Raises:
        UserError: no branch can begin there, or upstream's main has the change and no ``base``
            is named.
    """
    (contribution,) = repository.find(repository.load(), [name])
    pin = pins_module.load()[contribution.upstream]
    if contribution.on_main and base is None:
        raise UserError(
            f"expected a change that the main branch of {pin.upstream} lacks, found that it has "
            f"{contribution.name} ({pin.url(contribution.on_main)}), while the pin {pin.version} "
            f"does not; nothing was prepared: name a revision with --base to prepare it all the "
            f"same"
        )
    start = branch_module.begin(clone, contribution, base)
    since = since_pin(contribution, clone, start)
    if not test:
        return Look(since, "not run, as asked by --no-test")
    tell(f"Running the Drop-when test of {contribution.name} on {start[:12]}")
    return Look(since, dropwhen.on_commit(contribution, clone, start))


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
    looked: Look,
    test: bool = True,
    tell: Callable[[str], None] = lambda words: None,
) -> Prepared:
    """Make the branch in ``clone``, run its linters and the tests, and write ``pr.md``.

    Where that ends early (Ctrl-C, a full disk), the branch is removed again: it would be in the
    way of the next call.

    Args:
        looked: what ``look`` has told of the same base.
        test: run the contribution's tests on the pin, without the patch and with it, for the
            counts; else the text says that they are to be run.
        tell: called with each step that begins once the branch is made.
    """
    (contribution,) = repository.find(repository.load(), [name])
    branch = branch_module.make(clone, contribution.name, base)
    try:
        return _describe(contribution, clone, branch, looked, test, tell)
    except BaseException:
        branch_module.remove(clone, branch)
        raise


def _describe(
    contribution: Contribution,
    clone: Path,
    branch: Branch,
    looked: Look,
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
    written = text.write(contribution, pin, branch, linted, outcomes, looked.lines)
    file.write_text(written, encoding="utf-8")
    return Prepared(branch, linted, file)
