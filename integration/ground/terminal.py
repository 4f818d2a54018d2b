"""The terminal: one console for all tables, and messages that cannot fail."""

import errno
import io
import os
import sys
from typing import TextIO

from rich.console import Console

# Columns where output goes to a file or a pipe, which have no width of their own: a row stays one
# line, so that grep and copying find it whole.
UNFOLDED = 1000


def console(width: int | None = None) -> Console:
    """Return a console of the terminal's width, or of ``width`` columns in a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else width or UNFOLDED, highlight=False)


class _Lenient(io.FileIO):
    """Takes what nobody reads: a pipe's reader has ended, or the terminal was closed."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):
                return len(data)
            raise


def never_fail() -> None:
    """Let standard output and error take every message.

    A character that the encoding lacks is written as its escape, and what nobody reads is dropped.
    A stream that was closed is opened on nothing, so that no file takes its number.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream: TextIO | None = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue  # someone's own, as pytest's
        raw = _Lenient(number, "wb", closefd=False)
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding=stream.encoding if stream else "utf-8",
                errors="backslashreplace",
                line_buffering=name == "stderr" or os.isatty(number),
            ),
        )


def say(text: str, *, end: str = "\n", error: bool = False) -> None:
    """Print at once; where that fails, as on a full disk, say no more and go on."""
    name = "stderr" if error else "stdout"
    try:
        print(text, end=end, file=getattr(sys, name), flush=True)
    except (OSError, ValueError):
        setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
