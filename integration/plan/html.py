"""The plan as one static page: bars drawn in SVG, no script, nothing loaded from elsewhere."""

from html import escape
from pathlib import Path

from integration.errors import UserError
from integration.plan import traffic
from integration.plan.cluster import GIB
from integration.plan.plan import Change, Plan

GIGA = 1e9
WIDTH, ROW, LABEL = 900, 24, 230
# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse }} td, th {{ padding: .15em .8em; text-align: right }}
td:first-child, th:first-child {{ text-align: left }} tr + tr td {{ border-top: 1px solid #ddd }}
svg {{ max-width: 100% }} text {{ font: 13px system-ui, sans-serif }}
</style></head><body>
{body}
</body></html>
"""


def write(plan: Plan, changes: list[Change], path: Path) -> None:
    """Write the page.

    Raises:
        UserError: it cannot be written there.
    """
    try:
        path.write_text(page(plan, changes))
    except OSError as error:
        raise UserError(f"--html {path} cannot be written: {error.strerror}") from None


def page(plan: Plan, changes: list[Change]) -> str:
    """Return the page: memory, traffic by cause, time by phase, what each contribution does."""
    job, time = plan.job, plan.time
    title = f"{job.name} on {job.ranks} {plan.cluster.gpu.name} ({plan.cluster.name})"
    notes = [*plan.warnings, *(f"Does not fit: {problem}" for problem in plan.too_large)]
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{time.tokens_per_second:,.0f} tokens/s a GPU, {time.seconds:.1f} s a step, MFU "
        f"{time.mfu:.1%}, bound by {escape(time.binds)}.</p>",
        *(f"<p><strong>{escape(note)}</strong></p>" for note in notes),
        f"<h2>Memory of rank {plan.worst.rank}, the worst (GiB)</h2>",
        _stacked("GPU", plan.worst.hbm, plan.cluster.gpu.hbm_gib),
        _stacked("host", plan.worst.host, plan.cluster.host.memory_gib),
        "<h2>Traffic a step and GPU (GB)</h2>",
        *_traffic(plan),
        "<h2>Time (s)</h2>",
        _bars({f"{p.name}: {p.binds}": p.seconds for p in time.phases}, "{:.2f}"),
        "<h2>Without one contribution</h2>",
        _changes(changes),
    ]
    return PAGE.format(title=escape(title), body="\n".join(body))


def _stacked(label: str, items: dict[str, float], limit_gib: float) -> str:
    """One bar of all items, with a line where the memory ends, and a legend."""
    scale = (WIDTH - 60) / max(sum(items.values()) / GIB, limit_gib)
    parts, x = [], 0.0
    shown = [(name, size / GIB) for name, size in items.items() if size]
    for index, (name, size) in enumerate(shown):
        colour, width = COLOURS[index % len(COLOURS)], size * scale
        parts.append(
            f'<rect x="{x:.1f}" y="22" width="{width:.1f}" height="28" fill="{colour}">'
            f"<title>{escape(name)}: {size:.2f} GiB</title></rect>"
        )
        column, line = index % 3 * WIDTH // 3, 70 + index // 3 * 20
        parts.append(
            f'<rect x="{column}" y="{line}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{column + 18}" y="{line + 11}">{escape(name)} {size:.2f}</text>'
        )
        x += width
    end = limit_gib * scale
    parts.append(
        f'<line x1="{end:.1f}" x2="{end:.1f}" y1="16" y2="56" stroke="#000" stroke-width="2"/>'
        f'<text x="0" y="14">{label}: {sum(items.values()) / GIB:.1f} of {limit_gib:.1f}</text>'
    )
    height = 80 + (len(shown) + 2) // 3 * 20
    return _svg(height, parts)


def _traffic(plan: Plan) -> list[str]:
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
        if causes:
            found += [f"<h3>{escape(name)}</h3>", _bars(causes, "{:,.1f}")]
    return found


def _bars(values: dict[str, float], form: str) -> str:
    most = max(values.values()) or 1.0
    parts = []
    for index, (name, value) in enumerate(values.items()):
        y, width = index * ROW, value / most * (WIDTH - LABEL - 100)
        parts.append(
            f'<text x="0" y="{y + 16}">{escape(name)}</text>'
            f'<rect x="{LABEL}" y="{y + 4}" width="{width:.1f}" height="16" fill="{COLOURS[0]}"/>'
            f'<text x="{LABEL + width + 6:.1f}" y="{y + 16}">{form.format(value)}</text>'
        )
    return _svg(len(values) * ROW + 4, parts)


def _changes(changes: list[Change]) -> str:
    heads = ("", "GPU GiB", "host GiB", "network GB", "seconds a step")
    rows = ["".join(f"<th>{head}</th>" for head in heads)]
    for c in changes:
        cells = (c.hbm / GIB, c.host / GIB, c.network / GIGA, c.seconds)
        numbers = "".join(f"<td>{value:+,.2f}</td>" for value in cells)
        rows.append(f"<td>{escape(c.name)}</td>{numbers}")
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _svg(height: int, parts: list[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">{"".join(parts)}</svg>'
