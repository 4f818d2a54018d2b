"""The charts of the report and of the plan, drawn by plotly in one style.

[Note: Labels stand above bars]
Beside a bar, a contribution's name takes most of a telephone's width. So a row has its label above
its bar, left, and its figure above it, right; the bar has the whole width on any screen.

Colours of text, grid and background are the page's, set by its script, so that a change between
light and dark redraws them. Colours of bars and lines serve both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# After Okabe and Ito, which colour-blind readers can tell apart; each readable on white and black.
COLOURS = ("#2f7fc1", "#e08e0b", "#1a9e77", "#c46aa0", "#d5531f", "#7a74c9", "#6f8f3a", "#8a8a8a")
ROW = 38  # pixels a row of bars: its label, and the bar
BAR = 0.42  # of them
MARGIN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One drawing: plotly's figure, its legend, and its numbers for readers who do not see it."""

    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int  # pixels
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    legend: tuple[tuple[str, str], ...] = ()  # name, colour; a name is that of its traces
    note: str = ""

    def __post_init__(self) -> None:
        if not self.data or not self.rows:
            raise ValueError(f"Chart.data and Chart.rows of `{self.title}` must not be empty")

    def json(self) -> str:
        """Return the figure as plotly.js reads it; an attribute that plotly does not have fails."""
        import plotly.graph_objects as go

        figure = go.Figure(self.data, self.layout | {"height": self.height, "template": None})
        return str(figure.to_json())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row: its parts side by side, or one value with the range that it varied in."""

    label: str
    parts: Mapping[str, float] = field(default_factory=dict)
    text: str = ""  # what stands at the right
    note: str = ""  # instead of a bar: why there is none
    spread: tuple[float, float] | None = None


def bars(
    title: str,
    rows: Sequence[Bar],
    form: Callable[[float], str],
    *,
    limit: tuple[str, float] | None = None,
    faint: Sequence[str] = (),
    note: str = "",
) -> Chart:
    """Return horizontal bars, stacked where they have several parts.

    Args:
        form: turns a value into text, with its unit.
        limit: name and value of a line across the first bar.
        faint: parts in the colour of the part before them, paler.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.parts))
    colours = _colours(names, faint)
    data = [_bar_trace(name, rows, form, colours[name]) for name in names]
    if data and any(row.spread for row in rows):
        data[0]["error_x"] = _whiskers(rows, names[0])
    most = max(
        *(sum(row.parts.values()) for row in rows),
        *(row.spread[1] for row in rows if row.spread),
        limit[1] if limit else 0,
    )
    layout = _layout(most * 1.01 or 1.0, len(rows))
    layout["annotations"] = [a for y, row in enumerate(rows) for a in _labels(y, row)]
    if limit:
        line = {"type": "line", "x0": limit[1], "x1": limit[1], "y0": -BAR * 0.6, "y1": BAR * 0.6}
        layout["shapes"] = [line | {"line": {"width": 2, "dash": "dot"}}]
        note = " ".join(filter(None, [note, f"Dotted: {limit[0]}, {form(limit[1])}."]))
    several = len(names) > 1
    return Chart(
        title=title,
        data=data,
        layout=layout,
        height=len(rows) * ROW + 2 * MARGIN,
        heads=("", *names, *(["all"] * several)),
        rows=tuple(_numbers(row, names, form) for row in rows),
        # Where each row is one part, its label names its colour.
        legend=tuple(colours.items())
        if several and sum(len(r.parts) for r in rows[1:]) >= len(rows)
        else (),
        note=note,
    )


def _colours(names: Sequence[str], faint: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        strong = [colour for colour in found.values() if len(colour) == 7]
        found[name] = (
            f"{strong[-1] if strong else COLOURS[0]}73"  # opacity 0.45
            if name in faint
            else COLOURS[len(strong) % len(COLOURS)]
        )
    return found


def _bar_trace(
    name: str, rows: Sequence[Bar], form: Callable[[float], str], colour: str
) -> dict[str, Any]:
    values = [row.parts.get(name) for row in rows]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": values,
        "y": list(range(len(rows))),
        "width": BAR,
        "hoverinfo": "text",
        "hovertext": [
            "" if value is None else f"{row.label}<br>{name}: {form(value)}"
            for row, value in zip(rows, values, strict=True)
        ],
        "marker": {"color": colour, "line": {"width": 0}},
        "showlegend": False,
    }


def _numbers(row: Bar, names: Sequence[str], form: Callable[[float], str]) -> tuple[str, ...]:
    cells = [form(row.parts[name]) if name in row.parts else "" for name in names]
    total = form(sum(row.parts.values())) if row.parts else ""
    if row.note:
        cells[0] = row.note
    return (row.label, *cells, *([total] if len(names) > 1 else []))


def lines(
    title: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    note: str = "",
) -> Chart:
    """Return one line a series ``name: (xs, ys)``."""
    data: list[dict[str, Any]] = []
    legend = []
    for index, (name, (xs, ys)) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        dash = ("solid", "dash", "dot")[index // len(COLOURS) % 3]
        data.append(
            {
                "type": "scatter",
                "name": name,
                "x": list(xs),
                "y": list(ys),
                "line": {"color": colour, "width": 2, "dash": dash},
                "mode": "lines" if len(xs) > 60 else "lines+markers",
                "marker": {"size": 5},
                "hovertemplate": f"{name}<br>{x} %{{x}}: %{{y:.6g}}<extra></extra>",
                "showlegend": False,
            }
        )
        legend.append((name, colour))
    return Chart(
        title=title,
        data=data,
        layout={
            "margin": {"l": 56, "r": 8, "t": 8, "b": 44},
            "xaxis": {"title": {"text": x}, "zeroline": False},
            "yaxis": {"title": {"text": y}, "zeroline": False},
            "hovermode": "closest",
        },
        height=360,
        heads=("", "steps", "first", "last"),
        rows=tuple(
            (name, f"{len(xs)}", f"{ys[0]:.4f}", f"{ys[-1]:.4f}")
            for name, (xs, ys) in series.items()
        ),
        legend=tuple(legend),
        note=note,
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran from ``begin`` for ``length`` seconds on a row."""

    row: str
    kind: str
    begin: float
    length: float
    words: str


def timeline(
    title: str, spans: Sequence[Span], seconds: float, colours: Mapping[str, str], *, note: str = ""
) -> Chart:
    """Return rows of what ran when, ``seconds`` wide, in milliseconds."""
    names = list(dict.fromkeys(span.row for span in spans))
    place = {name: index for index, name in enumerate(names)}
    data = []
    for kind in colours:
        mine = [span for span in spans if span.kind == kind]
        if mine:
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": kind,
                    "base": [round(span.begin * 1e3, 4) for span in mine],
                    "x": [round(span.length * 1e3, 4) for span in mine],
                    "y": [place[span.row] for span in mine],
                    "width": BAR,
                    "hoverinfo": "text",
                    "hovertext": [f"{s.words}<br>{s.length * 1e3:.3f} ms" for s in mine],
                    "marker": {"color": colours[kind], "line": {"width": 0}},
                    "showlegend": False,
                }
            )
    layout = _layout(seconds * 1e3, len(names)) | {"barmode": "overlay"}
    layout["xaxis"] |= {"showticklabels": True, "showgrid": True, "fixedrange": False}
    layout["xaxis"]["title"] = {"text": "ms"}
    layout["margin"] |= {"b": 44}
    busy = {
        (name, kind): sum(s.length for s in spans if s.row == name and s.kind == kind)
        for name in names
        for kind in colours
    }
    layout["annotations"] = [_label(y, name) for name, y in place.items()]
    present = [kind for kind in colours if any(busy[name, kind] for name in names)]
    return Chart(
        title=title,
        data=data,
        layout=layout,
        height=len(names) * ROW + MARGIN + 44,
        heads=("busy, ms", *present),
        rows=tuple(
            (name, *(f"{busy[name, kind] * 1e3:.2f}" for kind in present)) for name in names
        ),
        legend=tuple((kind, colours[kind]) for kind in present),
        note=note,
    )


def _layout(most: float, rows: int) -> dict[str, Any]:
    still = {"zeroline": False, "showgrid": False, "showline": False, "fixedrange": True}
    return {
        "barmode": "stack",
        "margin": {"l": 0, "r": 0, "t": MARGIN, "b": MARGIN},
        "xaxis": still | {"range": [0, most], "showticklabels": False},
        # Downwards; half a row above the first for its label.
        "yaxis": still | {"range": [rows - 0.65, -0.65], "visible": False},
        "hovermode": "closest",
    }


def _labels(y: int, row: Bar) -> list[dict[str, Any]]:
    """Return label and figure above the bar, and what stands instead of one."""
    if not row.parts and not row.note:  # the heading of the rows below
        return [_label(y, f"<b>{row.label}</b>") | {"yshift": 14}]
    found = [_label(y, row.label)]
    if row.text:
        right = {"x": 1, "xanchor": "right", "align": "right", "xshift": 0}
        found.append(_label(y, row.text) | right)
    if row.note:
        # The page's script cuts it to the chart's width, and shows it whole to a pointer.
        found.append(_label(y, row.note) | {"yshift": 0, "name": "note"})
    return found


def _label(y: int, text: str) -> dict[str, Any]:
    left = {"xref": "paper", "x": 0, "xanchor": "left", "align": "left", "xshift": -2}
    return {"text": text, "yref": "y", "y": y, "yshift": 16, "showarrow": False, **left}


def _whiskers(rows: Sequence[Bar], name: str) -> dict[str, Any]:
    pairs = [(row.spread, row.parts.get(name, 0.0)) for row in rows]
    return {
        "type": "data",
        "symmetric": False,
        "thickness": 1.5,
        "width": 4,
        "array": [spread[1] - value if spread else None for spread, value in pairs],
        "arrayminus": [value - spread[0] if spread else None for spread, value in pairs],
    }
