"""A static page: everything inlined, so that it opens from a disk, a mail or a CI artifact.

The plotting library is plotly.js, whole (4.8 MB): a page that loads it from elsewhere shows nothing
on a compute node, and a chart that can be zoomed is worth it in the timeline.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from integration.ground import files
from integration.ground.errors import UserError
from integration.report.charts import Chart

HERE = Path(__file__).parent
AROUND = 130  # pixels: a chart's title, legend, note and summary
LONG = 24  # characters: more is no number
_LONG = {False: "", True: ' class="long"'}


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
    numbered = _Numbered()
    body = "\n".join(_section(section, numbered) for section in sections)
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
<noscript><p>Charts need JavaScript; their numbers are in the tables below each.</p></noscript>
<main id="content">
{body}
</main>
<script>{_plotly()}</script>
<script>
{(HERE / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


class _Numbered:
    """Gives each chart a number of its own, for its ids."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        self.last += 1
        return self.last


def _section(section: Section, numbered: _Numbered) -> str:
    blocks = "\n".join(_block(block, numbered) for block in section.blocks)
    source = f'<p class="command">{_command(section.command)}</p>' if section.command else ""
    return (
        f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2>\n{source}\n{blocks}\n'
        "</section>"
    )


def _block(block: Block, numbered: _Numbered) -> str:
    match block:
        case Chart():
            return _chart(block, numbered.next())
        case Table():
            return _table(block)
        case Beside():
            columns = "\n".join(
                "<div>" + "\n".join(_chart(c, numbered.next()) for c in column) + "</div>"
                for column in _columns(block.charts)
            )
            return f'<div class="pair">{columns}</div>'
        case Heading():
            return f"<h3>{escape(block.text)}</h3>"
        case Closed():
            inner = "\n".join(_block(each, numbered) for each in block.blocks)
            summary = f"<summary>{escape(block.summary)}</summary>"
            return f'<details class="closed">{summary}\n{inner}\n</details>'
        case Commands():
            return _commands(block.rows)
        case Missing():
            return f'<p class="missing">{escape(block.what)} Made by {_command(block.command)}</p>'
        case Html():
            return block
    return f"<p>{_prose(block)}</p>"


def _columns(charts: Sequence[Chart]) -> list[list[Chart]]:
    """Return two columns, or one; each chart in turn is put into the one that is shorter."""
    columns: list[list[Chart]] = [[], []]
    for chart in charts:
        min(columns, key=lambda c: sum(each.height + AROUND for each in c)).append(chart)
    return [column for column in columns if column]


def _prose(text: str) -> str:
    """Return text as markup; a command in backquotes becomes code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _chart(chart: Chart, number: int) -> str:
    name = f"chart-{number}"
    legend = "".join(
        f'<li><button type="button" aria-pressed="true" aria-controls="{name}" '
        f'data-name="{escape(label)}"><span style="background:{colour}"></span>{escape(label)}'
        "</button></li>"
        for label, colour in chart.legend
    )
    legend = f'<ul class="legend" aria-label="Shown or hidden">{legend}</ul>' if legend else ""
    note = f"<p>{_prose(chart.note)}</p>" if chart.note else ""
    # What ends a script would end this one, also within JSON's strings.
    figure = chart.json().replace("</", "<\\/")
    numbers = _table(Table(heads=chart.heads, rows=chart.rows))
    return f"""<figure>
<figcaption>{escape(chart.title)}</figcaption>
{legend}
<div class="chart" id="{name}" style="height:{chart.height}px" role="img"
 aria-label="{escape(chart.title)}; its numbers are below"></div>
<script type="application/json" id="{name}-figure">{figure}</script>
{note}
<details><summary>Numbers</summary>
{numbers}
</details>
</figure>"""


def _table(table: Table) -> str:
    # A column with a sentence in it: to the left, and it may be broken.
    long = [any(len(row[n]) > LONG for row in table.rows) for n in range(len(table.heads))]
    heads = "".join(
        f'<th scope="col"{_LONG[wide]}>{escape(head)}</th>'
        for head, wide in zip(table.heads, long, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(f"<td{_LONG[w]}>{_cell(c)}</td>" for c, w in zip(row, long, strict=True))
        + "</tr>"
        for row in table.rows
    )
    title = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    kind = "numbers" if table.numbers else "words"
    # Wider than a telephone: it scrolls within itself, and the keyboard reaches it.
    name = escape(table.title or "Table")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">'
        f'<table class="{kind}">{title}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        "</div>"
    )


def _cell(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)


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


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
