"""``--without`` of the plan: every contribution's name, and what requires it too."""

import pytest

from integration.jobs.catalog import JUPITER_1T
from integration.patchset import repository
from integration.plan.levers import Levers
from integration.plan.plan import make
from integration.tests.plan.jobs import JUPITER

EVERY = [contribution.name for contribution in repository.load()]


def test_levers_are_contributions():
    assert set(Levers.names()) <= set(EVERY)
    assert not list(Levers.of(None).off())
    assert set(Levers.of(()).off()) == set(Levers.names())


@pytest.mark.parametrize("name", EVERY)
def test_every_contribution_can_be_left_out(name, capsys):
    kept = repository.without([name])
    assert kept is not None
    gone = set(EVERY) - set(kept)
    assert set(Levers.of(kept).off()) == gone & set(Levers.names())
    said = capsys.readouterr()
    assert not said.out
    also = ", ".join(other for other in EVERY if other in gone - {name})
    assert said.err == (f"left out too, as they require {name}: {also}\n" if also else "")
    if name not in Levers.names():
        return
    # A row of the table of changes is the plan without the contribution, as the verb makes it.
    alone, closed = (
        make(JUPITER_1T, JUPITER, levers) for levers in (Levers().without(name), Levers.of(kept))
    )
    assert (alone.worst, alone.flows, alone.time) == (closed.worst, closed.flows, closed.time)
