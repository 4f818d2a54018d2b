"""The terminal: one console for all tables."""

import sys

from rich.console import Console

# Columns where output goes to a file or a pipe, which have no width of their own: a row stays one
# line, so that grep and copying find it whole.
UNFOLDED = 1000


def console(width: int | None = None) -> Console:
    """Return a console of the terminal's width, or of ``width`` columns in a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else width or UNFOLDED, highlight=False)
