"""``integration patches drift|rebase|drop|pr``. What they need is imported when they run."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from integration.ground import terminal

if TYPE_CHECKING:
    from integration.upstream.drift import Drift
    from integration.upstream.rebase import Done, Stopped

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME]...", help="Contributions; all when none is named."),
]


@contextmanager
def _telling(words: str) -> Generator[Callable[[str], None], None, None]:
    """Show the step under way on stderr; the function yielded names the next one.

    On a terminal it is a moving line that goes away; elsewhere each step is a line.
    """
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") as status:

        def tell(words: str) -> None:
            if console.is_terminal:
                status.update(words)
            else:
                console.print(words, markup=False, highlight=False, soft_wrap=True)

        tell(words)
        yield tell


def drift(
    against: Annotated[
        list[str],
        typer.Option(metavar="PACKAGE==VERSION|PATH", help="A newer version, wheel or checkout."),
    ],
    run_drop_when: Annotated[
        bool, typer.Option("--run-drop-when", help="Run Drop-when tests there, unpatched.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a newer upstream means for each contribution.

    Exit code: 0 all apply (an offset is nothing to do), 3 one is there already, 4 one is there
    with changes, 5 one needs a rebase; the highest counts.
    """
    import json
    from dataclasses import asdict, replace

    from integration.ground.errors import UserError
    from integration.patchset import pins as pins_module
    from integration.patchset import repository
    from integration.upstream import drift as module
    from integration.upstream import dropwhen, newer

    pins = pins_module.load()
    others = newer.parse(against, pins, "--against")
    contributions = repository.load()
    drifts = module.drift(contributions, others)
    if run_drop_when:
        mine = {c.name: c for c in contributions}
        with _telling("Installing into a throwaway environment") as tell:
            try:
                with dropwhen.environment(others, pins) as python:
                    for place, d in enumerate(drifts):
                        tell(f"Drop-when of {d.name}, {place + 1} of {len(drifts)}")
                        outcome = dropwhen.run(mine[d.name], str(python))
                        drifts[place] = replace(d, drop_when=dropwhen.words(outcome))
            except UserError as error:
                drifts = [replace(d, drop_when=f"{module.NOT_RUN}: {error}") for d in drifts]
    if as_json:
        print(json.dumps([asdict(d) for d in drifts], indent=2))
    else:
        _show(drifts)
    raise typer.Exit(module.worst(drifts))


def _show(drifts: "list[Drift]") -> None:

    from rich.table import Table

    from integration.patchset.scratch import PRESENT

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "against", "verdict", "Drop-when", "what"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "verdict"))
    for d in drifts:
        table.add_row(d.name, d.against, d.verdict.value, d.drop_when.partition(":")[0], d.detail)
    terminal.console().print(table)
    reasons = dict.fromkeys(d.drop_when for d in drifts if ":" in d.drop_when)
    for reason in reasons:
        print(f"\nDrop-when {reason}")
    for d in drifts:
        there = [f.where for f in d.findings if f.verdict == PRESENT]
        if there:
            print(f"\n{d.name}: already present\n  at        " + "\n            ".join(there))
        for finding in d.findings:
            if finding.verdict != PRESENT:
                print(f"\n{finding}")


def rebase(
    onto: Annotated[
        list[str] | None,
        typer.Option(metavar="PACKAGE==VERSION", help="The newer version, or a wheel of it."),
    ] = None,
    commit: Annotated[
        list[str] | None,
        typer.Option(metavar="PACKAGE==SHA", help="Its commit, where no tag tells it."),
    ] = None,
    go_on: Annotated[bool, typer.Option("--continue", help="After mending a conflict.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Leave everything as it was.")] = False,
) -> None:
    """Move the set to a newer pin, three-way; patches/ changes when all is done, and at once."""
    from integration.ground.errors import UserError
    from integration.patchset import pins as pins_module
    from integration.upstream import newer
    from integration.upstream import rebase as module

    if [bool(onto), go_on, abort].count(True) != 1:
        raise UserError(
            "expected one of --onto, --continue and --abort; nothing was done: begin with "
            "`integration patches rebase --onto PACKAGE==VERSION`"
        )
    if abort:
        module.abort()
        print("forgotten; patches/ is as it was")
        return
    try:
        if go_on:
            result = module.go_on()
        else:
            pins = pins_module.load()
            others = newer.parse(onto or [], pins, "--onto")
            result = module.start(others, newer.commits(commit or [], others))
    except KeyboardInterrupt:
        begun = module.folder().exists()
        raise UserError(
            "interrupted; patches/ is as it was: run `integration patches rebase "
            + ("--continue`, which takes up what is done, or `--abort`" if begun else "--onto …`"),
            exit_code=130,
        ) from None
    if isinstance(result, module.Stopped):
        _show_stop(result)
        raise typer.Exit(1)
    _show_done(result)


def _show_stop(stopped: "Stopped") -> None:
    import shlex

    path = shlex.quote(str(stopped.checkout))
    print(
        f"{stopped.upstream} stopped at {stopped.name}:\n{stopped.complaint}\n\n"
        f"look      git -C {path} show REBASE_HEAD\n"
        f"mend      edit {', '.join(stopped.files) or 'the files'} there, then "
        f"git -C {path} add -A\n"
        f"go on     integration patches rebase --continue\n"
        f"or        integration patches rebase --abort\n\n"
        f"patches/ is as it was until all is done"
    )


def _show_naming(text: str) -> None:
    """Print the files that name what has gone, for a person to mend."""
    from integration.ground import paths
    from integration.patchset import git

    # Evidence tells what was measured then: it is measured again, never edited.
    line = ["grep", "--fixed-strings", "--word-regexp", "-l", text, "--", ":!*/evidence/*"]
    naming = git.attempt(line, paths.REPO).text.splitlines()
    there = [name for name in naming if (paths.REPO / name).is_file()]
    if there:
        print(f"  still naming {text}: {', '.join(there)}")


def _show_done(done: "Done") -> None:
    print("\n".join(done.said))
    for old, new in done.moved:
        print(f"{old.package}: {old.version} -> {new.version} ({new.tag}, {new.commit[:12]})")
        _show_naming(old.version)
    package = " ".join(f"{new.package}=={new.version}" for _, new in done.moved)
    shown = ", ".join(f"{new.package} {new.version}" for _, new in done.moved)
    print(
        f"""
next      mend the files named above, and ci/lock for the exact versions
          pip install {package}
          integration patches readme --write && integration patches check
commit    git add -A && git commit -m "Move the pin to {shown}"
evidence  of a changed patch is stale: measure again, in commits of its own"""
    )


def drop(name: str) -> None:
    """Let NAME go: only when its Drop-when test passes on the unpatched pin."""
    from integration.upstream.drop import drop as run_drop

    with _telling(f"Running the Drop-when test of {name}"):
        file = run_drop(name)
    print(f"{name}: upstream no longer needs it; recorded in {file}")
    _show_naming(name)
    print(
        "next: integration patches readme --write, mend the files named above, then integration "
        "patches check, then commit"
    )


def pr(
    name: str,
    checkout: Annotated[Path, typer.Option(metavar="DIR", help="A clone of the upstream.")],
    base: Annotated[
        str | None, typer.Option(metavar="REF", help="Where to begin. Default: the clone's main.")
    ] = None,
    test: Annotated[bool, typer.Option(help="Run the contribution's tests for counts.")] = True,
) -> None:
    """Prepare NAME as a pull request: a branch in DIR, and pr.md. A person submits it."""
    import shlex

    from integration.upstream.pr import look, prepare

    with _telling(f"Reading what upstream has done since the pin to the lines of {name}") as tell:
        looked = look(name, checkout, base, test=test, tell=tell)
        # It is worth most where the patch no longer fits, and the branch cannot be made.
        print("upstream  " + "\n          ".join(looked.lines))
        tell(f"Making the branch {name}")
        prepared = prepare(name, checkout, base, looked=looked, test=test, tell=tell)
    branch = prepared.branch
    path = shlex.quote(str(checkout))
    print(f"branch    {branch.name} of {checkout}: on {branch.base[:12]}")
    print("          " + ", ".join(c.name for c in branch.contributions))
    for item in prepared.linted:
        words = {True: "clean", False: "finds something", None: "not run"}[item.clean]
        reason = "" if item.clean else f": {item.reason}"
        print(f"lint      {item.command.split()[0]}: {words}{reason}")
    print(f"text      {prepared.text}")
    print(
        f"""
read      git -C {path} log -p {branch.base[:12]}..{branch.name}
own       git -C {path} rebase {branch.base[:12]} {branch.name} \\
            --exec 'git commit --amend --no-edit --reset-author'
submit    push and open it yourself, once every TODO and box of pr.md is done"""
    )
