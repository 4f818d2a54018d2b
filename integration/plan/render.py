"""The plan as tables on the terminal."""

from rich.console import Console
from rich.table import Table

from integration.ground.units import GIB, gib
from integration.plan import traffic
from integration.plan.plan import Change, Plan
from integration.plan.published import Figure

GIGA = 1e9


def show(
    plan: Plan, changes: list[Change], figures: list[Figure], arithmetic: list[str], out: Console
) -> None:
    """Print the plan."""
    job, layout = plan.job, plan.job.layout
    out.print(
        f"[bold]{job.name}[/] on {job.ranks} {plan.cluster.gpu.name} of {plan.cluster.name}: "
        f"{job.shape.params / GIGA:,.2f} B parameters, {job.shape.active_params / GIGA:,.2f} B "
        "active"
    )
    out.print(
        f"pp {layout.pp} x dp_replicate {layout.dp_replicate} x dp_shard "
        f"{layout.dp_shard(job.ranks)} x tp {layout.tp}; experts: efsdp "
        f"{layout.efsdp(job.ranks)} x ep {layout.ep}; {job.tokens:,} tokens a step"
    )
    for warning in plan.warnings:
        out.print(f"[yellow]warning:[/] {warning}", soft_wrap=True)
    out.print(memory_table(plan))
    out.print(traffic_table(plan))
    out.print(time_table(plan))
    out.print(changes_table(changes))
    if figures:
        out.print(figures_table(figures))
        for sentence in arithmetic:
            out.print(sentence, soft_wrap=True)
    for problem in plan.too_large:
        out.print(f"[red]does not fit:[/] {problem}", soft_wrap=True)


def memory_table(plan: Plan) -> Table:
    table = table_of(
        "memory (GiB)", f"rank {plan.rank.rank}", f"worst rank ({plan.worst.rank})", "there"
    )
    for where, limit in (
        ("hbm", plan.cluster.gpu.hbm_gib),
        ("host", plan.cluster.host.memory_gib),
    ):
        mine, most = getattr(plan.rank, where), getattr(plan.worst, where)
        for item in dict.fromkeys([*mine, *most]):
            table.add_row(item, gib(mine.get(item, 0.0)), gib(most.get(item, 0.0)), "")
        name = f"GPU, at {plan.worst.moment}" if where == "hbm" else "host"
        totals = (sum(mine.values()), sum(most.values()))
        row = [f"[bold]{name}[/]", *(f"[bold]{gib(n)}[/]" for n in totals), f"{limit:.1f}"]
        table.add_row(*row, end_section=True)
    return table


def traffic_table(plan: Plan) -> Table:
    cluster = plan.cluster
    names = {
        traffic.NETWORK: cluster.network.name,
        traffic.NODE: cluster.node.name,
        traffic.TO_DEVICE: f"{cluster.host_link.name} in",
        traffic.TO_HOST: f"{cluster.host_link.name} out",
    }
    table = table_of("GB a step and GPU", *names.values())
    rows = traffic.table(plan.flows)
    for cause, links in rows.items():
        table.add_row(cause, *(_gb(links[link]) for link in names))
    totals = [sum(links[link] for links in rows.values()) for link in names]
    table.add_section()
    table.add_row("[bold]all[/]", *(f"[bold]{_gb(total)}[/]" for total in totals))
    return table


def time_table(plan: Plan) -> Table:
    table = table_of("phase", "seconds", "bound by", "busy beside it")
    for phase in plan.time.phases:
        others = sorted(phase.busy.items(), key=lambda item: -item[1])
        beside = ", ".join(f"{n} {s:.2f}" for n, s in others if s >= 0.005 and n != phase.binds)
        table.add_row(phase.name, f"{phase.seconds:.2f}", phase.binds, beside)
    if plan.time.bubble:
        table.add_row("bubble", f"{plan.time.bubble:.2f}", "pipeline", "")
    table.add_section()
    table.add_row(
        "[bold]step[/]",
        f"[bold]{plan.time.seconds:.2f}[/]",
        f"[bold]{plan.time.binds}[/]",
        f"{plan.time.tokens_per_second:,.0f} tokens/s a GPU, MFU {plan.time.mfu:.1%}",
    )
    return table


def changes_table(changes: list[Change]) -> Table:
    table = table_of("without it", "GPU GiB", "host GiB", "network GB", "seconds a step")
    for change in changes:
        cells = (change.hbm / GIB, change.host / GIB, change.network / GIGA, change.seconds)
        table.add_row(change.name, *(_signed(value) for value in cells))
    return table


def figures_table(figures: list[Figure]) -> Table:
    table = table_of("against the published run", "published", "plan", "differs", "because")
    for figure in figures:
        mark = "" if figure.agrees else "[red]"
        table.add_row(
            figure.name,
            number(figure.published, figure.unit),
            number(figure.planned, figure.unit),
            f"{mark}{figure.difference:+.1%}",
            figure.why,
        )
    return table


# Columns of text; numbers stand at the right.
_TEXT = ("bound by", "busy beside it", "because", "mesh", "placements", "operator", "axis", "of")


def table_of(title: str, *columns: str) -> Table:
    """Return an empty table whose first column is headed ``title``."""
    table = Table(show_edge=False, pad_edge=False, title_justify="left")
    table.add_column(title)
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT else "right")
    return table


def _gb(size: float) -> str:
    return f"{size / GIGA:,.2f}" if size else ""


def _signed(value: float) -> str:
    return f"{value:+,.2f}" if abs(value) >= 0.005 else ""


def number(value: float, unit: str) -> str:
    """Return a figure with its unit."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip()
