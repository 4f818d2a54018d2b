"""Run git so that the same input gives the same bytes on every machine.

No configuration of the user, the system or an enclosing repository is read, and nothing of a git
that called us (a hook sets ``GIT_DIR`` and ``GIT_INDEX_FILE``) is inherited.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.ground.errors import UserError

NAME = "Patch-set maintainers"
EMAIL = "maintainers@users.noreply.example"
DATE = "Sun, 29 Nov 2026 12:00:00 +0000"

# ``git format-patch`` with no trace of the machine or of the git version in its output.
FORMAT_PATCH = (
    "format-patch", "--stdout", "--zero-commit", "--no-signature", "--full-index",
    "--keep-subject", "--no-stat",
)  # fmt: skip

# A checkout's own .git/config is still read; these override what would change bytes, ask a
# question, or run a program.
_SETTINGS = {
    "advice.detachedHead": "false",
    "am.threeWay": "false",
    "apply.whitespace": "nowarn",
    "apply.ignoreWhitespace": "no",
    "commit.gpgSign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.quotePath": "true",
    "core.safecrlf": "false",
    "diff.algorithm": "myers",
    "diff.context": "3",
    "diff.interHunkContext": "0",
    "diff.mnemonicPrefix": "false",
    "diff.noprefix": "false",
    "diff.renames": "true",
    "diff.suppressBlankEmpty": "false",
    "format.encodeEmailHeaders": "true",
    "gc.auto": "0",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "init.defaultBranch": "main",
    "merge.conflictStyle": "merge",
}
_OPTIONS = tuple(part for key, value in _SETTINGS.items() for part in ("-c", f"{key}={value}"))


@dataclass(frozen=True, slots=True)
class Result:
    """What one git call gave back: exit code, bytes of stdout, text of stderr."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """Standard output as text, without the last newline."""
        return self.out.decode("utf-8", "replace").rstrip("\n")


def _environment(directory: Path, extra: Mapping[str, str]) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env.update(
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        GIT_ATTR_NOSYSTEM="1",
        # `git apply` below a repository's root silently skips every path outside the current
        # folder. Git never looks above this one for a repository.
        GIT_CEILING_DIRECTORIES=str(directory.resolve().parent),
        GIT_TERMINAL_PROMPT="0",
        GIT_EDITOR="true",
        GIT_OPTIONAL_LOCKS="0",
        GIT_AUTHOR_NAME=NAME,
        GIT_AUTHOR_EMAIL=EMAIL,
        GIT_AUTHOR_DATE=DATE,
        GIT_COMMITTER_NAME=NAME,
        GIT_COMMITTER_EMAIL=EMAIL,
        GIT_COMMITTER_DATE=DATE,
        LC_ALL="C",
    )
    env.update(extra)
    return env


def attempt(
    arguments: Sequence[str],
    directory: Path,
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
) -> Result:
    """Run git in ``directory``; the caller looks at the exit code."""
    try:
        done = subprocess.run(
            ["git", *_OPTIONS, *arguments],
            cwd=directory,
            input=stdin,
            env=_environment(directory, env or {}),
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        if not directory.is_dir():
            raise
        raise UserError(
            "expected git on PATH, found none; patches cannot be applied without it: "
            "install git (for example: apt-get install git)"
        ) from error
    return Result(done.returncode, done.stdout, done.stderr.decode("utf-8", "replace").strip())


def run(
    arguments: Sequence[str],
    directory: Path,
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
) -> Result:
    """Run git in ``directory``; a failure here is one that the caller did not foresee."""
    result = attempt(arguments, directory, stdin=stdin, env=env)
    if result.code:
        raise RuntimeError(f"git {' '.join(arguments)} in {directory}: {result.err}")
    return result


def apply(directory: Path, patches: bytes, *, reverse: bool = False) -> str | None:
    """Apply concatenated patches to the files of ``directory``: all of them or none.

    ``git apply`` takes no fuzz: context must match exactly, at whatever line it is found.

    Returns:
        None when done, git's complaint when nothing was changed.
    """
    if not patches:
        return None
    arguments = ["apply", "--whitespace=nowarn", *(["--reverse"] if reverse else []), "-"]
    result = attempt(arguments, directory, stdin=patches)
    return result.err if result.code else None
