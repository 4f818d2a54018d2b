"""``integration plan``: what a job needs, before it is run."""

from pathlib import Path
from typing import Annotated

import typer


def plan(
    config: Annotated[str, typer.Argument(help="One of the configs below.")],
    cluster: Annotated[
        str | None,
        typer.Option(help="jupiter, leonardo, h200 or a FILE.toml. Default: the config's own."),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Show this rank beside the worst.")] = 0,
    ranks: Annotated[int | None, typer.Option(min=1, help="GPUs, one rank each.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline parallel degree.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Data parallel replicas.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallel degree.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert parallel degree.")] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Sequences of one data-parallel rank in a step.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the config slice.")] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Experts a layer of the config slice.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Leave this contribution out. Repeatable.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write a page with bars to this file.")
    ] = None,
) -> None:
    """Show memory, traffic and time of CONFIG, by item; no GPU is needed.

    The exit code is 3 where the job does not fit the cluster, and 2 for a mistake in the call.
    """
    from dataclasses import replace

    from integration.ground import terminal
    from integration.jobs import catalog
    from integration.jobs.cluster import load
    from integration.patchset import repository
    from integration.plan import published, render
    from integration.plan.levers import Levers
    from integration.plan.plan import changes, make
    from integration.report import plan as pages

    job = catalog.find(config, layers=layers, experts=experts)
    job = job.on(ranks) if ranks else job
    layout = {"pp": pp, "dp_replicate": replicas, "tp": tp, "ep": ep}
    job = replace(
        job,
        layout=replace(job.layout, **{k: v for k, v in layout.items() if v is not None}),
        sequences=sequences or job.sequences,
        seq_len=seq_len or job.seq_len,
    )
    made = make(
        job, load(cluster or job.cluster), Levers.of(repository.without(without or ())), rank
    )
    changed = changes(made)
    run = job.name.startswith("jupiter_1t") and made.cluster.name == "jupiter"
    render.show(
        made,
        changed,
        published.figures(made) if run and not without else [],
        published.arithmetic(made) if run and not without else [],
        terminal.console(120),
    )
    if html is not None:
        pages.write(made, changed, html)
        print(f"page: {html}")
    if made.exit_code:
        raise typer.Exit(made.exit_code)
