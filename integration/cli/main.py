"""The command line. Only typer is imported here, so that ``--help`` answers at once.

Each verb lives beside what it does (``patchset/cli.py``, ``job/cli.py``, …) and
imports torch, git helpers or data libraries inside its function.
"""

import errno
import os
import shlex
import sys
from typing import Annotated

import typer

from integration.cli.bench import bench
from integration.cli.dryrun import dryrun
from integration.cli.ladder import ladder
from integration.cli.launch import launch
from integration.cli.patches import env, patches
from integration.cli.plan import plan
from integration.cli.report import report
from integration.cli.test import test
from integration.cli.train import train
from integration.cli.upstream import drift, drop, pr, rebase
from integration.ground import terminal
from integration.ground.errors import UserError

app = typer.Typer(
    name="integration",
    help="Patches for pinned PyTorch and TorchTitan, their proofs, and the 1T MoE job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(name="train")(train)
app.command(name="plan")(plan)
app.command(name="dryrun")(dryrun)
app.command(name="launch")(launch)
app.command(name="test")(test)
app.command(name="ladder")(ladder)
app.command(name="bench")(bench)
app.command(name="report")(report)
app.command(name="env")(env)
for verb in (drift, rebase, drop, pr):
    patches.command()(verb)
app.add_typer(patches, name="patches")

# What stands after "--" belongs to TorchTitan, or to a bench.py. It is taken off before typer sees
# the command line: click would otherwise read the first of it as the optional CONFIG.
TITAN_OPTIONS: list[str] = []
TITAN_VERBS = ("train", "launch", "ladder")

# What the machine refuses, and what mends it.
REFUSALS = {
    errno.EACCES: "make it accessible to you",
    errno.EPERM: "make it accessible to you",
    errno.EROFS: "mount it for writing",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
}


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option(help="Show stack traces and every line of output.")
    ] = False,
) -> None:
    if debug:
        os.environ["INTEGRATION_DEBUG"] = "1"


def main(argv: list[str] | None = None) -> None:
    """Run one verb; end with its exit code, one sentence for what the user can mend."""
    terminal.never_fail()
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    argv, TITAN_OPTIONS[:] = argv[:split], argv[split + 1 :]
    if "--debug" in argv:  # accepted before or after the verb
        argv.remove("--debug")
        argv.insert(0, "--debug")
    try:
        _require_separator(argv)
        app(argv, prog_name="integration")
    except (UserError, OSError) as error:
        told = _refused(error) if isinstance(error, OSError) else error
        if told is None or os.environ.get("INTEGRATION_DEBUG"):
            raise
        print(f"error: {told}", file=sys.stderr)
        sys.exit(told.exit_code)
    except SystemExit as stop:
        if stop.code == 130:  # what typer makes of a KeyboardInterrupt, without a word
            print("interrupted", file=sys.stderr)
        raise


def _require_separator(argv: list[str]) -> None:
    """Refuse an option with a dot in its name, as only TorchTitan's have, before ``--``."""
    verb = next((word for word in argv if not word.startswith("-")), "")
    ours: list[str] = []
    theirs: list[str] = []
    takes_value = False
    for word in argv:
        dotted = word.startswith("--") and "." in word.partition("=")[0]
        is_value = takes_value and not word.startswith("-")
        (theirs if dotted or is_value else ours).append(word)
        takes_value = dotted and "=" not in word
    if verb in TITAN_VERBS and theirs:
        command = shlex.join(["integration", *ours, "--", *theirs, *TITAN_OPTIONS])
        raise UserError(
            f"{theirs[0]} is TorchTitan's, whose options come after `--`; nothing was run: "
            f"{command}"
        )


def _refused(error: OSError) -> UserError | None:
    """Say in a sentence what the machine refused; None where it is not of ``REFUSALS``."""
    # Only a write can find a disk full, and then the error has no name of a file.
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if error.errno not in REFUSALS or not (error.filename or full):
        return None
    return UserError(
        f"expected to read and write {error.filename or 'a file'}, found: {error.strerror}; what "
        f"was under way has stopped: {REFUSALS[error.errno]}, or name other folders with "
        f"INTEGRATION_OUTPUTS (runs) and INTEGRATION_CACHE (overlays, data)",
        exit_code=1,
    )
