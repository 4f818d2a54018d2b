"""New commits for a user's repository, made beside it: none of its files or branches moves."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

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
