"""Which sets are measured: a base, one contribution more at a time, then all but one. No torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from integration.ladder import order
from integration.ladder.order import Place
from integration.patchset import repository
from integration.patchset.patch import Contribution

FULL_SET = "full set"
PRISTINE = "pristine"
# Kinds of the rungs that lead to the full set.
SETS = ("base", "add")


class Only(StrEnum):
    """Which part of the ladder to climb."""

    ADD = "add"
    WITHOUT = "without"
    ALL = "all"
    FULL = "full"  # the full set alone


@dataclass(frozen=True, slots=True)
class Rung:
    """One set to measure. ``contribution`` is the one added or left out; None for a base."""

    label: str
    kind: str  # base, add, without or variant
    contribution: str | None
    names: tuple[str, ...]  # in series order
    also_removed: tuple[str, ...] = ()  # what requires ``contribution``, and so cannot stay
    options: tuple[str, ...] = ()  # TorchTitan's, of a variant
    changes: str = ""  # why a variant's numbers are not the full set's

    @property
    def slug(self) -> str:
        """The label, as a file's name."""
        return re.sub(r"\W+", "-", self.label).strip("-")


def climb(
    contributions: Sequence[Contribution],
    place: Place,
    *,
    only: Only = Only.ALL,
    names: Sequence[str] = (),
) -> list[Rung]:
    """Return the rungs from the bottom up.

    Pristine comes first, also where it is known not to run: its row says why. Then, where that is
    so, pristine with the least that is needed, from which contributions are added.

    Args:
        names: only these are added and left out (what they require is added before them).

    Raises:
        UserError: an unknown name.
    """
    chosen = {c.name for c in repository.find(contributions, names or None)}
    rungs: list[Rung] = []
    if only in (Only.ADD, Only.ALL):
        rungs += _adding(contributions, place, chosen)
    full = tuple(c.name for c in contributions)
    if not any(rung.names == full for rung in rungs):
        rungs.append(Rung(FULL_SET, "add", None, full))
    if only in (Only.WITHOUT, Only.ALL):
        rungs += [
            _without(contributions, name) for name in order.sort(contributions) if name in chosen
        ]
        if place.newton_schulz_can_move and order.NEWTON_SCHULZ in chosen:
            rungs.append(
                Rung(
                    f"{FULL_SET}, Newton-Schulz on the CPU",
                    "variant",
                    None,
                    full,
                    options=("--newton_schulz_on_cpu",),
                    changes="Newton-Schulz runs on the CPU",
                )
            )
    return rungs


def _adding(contributions: Sequence[Contribution], place: Place, chosen: set[str]) -> list[Rung]:
    rungs = [Rung(PRISTINE, "base", None, ())]
    have = {c.name for c in repository.close(contributions, place.least)}
    if have:
        label = " + ".join((PRISTINE, *place.least))
        rungs.append(Rung(label, "base", None, _in_series(contributions, have)))
    wanted = {c.name for c in repository.close(contributions, chosen)}
    for name in order.sort(contributions):
        if name in wanted and name not in have:
            have.add(name)
            rungs.append(Rung(f"+ {name}", "add", name, _in_series(contributions, have)))
    return rungs


def _in_series(contributions: Sequence[Contribution], names: set[str]) -> tuple[str, ...]:
    return tuple(c.name for c in contributions if c.name in names)


def _without(contributions: Sequence[Contribution], name: str) -> Rung:
    kept = tuple(c.name for c in repository.leave_out(contributions, [name]))
    also = tuple(c.name for c in contributions if c.name not in (*kept, name))
    return Rung(f"{FULL_SET} - {name}", "without", name, kept, also)


def reference(rungs: Sequence[Rung], rung: Rung, ran: Sequence[Rung]) -> Rung | None:
    """Return the rung whose numbers ``rung`` is compared with, among those that ``ran``.

    A contribution that is added is compared with the rung below, one left out with the full set.
    So a change that was declared counts once, where it was made.
    """
    if rung.kind in ("without", "variant"):
        most = max((len(r.names) for r in rungs if r.kind in SETS), default=0)
        return next((r for r in ran if r.kind in SETS and len(r.names) == most and most), None)
    below = [r for r in rungs[: rungs.index(rung)] if r.kind in SETS and r in ran]
    return below[-1] if below else None
