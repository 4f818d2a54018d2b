"""New commits for a user's repository, made beside it: none of its files or branches moves."""

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from integration.ground.errors import UserError
from integration.patchset import git, repository, scratch
from integration.patchset.patch import Contribution


def repository_at(
    folder: Path, checkout: Path, revision: str, touched: Iterable[str]
) -> dict[str, str]:
    """Make ``folder`` a repository at a commit of ``checkout`` that shares its object store.

    New commits are in the checkout's store at once. Only the ``touched`` files are written out:
    `git am` looks at no others.

    Returns:
        The environment in which git runs there.
    """

    def path(name: str) -> Path:
        told = git.run(["rev-parse", "--git-path", name], checkout).text
        return (checkout / told).resolve()

    _fetch_missing(checkout, revision)
    env = {"GIT_OBJECT_DIRECTORY": str(path("objects"))}
    commit = git.run(["rev-parse", "--verify", f"{revision}^{{commit}}"], checkout).text
    git.run(["init", "--quiet"], folder, env=env)
    if path("shallow").is_file():  # where a shallow clone's history is cut off
        (folder / ".git" / "shallow").write_bytes(path("shallow").read_bytes())
    git.run(["update-ref", "HEAD", commit], folder, env=env)
    git.run(["read-tree", "HEAD"], folder, env=env)
    listed = git.run(["ls-files", "-z", "--", *sorted(touched)], folder, env=env).out
    git.run(["checkout-index", "-z", "--stdin"], folder, stdin=listed, env=env)
    return env


def _fetch_missing(checkout: Path, revision: str) -> None:
    """Let a partial clone fetch the trees and files of a commit that it does not have yet.

    Git fetches them by itself where it runs in the clone, but not for a repository that shares its
    object store, which `git am` asks for every file. `git write-tree` fetches them all at once.
    Git has the user's own configuration here: it may hold the credentials.

    Raises:
        UserError: they cannot be fetched.
    """
    if git.attempt(["config", "--get-regexp", r"^remote\..*\.promisor$"], checkout).code:
        return
    with TemporaryDirectory(prefix="integration-") as temporary:
        env = {**os.environ, "GIT_INDEX_FILE": f"{temporary}/index"}
        output = b""
        for line in (
            ["ls-tree", "-r", "-z", "--full-tree", revision],
            ["update-index", "-z", "--index-info"],
            ["write-tree"],
        ):
            done = subprocess.run(
                ["git", *line], cwd=checkout, env=env, input=output, capture_output=True
            )
            output = done.stdout
            if done.returncode:
                told = done.stderr.decode("utf-8", "replace").strip().splitlines()
                raise UserError(
                    f"expected to fetch what the partial clone {checkout} lacks of {revision}, "
                    f"found: {told[-1] if told else f'git {line[0]} failed'}; nothing was changed: "
                    f"make it whole with `git -C {checkout} fetch --refetch --no-filter`"
                )


def store_ancestors(
    folder: Path,
    env: Mapping[str, str],
    pristine: scratch.Files,
    contributions: Sequence[Contribution],
    todo: Sequence[Contribution],
) -> None:
    """Put into the object store what each patch was made on: the common ancestor of a merge."""
    for contribution in todo:
        required = repository.close(contributions, contribution.requires)
        below = [r for r in required if r.upstream == contribution.upstream]
        base, _ = scratch.apply(pristine, below)
        for path in sorted(contribution.old_paths & set(base)):
            arguments = ["hash-object", "-w", "--no-filters", "--stdin"]
            git.run(arguments, folder, stdin=base[path], env=env)
