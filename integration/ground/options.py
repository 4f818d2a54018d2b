"""What the verbs share. A verb is a frozen dataclass whose fields are its options, with their help.

Tyro reads the fields, so that an option is declared once. ``run()`` does the verb's work.
"""

import json as json_module
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol

from tyro.conf import Positional, Suppress, arg

from integration.ground import files
from integration.ground.errors import UserError

STDOUT = Path("-")

# Options of several verbs.
Config = Annotated[Positional[str], arg(help="One of the configs that are listed above.")]
Layers = Annotated[int | None, arg(help="The number of layers of the config slice.")]
Experts = Annotated[int | None, arg(help="The number of experts a layer of the config slice.")]
Names = Annotated[
    Positional[tuple[str, ...]],
    arg(help="The contributions; all of them if none is named.", help_behavior_hint=""),
]
Without = Annotated[
    tuple[str, ...], arg(help="Leave this contribution out, and those that require it.")
]
# What follows `--` on the command line: options of TorchTitan, or of a bench.py.
Rest = Suppress[tuple[str, ...]]
Json = Annotated[
    Path | None,
    arg(
        metavar="[FILE]",
        help="Print JSON instead of tables; with FILE, print the tables and write JSON to FILE.",
    ),
]


class Verb(Protocol):
    """A verb with its options. ``run`` returns the exit code, None for 0."""

    def run(self) -> int | None: ...


def debugging() -> bool:
    """Return whether the user asked for stack traces and every line of output (--debug)."""
    return bool(os.environ.get("INTEGRATION_DEBUG"))


def at_least(least: int, options: object, *names: str) -> None:
    """Refuse those fields of ``options`` called ``names`` that are below ``least``, or no number.

    None stands for an option that is not given.

    Raises:
        UserError: one is.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:  # "not" catches NaN
            raise UserError(
                f"--{name.replace('_', '-')} must be at least {least}, got {value}; nothing was run"
            )


def require_writable(path: Path | None, option: str = "--json") -> None:
    """Refuse a file that cannot be written, before the work whose outcome it is to hold.

    Raises:
        UserError: it is read-only or a folder, or its own folder is missing or read-only.
    """
    if path is None or path == STDOUT:
        return
    good = not path.is_dir() and (not path.exists() or os.access(path, os.W_OK))
    if not _is_special(path):  # written beside and renamed
        good = good and path.parent.is_dir() and os.access(path.parent, os.W_OK)
    if not good:
        raise UserError(
            f"expected a file that can be written for {option}, got {path}; nothing was run: make "
            f"{path.parent} a folder that you can write, or name another file"
        )


def report(json: Path | None, value: Callable[[], object], tables: Callable[[], object]) -> None:
    """Print the tables, and write what ``value`` returns where ``--json`` asks for it.

    Raises:
        UserError: the file cannot be written.
    """
    if json != STDOUT:
        tables()
    if json is None:
        return
    text = json_module.dumps(value(), indent=1, default=str) + "\n"  # a Path, say
    if json == STDOUT:
        print(text, end="")
        return
    try:
        if _is_special(json):
            json.write_text(text)
        else:
            files.write(json, text)
    except OSError as error:
        raise UserError(
            f"expected to write JSON to {json}, found: {error.strerror}; name another file with "
            "--json"
        ) from None
    print(f"json: {json}")


def _is_special(path: Path) -> bool:
    """Whether ``path`` is a device or a pipe, /dev/stdout say, which cannot be renamed into."""
    return path.exists() and not path.is_file()
