"""Pictures for README: bars as SVG files, made of what is kept as evidence.

A page of GitHub shows an SVG as a picture: no script, no page's style. So it brings its own
colours, for a light and a dark scheme.
"""

from html import escape
from pathlib import Path

from integration.ground import files, paths
from integration.report import ladder
from integration.report import plan as plan_page
from integration.report.charts import Bar, Bars
from integration.report.page import Beside

FOLDER = paths.REPO / "integration" / "evidence"
WIDTH = 720  # pixels, as README shows it; a telephone has half, and text of 8 pixels
LABELS = 250  # of them for labels, and at the right FIGURES for figures
FIGURES = 150
ROW = 24
TITLE, LEGEND = 28, 24  # the height of each
STYLE = """
text { font: 14px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1b1f24 }
.title { font-weight: 600 } .small { font-size: 12px; fill: #5c6570 }
line { stroke: #1b1f24; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e8ec } .small { fill: #9aa5b1 } line { stroke: #e4e8ec }
}"""


def write_all(folder: Path = FOLDER) -> list[Path]:
    """Write the pictures that README shows; return their paths.

    Raises:
        UserError: a file cannot be written; none was changed then.
    """
    made = pictures()
    files.replace_all(folder, {name: text.encode() for name, text in made.items()})
    return [folder / name for name in made]


def pictures() -> dict[str, str]:
    """Return the SVG text of each picture by its file name, of what is kept."""
    found: dict[str, Bars] = {}
    records = ladder.merged(ladder.recorded())
    if records:
        rates, phases = _of_ladder(records[0])
        found |= {"ladder.svg": rates, "step-by-phase.svg": phases}
    plan = plan_page.planned()
    device, host = plan_page.memory(plan)
    found["budget-1t.svg"] = _budget(plan.job.name, device, host)
    return {name: svg(bars) for name, bars in found.items()}


def _of_ladder(record: ladder.Record) -> tuple[Bars, Bars]:
    """Return the rates and the phases of the first ladder's section."""
    blocks = [block for block in ladder.section([record]).blocks if isinstance(block, Beside)]
    charts = [chart for chart in blocks[0].charts if isinstance(chart, Bars)]
    phases = next(chart for chart in charts if chart.title == ladder.PHASES_TITLE)
    return charts[0], phases


def _budget(name: str, device: Bars, host: Bars) -> Bars:
    """Return both memories' items, each with what is there, as bars of one scale."""
    rows = []
    for where in (device, host):
        whole, *items = where.bars
        rows += [Bar(label=where.title, parts={"all": sum(whole.parts.values())}, text=whole.text)]
        rows += [
            Bar(label=item.label, parts={"item": sum(item.parts.values())}, text=item.text)
            for item in items
        ]
    return Bars(title=f"Memory of a rank of {name}, as planned", bars=rows, form=device.form)


def svg(chart: Bars) -> str:
    """Return bars as the text of an SVG file: label left, bar, figure right."""
    colours = chart.colours
    top = TITLE + (LEGEND if chart.legend else 0)
    rows = "\n".join(_row(chart, bar, colours, top + ROW * n) for n, bar in enumerate(chart.bars))
    legend, x = "", 0.0
    for name, colour in chart.legend.items():
        legend += f'<rect x="{x:.0f}" y="29" width="11" height="11" rx="2" fill="{colour}"/>'
        legend += f'<text class="small" x="{x + 16:.0f}" y="39">{escape(name)}</text>\n'
        x += 34 + 7.2 * len(name)
    height = top + ROW * len(chart.bars) + 6
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" \
width="{WIDTH}" height="{height}" role="img" aria-label="{escape(chart.title)}">
<style>{STYLE}
</style>
<text class="title" x="0" y="16">{escape(chart.title)}</text>
{legend}{rows}
</svg>
"""


def _row(chart: Bars, row: Bar, colours: dict[str, str], y: int) -> str:
    scale = (WIDTH - LABELS - FIGURES) / chart.most
    text = f'<text x="0" y="{y + 13}">{escape(row.label)}</text>'
    x = float(LABELS)
    for name, value in row.parts.items():
        width = value * scale
        text += (
            f'<rect x="{x:.1f}" y="{y + 1}" width="{width:.1f}" height="15" '
            f'fill="{colours[name]}"><title>{escape(f"{name}: {chart.form(value)}")}</title></rect>'
        )
        x += width
    if row.spread:
        low, high = (LABELS + value * scale for value in row.spread)
        text += f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 8.5}" y2="{y + 8.5}"/>'
    if row.note:
        return f'{text}<text class="small" x="{LABELS}" y="{y + 13}">{escape(row.note)[:60]}</text>'
    return f'{text}<text x="{WIDTH}" y="{y + 13}" text-anchor="end">{escape(row.text)}</text>'
