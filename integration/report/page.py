"""A static page: everything inlined, so that it opens from a disk, a mail or a CI artifact.

Bars are rows of HTML, lines are SVG: they need no script, follow the reader's light or dark scheme
and text size, and take the width that there is. A row has its label above its bar, left, and its
figure above it, right, since beside a bar a contribution's name takes most of a telephone's width.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from pathlib import Path

from integration.ground import files
from integration.ground.errors import UserError
from integration.report.charts import Bar, Bars, Chart, Lines

HERE = Path(__file__).parent
LONG = 24  # characters: more is no number


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text. A cell in ``Html`` is put in as it is."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    numbers: bool = True  # all but the first column to the right


class Html(str):
    """Markup, not text to be escaped."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What a section would show, and the command that makes it."""

    what: str
    command: str


@dataclass(frozen=True, slots=True)
class Beside:
    """Charts in two columns, where there is room."""

    charts: tuple[Chart, ...]


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading below the section's."""

    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """What is shown when its summary is opened."""

    summary: str
    blocks: "Sequence[Block]"


@dataclass(frozen=True, slots=True)
class Commands:
    """What made the figures, ``(name, command)`` each; closed, since they are long."""

    rows: Sequence[tuple[str, str]]


Block = Chart | Table | Missing | Beside | Heading | Closed | Commands | Html | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, what stands below it, and the command that made its figures."""

    title: str
    blocks: Sequence[Block]
    command: str = ""

    @property
    def anchor(self) -> str:
        return "-".join("".join(c if c.isalnum() else " " for c in self.title.lower()).split())


def first_open(charts: Sequence[Chart], what: str) -> list[Block]:
    """Return the first chart, and the others closed: one is read, the others are looked up."""
    first, *more = charts
    rest = [Closed(f"{len(more)} more: {what}", [Beside(tuple(more))])] if more else []
    return [first, *rest]


def write(path: Path, title: str, lead: str, sections: Sequence[Section]) -> None:
    """Write the page beside, and rename.

    Raises:
        UserError: it cannot be written there.
    """
    text = render(title, lead, sections)
    try:
        files.write(path, text)
    except OSError as error:
        raise UserError(
            f"expected to write the page to {path}, found: {error.strerror}; none was written: "
            f"name another file"
        ) from None


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """Return the page's HTML. ``lead`` is text below the title."""
    body = "\n".join(_section(section) for section in sections)
    links = "".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s in sections)
    contents = f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if len(sections) > 1 else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{(HERE / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header><h1>{escape(title)}</h1><p>{_prose(lead)}</p>{contents}</header>
<main id="content">
{body}
</main>
</body>
</html>
"""


def _section(section: Section) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    source = f'<p class="command">{_command(section.command)}</p>' if section.command else ""
    return (
        f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2>\n{source}\n{blocks}\n'
        "</section>"
    )


def _block(block: Block) -> str:
    match block:
        case Bars() | Lines():
            return _chart(block)
        case Table():
            return _table(block)
        case Beside():
            return f'<div class="pair">{"".join(_chart(c) for c in block.charts)}</div>'
        case Heading():
            return f"<h3>{escape(block.text)}</h3>"
        case Closed():
            inner = "\n".join(_block(each) for each in block.blocks)
            summary = f"<summary>{escape(block.summary)}</summary>"
            return f'<details class="closed">{summary}\n{inner}\n</details>'
        case Commands():
            return _commands(block.rows)
        case Missing():
            return f'<p class="missing">{escape(block.what)} Made by {_command(block.command)}</p>'
        case Html():
            return block
    return f"<p>{_prose(block)}</p>"


def _prose(text: str) -> str:
    """Return text as markup; a command in backquotes becomes code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _chart(chart: Chart) -> str:
    legend = "".join(
        f'<li><span style="background:{colour}"></span>{escape(label)}</li>'
        for label, colour in chart.legend.items()
    )
    legend = f'<ul class="legend">{legend}</ul>' if legend else ""
    note = f"<p>{_prose(chart.caption)}</p>" if chart.caption else ""
    drawn = _bars(chart) if isinstance(chart, Bars) else _lines(chart)
    numbers = _table(Table(heads=chart.heads, rows=chart.rows))
    return f"""<figure>
<figcaption>{escape(chart.title)}</figcaption>
{legend}
<div class="chart" role="img" aria-label="{escape(chart.title)}; its numbers are below">{drawn}
</div>
{note}
<details><summary>Numbers</summary>
{numbers}
</details>
</figure>"""


def _bars(chart: Bars) -> str:
    colours = chart.colours
    return "".join(_bar(chart, row, colours, first=n == 0) for n, row in enumerate(chart.bars))


def _bar(chart: Bars, row: Bar, colours: dict[str, str], *, first: bool) -> str:
    if not row.parts and not row.note:
        return f'\n<p class="group">{escape(row.label)}</p>'
    parts = "".join(
        f'<i style="width:{_share(value, chart)};background:{colours[name]}"'
        f' title="{escape(f"{name}: {chart.form(value)}")}"></i>'
        for name, value in row.parts.items()
    )
    if row.spread:
        low, high = row.spread
        parts += f'<b style="left:{_share(low, chart)};width:{_share(high - low, chart)}"></b>'
    if first and chart.limit:
        parts += f'<u style="left:{_share(chart.limit[1], chart)}"></u>'
    track = f"<em>{escape(row.note)}</em>" if row.note else f'<div class="track">{parts}</div>'
    words = f"<span>{escape(row.label)}</span><span>{escape(row.text)}</span>"
    return f'\n<div class="bar"><div class="words">{words}</div>{track}</div>'


def _share(value: float, chart: Bars) -> str:
    return f"{value / chart.most:.3%}"


def _lines(chart: Lines) -> str:
    """Return an SVG that is stretched to the width, with the ends of both axes as text around."""
    xs = [x for each, _ in chart.series.values() for x in each]
    ys = [y for _, each in chart.series.values() for y in each if isfinite(y)]
    left, right = min(xs), max(xs)
    low, high = (min(ys), max(ys)) if ys else (0.0, 1.0)
    width, height = (right - left) or 1.0, (high - low) or 1.0
    drawn = ""
    for name, (x, y) in chart.series.items():
        points = " ".join(
            f"{(a - left) / width * 1000:.1f},{(high - b) / height * 300:.1f}"
            for a, b in zip(x, y, strict=True)
            if isfinite(b)
        )
        drawn += f'<polyline points="{points}" stroke="{chart.legend[name]}"/>'
    return f"""
<div class="words"><span>{escape(chart.y)} {high:.6g}</span></div>
<svg viewBox="0 0 1000 300" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>
<div class="words"><span>{low:.6g}; {escape(chart.x)} {left:g}</span><span>{right:g}</span></div>"""


def _table(table: Table) -> str:
    # A column with a sentence in it: to the left, and it may be broken.
    long = [any(len(row[n]) > LONG for row in table.rows) for n in range(len(table.heads))]
    columns = [
        (escape(head), ' class="long"' if wide else "")
        for head, wide in zip(table.heads, long, strict=True)
    ]
    heads = "".join(f'<th scope="col"{kind}>{head}</th>' for head, kind in columns)
    rows = ""
    for row in table.rows:
        cells = "".join(
            f'<td{kind} data-head="{head}">{cell if isinstance(cell, Html) else escape(cell)}</td>'
            for cell, (head, kind) in zip(row, columns, strict=True)
        )
        rows += f"<tr>{cells}</tr>"
    title = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    kind = "numbers" if table.numbers else "words"
    # Wider than a telephone: it scrolls within itself, and the keyboard reaches it.
    name = escape(table.title or "Table")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">'
        f'<table class="{kind}">{title}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        "</div>"
    )


def _commands(rows: Sequence[tuple[str, str]]) -> str:
    """Return each command once, with the names of all that it made."""
    names: dict[str, list[str]] = {}
    for name, command in rows:
        names.setdefault(command, []).append(name)
    if not names:
        return ""
    items = "".join(
        f"<dt>{escape('; '.join(made))}</dt><dd>{_command(command)}</dd>"
        for command, made in names.items()
    )
    what = "Command" if len(names) == 1 else f"{len(names)} commands"
    return f"<details><summary>{what}</summary><dl>{items}</dl></details>"


def _command(command: str) -> str:
    return f"<code>{escape(command)}</code>"
