"""A contribution as a branch of a real clone: its commit, its tests, and upstream's own lint."""

import re
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from integration.ground.errors import UserError
from integration.patchset import exchange, git, graft, repository, scratch
from integration.patchset import pins as pins_module
from integration.patchset.patch import Contribution

_SECONDS = 900  # for one linter; the first run of pre-commit builds its environments


@dataclass(frozen=True, slots=True)
class Branch:
    """``contributions`` are its commits, oldest first: what is required, then the one meant."""

    name: str
    base: str
    commit: str
    contributions: tuple[Contribution, ...]
    files: tuple[str, ...]  # that differ from the base


@dataclass(frozen=True, slots=True)
class Linted:
    """One linter's run; ``clean`` is None where it could not run."""

    command: str
    clean: bool | None
    output: str

    @property
    def reason(self) -> str:
        """Return the first line of the output that says something."""
        lines = (s for s in self.output.splitlines() if s and not s.startswith("[INFO]"))
        return next(lines, "no output")


def make(clone: Path, name: str, base: str | None) -> Branch:
    """Make the branch ``name`` in ``clone``; neither files nor other branches change.

    Args:
        base: a revision of the clone; by default its branch main, or that of its origin.

    Raises:
        UserError: no such clone or revision, the branch exists, a conflict, a test's path is
            taken, or nothing is left of the patch: upstream has it. Nothing was changed then.
    """
    contributions = repository.load()
    (contribution,) = repository.find(contributions, [name])
    name = contribution.name
    pin = pins_module.load()[contribution.upstream]
    start = begin(clone, contribution, base)
    required = repository.close(contributions, [name])
    mine = [c for c in required if c.upstream == contribution.upstream]
    tests = {path: (c.folder / file).read_bytes() for c in mine for file, path in c.tests}
    pristine = scratch.read(pin.site(), scratch.touched(mine))
    with TemporaryDirectory(prefix="integration-") as temporary:
        folder = Path(temporary) / "checkout"
        folder.mkdir()
        touched = scratch.touched(mine) | set(tests)
        env = graft.repository_at(folder, clone, start, touched)
        _refuse_taken(folder, tests, start)
        graft.store_ancestors(folder, env, pristine, contributions, mine)
        for c in mine:
            _commit(folder, env, c, start)
        commit = git.run(["rev-parse", "HEAD"], folder, env=env).text
        made = git.run(["log", "--format=%s", f"{start}..HEAD"], folder, env=env).text.split("\n")
        span = [start, "HEAD"]
        files = git.run(["diff", "--name-only", "-z", *span], folder, env=env).out.decode()
    if contribution.subject not in made:
        raise UserError(
            f"expected something of {name} to be left on {start[:12]}, found all of it there; "
            f"there is nothing to submit: see `integration patches drift` and `patches drop`"
        )
    git.run(["update-ref", f"refs/heads/{name}", commit, "0" * 40], clone)
    there = tuple(c for c in mine if c.subject in made)
    return Branch(name, start, commit, there, tuple(files.split("\0")[:-1]))


def begin(clone: Path, contribution: Contribution, base: str | None) -> str:
    """Return the commit of ``clone`` on which the branch is to be made.

    Raises:
        UserError: no such clone or revision, or the branch exists.
    """
    name = contribution.name
    pin = pins_module.load()[contribution.upstream]
    start = _resolve(clone, pin.package, base)
    if not git.attempt(["rev-parse", "--verify", "--quiet", f"refs/heads/{name}"], clone).code:
        raise UserError(
            f"expected no branch {name} in {clone}, found one, which may hold your work; nothing "
            f"was changed: rename it (`git -C {clone} branch -m {name} OTHER`) and repeat"
        )
    return start


def remove(clone: Path, branch: Branch) -> None:
    """Remove what ``make`` has made, unless somebody has committed to it since."""
    git.attempt(["update-ref", "-d", f"refs/heads/{branch.name}", branch.commit], clone)


def _resolve(clone: Path, package: str, base: str | None) -> str:
    tried = [base] if base else ["refs/heads/main", "refs/remotes/origin/main"]
    for revision in tried:
        found = (
            git.attempt(["rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"], clone)
            if clone.is_dir()
            else None
        )
        if found and not found.code:
            if git.attempt(["cat-file", "-e", f"{found.text}:{package}"], clone).code:
                raise UserError(
                    f"expected {package}/ in {revision} of {clone}, found none; nothing was "
                    f"changed: give a clone of the upstream that the contribution is for"
                )
            return found.text
    raise UserError(
        f"expected a git clone with {' or '.join(tried)} at {clone}, found none; nothing was "
        f"changed: clone the upstream there, or name a revision of it with --base"
    )


def _refuse_taken(folder: Path, tests: dict[str, bytes], start: str) -> None:
    for path, data in tests.items():
        file = folder / path
        if file.is_file() and file.read_bytes() != data:
            raise UserError(
                f"expected no {path} in {start[:12]}, found another file of that name; it would be "
                f"overwritten: choose another path in the patch's `Test:` line"
            )


def _commit(folder: Path, env: dict[str, str], contribution: Contribution, start: str) -> None:
    """Commit one patch, without our trailers, and its tests."""
    before = git.run(["rev-parse", "HEAD"], folder, env=env).text
    complaint = exchange.commit_all(folder, for_upstream(contribution), three_way=True, env=env)
    if complaint:
        told = [s for s in complaint.splitlines() if s.startswith("CONFLICT")]
        raise UserError(
            f"expected {contribution.name} to merge into {start[:12]}, found: "
            f"{'; '.join(told) or complaint.splitlines()[0]}; nothing was changed: rebase the set "
            f"first (`integration patches rebase --onto`), or give the pin's tag with --base"
        )
    if git.run(["rev-parse", "HEAD"], folder, env=env).text == before:
        return  # upstream has it
    paths = {path: (contribution.folder / file).read_bytes() for file, path in contribution.tests}
    scratch.write(folder, paths)
    if paths:
        git.run(["add", "--force", "--", *paths], folder, env=env)
        git.run(["commit", "--quiet", "--amend", "--no-edit", "--no-verify"], folder, env=env)


def for_upstream(contribution: Contribution) -> bytes:
    """Return the patch with the message that upstream is to see: without our trailers."""
    head, start, diff = contribution.data.partition(b"\ndiff --git ")
    mail = head.decode().partition("\n\n")[0]
    return f"{mail}\n\n{contribution.body}\n".encode() + start + diff


def lint(clone: Path, branch: Branch) -> list[Linted]:
    """Run upstream's linters, as far as they are installed, on the files of the branch.

    They run in a worktree of its own, with the configuration that stands in it.
    """
    try:
        with worktree(clone, branch.commit) as tree:
            there = [f for f in branch.files if (tree / f).is_file()]
            python = [f for f in there if f.endswith((".py", ".pyi"))]
            return [_run(tree, *line) for line in _linters(tree, there, python)]
    except UserError as error:  # a partial clone, no space: the branch is there all the same
        return [Linted("git worktree add", None, str(error))]


@contextmanager
def worktree(clone: Path, commit: str) -> Generator[Path, None, None]:
    """Yield a folder with the files of ``commit``, and let ``clone`` forget it afterwards.

    Raises:
        UserError: git cannot write them out; it says why.
    """
    with TemporaryDirectory(prefix="integration-") as temporary:
        tree = Path(temporary) / "tree"
        added = ["worktree", "add", "--quiet", "--detach", "--force", str(tree), commit]
        try:
            done = git.attempt(added, clone)
            if done.code:
                raise UserError(done.err)
            yield tree
        finally:
            _forget(clone, tree)


def _forget(clone: Path, tree: Path) -> None:
    """Remove a worktree, also one that is half made: its ``add`` has left it locked."""
    if git.attempt(["worktree", "remove", "--force", "--force", str(tree)], clone).code:
        shutil.rmtree(tree, ignore_errors=True)
        git.attempt(["worktree", "unlock", str(tree)], clone)
        git.attempt(["worktree", "prune"], clone)


def _linters(
    tree: Path, files: Sequence[str], python: Sequence[str]
) -> list[tuple[str, list[str]]]:
    """Return ``(tool, command line)`` for what the upstream's own configuration asks for."""
    lines = []
    if (tree / ".lintrunner.toml").is_file():
        lines.append(("lintrunner", ["lintrunner", *files]))
    if (tree / ".pre-commit-config.yaml").is_file():
        lines.append(("pre-commit", ["pre-commit", "run", "--files", *files]))
    # The two above run these too; alone they still tell something where the two are missing.
    if (tree / ".flake8").is_file():
        lines.append(("flake8", ["flake8", "--config=.flake8", *python]))
    pyproject = tree / "pyproject.toml"
    if pyproject.is_file() and re.search(r"^\[tool\.ruff", pyproject.read_text(), re.MULTILINE):
        lines.append(("ruff", ["ruff", "check", "--no-cache", *python]))
    return lines


def _run(tree: Path, tool: str, line: list[str]) -> Linted:
    command = " ".join(line)
    if shutil.which(tool) is None:
        return Linted(command, None, f"{tool} is not installed")
    try:
        done = subprocess.run(
            line, cwd=tree, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Linted(command, None, f"no end after {_SECONDS} s")
    output = f"{done.stdout}{done.stderr}".strip()
    if tool == "pre-commit" and done.returncode > 1:  # it could not fetch or build its hooks
        return Linted(command, None, output)
    return Linted(command, done.returncode == 0, output)
