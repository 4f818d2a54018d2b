"""``integration patches …`` and ``integration env``."""

import typer

patches = typer.Typer(help="The patch tool.", no_args_is_help=True)


def env() -> None:
    """Print the export line that puts an overlay first."""
