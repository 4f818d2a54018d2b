"""``integration patches drift|rebase|drop|pr``. What they need is imported when they run."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from integration.upstream.drift import Drift

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME]...", help="Contributions; all when none is named."),
]


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

    from integration.errors import UserError
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
        try:
            with dropwhen.environment(others, pins) as python:
                drifts = [
                    replace(d, drop_when=dropwhen.words(dropwhen.run(mine[d.name], str(python))))
                    for d in drifts
                ]
        except UserError as error:
            drifts = [replace(d, drop_when=f"{module.NOT_RUN}: {error}") for d in drifts]
    if as_json:
        print(json.dumps([asdict(d) for d in drifts], indent=2))
    else:
        _show(drifts)
    raise typer.Exit(module.worst(drifts))


def _show(drifts: "list[Drift]") -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    from integration.patchset.scratch import PRESENT

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "against", "verdict", "Drop-when", "what"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "verdict"))
    for d in drifts:
        table.add_row(d.name, d.against, d.verdict.value, d.drop_when.partition(":")[0], d.detail)
    Console(width=None if sys.stdout.isatty() else 1000).print(table)
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
