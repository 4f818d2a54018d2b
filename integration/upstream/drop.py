"""Let a contribution go once upstream does its work: `integration patches drop NAME`."""

from collections.abc import Sequence
from pathlib import Path

from integration.ground import paths
from integration.ground.errors import UserError
from integration.ground.files import replace_all
from integration.patchset import pins as pins_module
from integration.patchset import repository
from integration.patchset.patch import Contribution
from integration.upstream import checkout, dropwhen, history


def drop(name: str) -> Path:
    """Move ``name`` to the history if its ``Drop-when`` test passes on the unpatched pin.

    Returns:
        The history file. Patch, series, pins and the contribution's folder have gone at once.

    Raises:
        UserError: another requires it, it is in no commit, or the test does not pass (or is
            skipped, which shows nothing): nothing was changed then.
    """
    contributions = repository.load()
    (contribution,) = repository.find(contributions, [name])
    name = contribution.name
    _refuse_required(name, contributions)
    pin = pins_module.load()[contribution.upstream]
    test = " ".join(contribution.values("Drop-when"))
    why = f"Its Drop-when test `{test}` passes on the unpatched {pin.package} {pin.version}"
    new = history.retire([contribution], {name: why})  # refuses before the test's minutes
    outcome = dropwhen.run(contribution)
    if dropwhen.words(outcome) != "passes":
        told = f": {outcome.failures[0]}" if outcome.failures else ""
        raise UserError(
            f"expected {test} to pass on the unpatched {pin.package} {pin.version}, found that it "
            f"{_verb(dropwhen.words(outcome))}{told}; {name} is still needed and was kept: see "
            f"what a newer upstream does with `integration patches drift --run-drop-when`",
            exit_code=1,
        )
    left = [c for c in contributions if c.upstream == contribution.upstream and c.name != name]
    checkout.changes(contribution.path.parent, contributions, left, new)
    hashes = {contribution.upstream: checkout.hashes_of(pin, left)}
    new[pin.stated] = pins_module.with_files(hashes, paths.REPO / pin.stated).encode()
    replace_all(paths.REPO, new)
    return paths.REPO / history.FILE


def _refuse_required(name: str, contributions: Sequence[Contribution]) -> None:
    dependents = [c.name for c in contributions if name in c.requires]
    if dependents:
        raise UserError(
            f"expected no contribution to require {name}, found {', '.join(dependents)}; without "
            f"it they would not apply: take it out of their Requires: first (integration patches "
            f"import, amend, export)"
        )


def _verb(words: str) -> str:
    return "is skipped here" if words == "skipped" else words
