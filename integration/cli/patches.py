"""``integration patches …`` and ``integration env``. What they need is imported when they run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from integration.ground import terminal

if TYPE_CHECKING:
    from integration.patchset.patch import Contribution

patches = typer.Typer(
    help="Read, check, apply and edit the patches.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME]...", help="Contributions; all when none is named."),
]


@patches.command("list")
def list_patches() -> None:
    """Show every contribution: status, size, what it requires, tests and evidence."""

    from rich.table import Table

    from integration.patchset import repository

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "upstream", "status", "files", "lines", "requires", "tests", "evidence"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "lines"))
    contributions = repository.load()
    for c in contributions:
        table.add_row(
            c.name,
            c.upstream,
            " ".join(c.values("Status")) or "?",
            str(len(c.files)),
            f"+{c.added} -{c.removed}",
            ", ".join(c.requires) or "-",
            " ".join(file for file, _ in c.tests) or "-",
            _evidence(c),
        )
    # Into a file or a pipe, a row stays one line, whatever the width of a terminal would be.
    terminal.console().print(table)
    if not contributions:
        print("no contributions yet: `integration patches new NAME --upstream pytorch|torchtitan`")


def _evidence(contribution: "Contribution") -> str:
    """Count the evidence files, and those measured on another version of the patch."""
    from integration.patchset import lint

    count = len(list((contribution.folder / "evidence").glob("*.json")))
    stale = len(list(lint.evidence(contribution)))
    return "-" if not count else f"{count}" + (f", {stale} stale" if stale else "")


@patches.command()
def check() -> None:
    """Prove that every patch stands alone, and that all stand together."""
    import time

    from integration.evidence.check import check as run_check
    from integration.patchset import repository

    start = time.perf_counter()
    findings = run_check()
    seconds = time.perf_counter() - start
    for finding in findings:
        print(f"{finding}\n")
    if findings:
        plural = "problem" if len(findings) == 1 else "problems"
        print(f"{len(findings)} {plural} found in {seconds:.1f} s")
        raise typer.Exit(1)
    count = len(repository.load())
    print(
        f"{count} patches: header, series, pins, each alone, every pair, full set, reverse and "
        f"round trip hold ({seconds:.1f} s)"
    )


@patches.command()
def apply(
    to: Annotated[Path, typer.Option("--to", metavar="CHECKOUT", help="Root of a checkout.")],
    names: Names = None,
    reverse: Annotated[bool, typer.Option(help="Take them off instead.")] = False,
    commits: Annotated[bool, typer.Option(help="Make one commit a patch.")] = False,
    three_way: Annotated[
        bool, typer.Option("--3way", help="Merge into files that differ from the pin.")
    ] = False,
) -> None:
    """Apply the set, or NAMEs and what they require, to an upstream checkout: all or nothing."""
    from integration.ground.errors import UserError
    from integration.patchset import apply as module

    if reverse and commits:
        raise UserError(
            "expected --reverse or --commits, got both; commits are undone by git: run "
            f"`git -C {to} revert COMMIT`, or `git -C {to} reset --keep COMMIT`"
        )
    if reverse:
        lines = module.take_off(to, names or None, three_way=three_way)
    else:
        lines = module.apply(to, names or None, commits=commits, three_way=three_way)
    print("\n".join(lines or ["nothing to do: no contribution belongs to this checkout"]))


@patches.command("import")
def import_(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Default: .cache/checkout.")
    ] = None,
) -> None:
    """Make a checkout of each pin with the set as commits, to edit with git."""
    import shlex

    from rich.console import Console

    from integration.upstream.checkout import default_folder, import_set

    folder = (folder or default_folder()).absolute()
    with Console(stderr=True).status("Copying the pinned sources and committing the patches"):
        made = import_set(folder)
    for checkout in made:
        print(f"{checkout.upstream}: {checkout.path}")
    for checkout in made:
        if checkout.stopped:
            path = shlex.quote(str(checkout.path))
            print(
                f"\n{checkout.upstream} stopped at a patch that does not fit:\n{checkout.stopped}\n"
                f"look      git -C {path} am --show-current-patch\n"
                f"mend      edit the files, then git -C {path} add -A\n"
                f"go on     git -C {path} am --continue\n"
                f"store     integration patches export {shlex.quote(str(folder))}"
            )
    if any(checkout.stopped for checkout in made):
        raise typer.Exit(1)
    path = shlex.quote(str(made[0].path))
    print(
        f"""
look      git -C {path} log --oneline pin..
edit      git -C {path} rebase -i pin, or commit with --fixup and rebase -i --autosquash pin
add       commit with a last line `Patch-Name: NAME` in the message (integration patches new NAME)
drop      remove the commit
store     integration patches export {shlex.quote(str(folder))}"""
    )


@patches.command()
def export(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Default: .cache/checkout.")
    ] = None,
) -> None:
    """Store the commits of an imported checkout as patches again."""
    from integration.upstream import checkout

    print("\n".join(checkout.export_set((folder or checkout.default_folder()).absolute())))
    print("next: integration patches readme --write, then integration patches check")


@patches.command()
def new(
    name: str,
    upstream: Annotated[str, typer.Option(help="pytorch or torchtitan.")],
) -> None:
    """Begin a contribution: its folder, a test that fails, and a template of the message."""
    import shlex

    from integration.patchset import scaffold
    from integration.upstream import checkout

    folder, message = scaffold.new(name, upstream)
    path = shlex.quote(str(checkout.default_folder() / upstream))
    print(
        f"""created {folder}

1. write the test, and see it fail on the pristine pin
2. integration patches import            (unless {path} is there)
3. edit the sources in {path}
4. git -C {path} add -A
   git -C {path} commit -e -F {shlex.quote(str(message))}
5. integration patches export
6. integration patches readme --write
7. integration patches check && integration test {name} --prove"""
    )


@patches.command()
def overlay(names: Names = None) -> None:
    """Build the overlay of the set, or of NAMEs and what they require; print its folder."""
    from integration.patchset import overlay as module

    built = module.build(names or None)
    if built.path is None:
        raise typer.Exit(
            _say("no contributions yet: the overlay is empty, the pins are used as is")
        )
    print(built.path)


@patches.command()
def readme(
    write: Annotated[
        bool, typer.Option("--write", help="Write the tables into README.md and CONTRIBUTING.md.")
    ] = False,
) -> None:
    """Print the README's table of contributions, made from the patch headers and evidence."""
    from integration.evidence import readme as module
    from integration.patchset import repository

    contributions = repository.load()
    if not write:
        print(module.table(contributions))
    elif changed := module.write(contributions):
        print(f"{' and '.join(changed)}: table written")
    else:
        print("The tables are up to date.")


def env(names: Names = None) -> None:
    """Print the line that puts the set's overlay first, for a launcher of your own.

    Use: eval "$(integration env)"
    """
    import os
    import shlex

    from integration.patchset import overlay as module

    path = module.build(names or None).pythonpath(os.environ.get("PYTHONPATH", ""))
    print(f"export PYTHONPATH={shlex.quote(path)}")


def _say(line: str) -> int:
    import sys

    print(line, file=sys.stderr)
    return 0
