"""TorchTitan's options of a run: later ones replace earlier ones; its own parser judges them."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from integration.ground.errors import UserError
from integration.train.failure import words
from integration.train.launch import Launch


def merged(before: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """Return the options of both; of one that is given twice, the later value.

    >>> merged(("--training.steps", "9", "--a.no-b"), ("--training.steps=4", "--a.b"))
    ('--training.steps=4', '--a.b')
    """
    groups: list[list[str]] = []
    for word in (*before, *now):
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    latest = {_name(group[0]): group for group in groups}
    return tuple(word for group in groups if latest[_name(group[0])] is group for word in group)


def _name(option: str) -> str:
    return option.partition("=")[0].replace("-", "_").replace(".no_", ".")


def accepted(asked: Launch) -> dict[str, int]:
    """Return the numbers that ``ranks.accept`` tells of a start's config, before any rank starts.

    Raises:
        UserError: TorchTitan's parser refuses an option, or a number can train nothing.
    """
    arguments = asked.command()
    arguments = arguments[arguments.index("torchtitan.train") + 1 :]
    done = subprocess.run(
        [sys.executable, "-m", "integration.ranks.accept", *arguments],
        env=asked.environment() | {"WORLD_SIZE": str(asked.ranks)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        reason = _complaint(words(done.stderr) or f"exit code {done.returncode}")
        raise UserError(f"TorchTitan refuses the options after `--`: {reason}; nothing was started")
    return json.loads(done.stdout.splitlines()[-1])


def _complaint(text: str) -> str:
    """Return what the parser complains of, without its pages of help."""
    meant = re.search(r"Perhaps you meant: (--\S+)", text)
    text = re.split(
        r" Available subcommands:| Perhaps you meant:| Argument helptext:| For full", text
    )[0]
    return f"{text} (did you mean {meant[1]}?)" if meant else text


def refuse_shorter(steps: int, done: int, checkpoint: Path) -> None:
    """Refuse to go on with a run that is past the last step it is to have.

    Raises:
        UserError: it is.
    """
    if steps < done:
        raise UserError(
            f"--training.steps {steps} ends before step {done}, after which the run goes on "
            f"({checkpoint}); nothing was started: give more steps, or start anew without --resume"
        )
