"""Any sequence of edits, commits, moves and removals: what is exported imports as the same."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.errors import UserError
from integration.patchset import checkout
from integration.tests.patchset.conftest import MESSAGE, House, line, tree, user_git

CORE = "fakebase/core.py"
PLACES = st.integers(1, 40)
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


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(edits=st.lists(EDITS, min_size=2, max_size=6))
def test_random_edits(house: House, edits: list[tuple[str, int]]) -> None:
    house.series().write_text("")
    for path in house.series().parent.glob("*.patch"):
        path.unlink()
    house.hashes["pytorch"].clear()
    house.write_pins()
    house.add("base", {CORE: line(20, "base")})
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
            return
        after = tree(house.root)
        shutil.rmtree(repo.parent)
        checkout.import_set(repo.parent)
        assert {said.partition(": ")[2] for said in checkout.export_set(repo.parent)} <= {
            "unchanged"
        }
        assert tree(house.root) == after
