"""The plan as one static page, in the charts and the style of ``integration report``."""

from collections.abc import Sequence
from pathlib import Path

from integration.ground.units import GIB, size
from integration.jobs.catalog import JUPITER_1T
from integration.jobs.cluster import load
from integration.plan import traffic
from integration.plan.plan import Change, Plan, make
from integration.plan.published import Figure
from integration.plan.render import number
from integration.report import page
from integration.report.charts import Bar, Bars
from integration.report.page import Beside, Block, Section, Table

GIGA = 1e9


def write(
    plan: Plan,
    changes: list[Change],
    path: Path,
    figures: Sequence[Figure] = (),
    arithmetic: Sequence[str] = (),
) -> None:
    """Write the page; with the published ``figures`` of the job and their ``arithmetic``, if any.

    Raises:
        UserError: it cannot be written there.
    """
    time = plan.time
    title = f"{plan.job.name} on {plan.job.ranks} {plan.cluster.gpu.name} ({plan.cluster.name})"
    lead = (
        f"{time.tokens_per_second:,.0f} tokens/s a GPU, {time.seconds:.1f} s a step, MFU "
        f"{time.mfu:.1%}, bound by {time.binds}."
    )
    shown = sections(plan, changes)
    if figures:
        shown.append(
            Section(title="Beside the published run", blocks=_published(figures, arithmetic))
        )
    page.write(path, title, lead, shown)


def sections(plan: Plan, changes: list[Change]) -> list[Section]:
    """Return memory, traffic by cause, time by phase, and what each contribution does."""
    notes = [*plan.warnings, *(f"Does not fit: {problem}" for problem in plan.too_large)]
    phases = [
        Bar(
            label=f"{phase.name}: {phase.binds}",
            parts={"seconds": phase.seconds},
            text=f"{phase.seconds:.2f}",
        )
        for phase in plan.time.phases
    ]
    seconds = Bars(title="Seconds", bars=phases, form="{:.2f} s".format)
    return [
        Section(
            title=f"Memory of rank {plan.worst.rank}, the worst", blocks=[*notes, *memory(plan)]
        ),
        Section(title="Traffic a step and GPU", blocks=_traffic(plan)),
        Section(title="Time of a step", blocks=[seconds]),
        Section(title="Without one contribution", blocks=[_changes(changes)]),
    ]


def planned() -> Plan:
    """Return the plan of the 1T job on its own cluster."""
    return make(JUPITER_1T, load(JUPITER_1T.cluster))


def memory(plan: Plan) -> list[Bars]:
    """Return the worst rank's memory by item, on the GPU and on the host, against what is there."""
    where = (
        ("GPU", plan.worst.hbm, plan.cluster.gpu.hbm_gib),
        ("Host", plan.worst.host, plan.cluster.host.memory_gib),
    )
    return [_budget(name, items, there * GIB) for name, items, there in where]


def budget() -> Section:
    """Return the memory of the 1T job's worst rank by item, from the plan."""
    plan = planned()
    lead = (
        f"{plan.job.name} on {plan.job.ranks} {plan.cluster.gpu.name}: rank {plan.worst.rank}, the "
        f"worst, by formula, at {plan.worst.moment} where the GPU is fullest."
    )
    return Section(
        title="Memory budget of the 1T job",
        blocks=[lead, Beside(tuple(memory(plan)))],
        command=f"integration plan {plan.job.name}",
    )


def _budget(name: str, items: dict[str, float], there: float) -> Bars:
    """Return one bar of all items against the limit, and one bar an item below it."""
    held = {item: value for item, value in items.items() if value}
    total = sum(held.values())
    rows = [Bar(label="all", parts=held, text=f"{size(total)} of {size(there)}")]
    rows += [Bar(label=item, parts={item: value}, text=size(value)) for item, value in held.items()]
    return Bars(title=name, bars=rows, form=size, limit=("what is there", there))


def _traffic(plan: Plan) -> list[Block]:
    cluster = plan.cluster
    names = {
        traffic.NETWORK: cluster.network.name,
        traffic.NODE: cluster.node.name,
        traffic.TO_DEVICE: f"{cluster.host_link.name} to the GPU",
        traffic.TO_HOST: f"{cluster.host_link.name} to the host",
    }
    rows, found = traffic.table(plan.flows), []
    for link, name in names.items():
        causes = {cause: links[link] / GIGA for cause, links in rows.items() if links[link]}
        bars = [Bar(label=k, parts={"GB": v}, text=f"{v:,.1f}") for k, v in causes.items()]
        if bars:
            found.append(Bars(title=f"{name}, GB", bars=bars, form="{:,.1f} GB".format))
    return found


def _changes(changes: list[Change]) -> Table:
    heads = ("", "GPU GiB", "host GiB", "network GB", "seconds a step")
    rows = []
    for c in changes:
        cells = (c.hbm / GIB, c.host / GIB, c.network / GIGA, c.seconds)
        rows.append((c.name, *(f"{value:+,.2f}" for value in cells)))
    return Table(heads=heads, rows=rows, title="What is added by leaving it out")


def _published(figures: Sequence[Figure], arithmetic: Sequence[str]) -> list[Block]:
    rows = [
        (
            figure.name,
            number(figure.published, figure.unit),
            number(figure.planned, figure.unit),
            f"{figure.difference:+.1%}",
            figure.why,
        )
        for figure in figures
    ]
    heads = ("", "published", "planned", "difference", "because")
    return [
        Table(heads=heads, rows=rows, numbers=False, title="Published and planned"),
        *arithmetic,
    ]
