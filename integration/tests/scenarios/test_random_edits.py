"""Any sequence of edits, commits, moves and removals: what is exported imports as the same."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.ground.errors import UserError
from integration.patchset import repository
from integration.tests.patchset.conftest import MESSAGE, House, line, tree, user_git
from integration.upstream import checkout

CORE = "fakebase/core.py"
FAR = st.sampled_from([2, 9, 16, 23, 30])  # so far apart, and from BASE, that all of them commute
BASE = 37
PLACES = st.one_of(FAR, st.integers(1, 40))
EDITS = st.one_of(
    st.tuples(st.just("commit"), PLACES),
    st.tuples(st.just("amend"), PLACES),
    st.tuples(st.just("drop"), st.integers(0, 3)),
    st.tuples(st.just("first"), st.integers(0, 3)),
)


def commit(repo: Path, name: str, *options: str) -> None:
    message = MESSAGE.format(name=name, subject=f"[fake] {name}", status="pending", requires="")
    text = f"{message}Patch-Name: {name}\n"
    user_git(repo, "commit", "-qa", *options, "-F", "-", stdin=text)


def replay(repo: Path, commits: list[str]) -> None:
    """Put the branch on the pin with ``commits``; leave out what conflicts."""
    user_git(repo, "reset", "-q", "--hard", "pin")
    for each in commits:
        try:
            user_git(repo, "cherry-pick", each)
        except AssertionError:
            user_git(repo, "cherry-pick", "--abort")


def test_random_edits(house: House) -> None:
    exported: list[int] = []  # the number of patches, for each sequence that was not refused

    @settings(
        max_examples=8,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        places=st.lists(FAR, min_size=1, max_size=3, unique=True), edits=st.lists(EDITS, max_size=4)
    )
    def any_sequence(places: list[int], edits: list[tuple[str, int]]) -> None:
        patches = round_trip(house, [*(("commit", place) for place in places), *edits])
        exported.extend(patches)

    any_sequence()
    assert len(exported) >= 4 and max(exported) >= 3, exported  # else little was shown


def round_trip(house: House, edits: list[tuple[str, int]]) -> list[int]:
    """Make the edits; return how many patches came out, or nothing where export has refused."""
    house.series().write_text("")
    for path in house.series().parent.glob("*.patch"):
        path.unlink()
    house.hashes["pytorch"].clear()
    house.write_pins()
    house.add("base", {CORE: line(BASE, "base")})
    with tempfile.TemporaryDirectory() as temporary:
        checkout.import_set(Path(temporary) / "work")
        repo = Path(temporary) / "work/pytorch"
        for number, (what, where) in enumerate(edits):
            commits = user_git(repo, "log", "--reverse", "--format=%H", "pin..").split()
            if what in ("commit", "amend"):
                lines = (repo / CORE).read_text().split("\n")
                lines[min(where, len(lines)) - 1] = f"edit {number}"
                (repo / CORE).write_text("\n".join(lines))
            if what == "commit":
                commit(repo, f"patch{number}")
            elif what == "amend" and commits:
                user_git(repo, "commit", "-qa", "--amend", "--no-edit", "--allow-empty")
            elif what == "amend":
                user_git(repo, "checkout", "-q", CORE)
            elif commits and what == "drop":
                replay(repo, [c for n, c in enumerate(commits) if n != where % len(commits)])
            elif commits:
                first = commits[where % len(commits)]
                replay(repo, [first, *(c for c in commits if c != first)])
        before = tree(house.root)
        try:
            checkout.export_set(repo.parent)
        except UserError as refused:  # two edits on neighbouring lines: the second needs the first
            assert "to apply on the pin and what it requires" in str(refused) or "empty" in str(
                refused
            )
            assert tree(house.root) == before
            return []
        after = tree(house.root)
        shutil.rmtree(repo.parent)
        checkout.import_set(repo.parent)
        assert {said.partition(": ")[2] for said in checkout.export_set(repo.parent)} <= {
            "unchanged"
        }
        assert tree(house.root) == after
        return [len(repository.read_series(house.series()))]
