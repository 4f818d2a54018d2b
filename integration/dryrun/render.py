"""A dry run as tables on the terminal."""

from math import prod
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from integration.dryrun import compare
from integration.dryrun.compare import Pair
from integration.dryrun.request import Request
from integration.ground.units import GIB
from integration.jobs.spec import JobSpec
from integration.plan import memory, traffic
from integration.plan.levers import Levers
from integration.plan.render import GIGA, table_of

MIB = 2**20


def show(job: JobSpec, request: Request, found: dict[str, Any], out: Console) -> None:
    """Print placements, collectives, memory and checks, as far as the dry run came."""
    layout, rank = job.layout, request.rank
    stage = rank // (job.ranks // layout.pp)
    where = f", stage {stage} of {layout.pp}: only what this stage runs" if layout.pp > 1 else ""
    out.print(
        f"[bold]{job.name}[/] as rank {rank} of {job.ranks}{where}; {job.shape.layers} layers, "
        f"{len(found['contributions'])} contributions",
        soft_wrap=True,
    )
    out.print(_placements(job, rank, found))
    out.print(_beside("on the host, as checked at launch", "GiB", compare.host(job, rank, found)))
    if "collectives" in found:
        out.print(_collectives(found))
        out.print(_beside("received, by cause", "GB", compare.traffic_by_cause(job, rank, found)))
        out.print(_beside("kept between steps", "GiB", compare.state(job, rank, found)))
        out.print(_peaks(job, request, found))
        out.print(_waiting(job, found), soft_wrap=True)
    for check in found["checks"]:
        if check["why_not"]:
            mark, why = "[yellow]not asked[/]", f": {check['why_not']}"
        elif check["broken"]:
            mark, why = "[red]broken[/]", f": {check['broken']}"
        else:
            mark, why = "[green]holds[/]", ""
        out.print(f"{mark}  {check['name']}{escape(why)}", soft_wrap=True)
    for phase, cost in found["cost"].items():
        out.print(
            f"{phase}: {cost['seconds']:.1f} s, of which {cost['processor_seconds']:.1f} s of "
            f"processor time; {cost['peak_host_bytes'] / GIB:.2f} GiB of host memory at most"
        )


def _placements(job: JobSpec, rank: int, found: dict[str, Any]) -> Table:
    table = table_of("parameter", "of it", "mesh", "placements", "shape", "on this rank", "MiB")
    for row in found["placements"]:
        size = 4 * row["count"] * prod(row["local_shape"])
        table.add_row(
            row["name"],
            str(row["count"]),
            row["mesh"],
            row["placements"],
            _shape(row["shape"]),
            _shape(row["local_shape"]),
            f"{size / MIB:,.2f}",
        )
    pairs = compare.parameters(job, rank, found).values()
    here, planned = (sum(getattr(p, name) or 0 for p in pairs) for name in ("found", "plan"))
    table.add_section()
    table.add_row("[bold]all[/]", "", "", "", "", f"{here:,.0f}", f"{4 * here / MIB:,.2f}")
    table.add_row("plan", "", "", "", "", f"{planned:,.0f}", f"{4 * planned / MIB:,.2f}")
    return table


def _collectives(found: dict[str, Any]) -> Table:
    table = table_of("collective", "operator", "axis", "of", "calls", "GB sent", "GB received")
    for row in found["collectives"]:
        table.add_row(
            row["cause"],
            row["op"],
            row["axis"],
            row["part"],
            f"{row['calls']:,}",
            f"{row['sent'] / GIGA:,.4f}",
            f"{row['received'] / GIGA:,.4f}",
        )
    return table


def _beside(title: str, unit: str, pairs: list[Pair]) -> Table:
    table = table_of(title, f"dry run {unit}", f"plan {unit}", "differs")
    size = {"GB": GIGA, "GiB": GIB}[unit]
    for pair in pairs:
        table.add_row(
            f"{pair.name}, mean of the ranks" if pair.name == traffic.MUON else pair.name,
            f"{pair.found / size:,.4f}",
            "" if pair.plan is None else f"{pair.plan / size:,.4f}",
            "" if pair.difference is None else f"{pair.difference:+.1%}",
        )
    return table


def _peaks(job: JobSpec, request: Request, found: dict[str, Any]) -> Table:
    """Memory of what comes and goes in a step. Boundary activations stand by themselves."""
    peaks = found["peaks"]
    table = table_of("most at once (GiB)", *peaks)
    items = dict.fromkeys(item for peak in peaks.values() for item in peak)
    for item in (item for item in items if item != compare.BOUNDARIES):
        sizes = [peak.get(item, 0) / GIB for peak in peaks.values()]
        if max(sizes) >= 0.005:
            table.add_row(item, *(f"{size:.2f}" for size in sizes))
    table.add_section()
    pairs = compare.peaks(job, request.rank, found)
    table.add_row("[bold]all of these[/]", *(f"[bold]{pair.found / GIB:.2f}[/]" for pair in pairs))
    plans = ("" if pair.plan is None else f"{pair.plan / GIB:.2f}" for pair in pairs)
    table.add_row("plan", *plans)
    table.add_section()
    waiting = (peak.get(compare.BOUNDARIES, 0) / GIB for peak in peaks.values())
    table.add_row(compare.BOUNDARIES, *(f"{size:.2f}" for size in waiting))
    return table


def _waiting(job: JobSpec, found: dict[str, Any]) -> str:
    """Say what the row of boundary activations is, and why no sum has it."""
    where = "they are on the GPU in a real step as well"
    if memory.offloads(job, Levers.of(found["contributions"])):
        where = "in a real step activation_offload keeps all but three of them on the host"
    return (
        f"{compare.BOUNDARIES} are what layers keep for backward; no sum has them, as fake tensors "
        f"are not offloaded: {where}"
    )


def _shape(sizes: list[int]) -> str:
    return " x ".join(map(str, sizes))
