"""Charts as values: rows of bars, and lines. ``page`` draws them in HTML, ``picture`` in SVG."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# After Okabe and Ito, and between them; each can be told from its neighbours, and is readable on
# white and on black.
COLOURS = (
    "#2f7fc1", "#e08e0b", "#1a9e77", "#c46aa0", "#d5531f", "#7a74c9", "#6f8f3a", "#8a8a8a",
    "#00a5b5", "#b58900", "#a23b52", "#4c5fd7", "#946b4d", "#d98ba5", "#3f7f5f", "#b06fe0",
)  # fmt: skip
FAINT = "73"  # opacity 0.45


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row: its parts side by side, or one value with the range that it varied in.

    A row of a label alone is the heading of those below it.
    """

    label: str
    parts: Mapping[str, float] = field(default_factory=dict)
    text: str = ""  # what stands at the right
    note: str = ""  # instead of a bar: why there is none
    spread: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars on one scale, stacked where they have several parts.

    ``form`` turns a value into text with its unit; ``limit`` is name and value of a line across
    the first bar; parts in ``faint`` have the colour of the part before them, paler.
    """

    title: str
    bars: Sequence[Bar]
    form: Callable[[float], str]
    limit: tuple[str, float] | None = None
    faint: Sequence[str] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if not self.bars:
            raise ValueError(f"Bars.bars of `{self.title}` must not be empty")
        if (count := len(self.names) - len(self.faint)) > len(COLOURS):
            raise ValueError(
                f"Bars.bars of `{self.title}` must have at most {len(COLOURS)} kinds of parts, "
                f"each with a colour of its own, got {count}"
            )

    @property
    def names(self) -> list[str]:
        """The kinds of parts, in the order in which they come."""
        return list(dict.fromkeys(name for row in self.bars for name in row.parts))

    @property
    def colours(self) -> dict[str, str]:
        """Return the colour of each kind of part."""
        found: dict[str, str] = {}
        strong: list[str] = []
        for name in self.names:
            if name in self.faint:
                found[name] = f"{strong[-1] if strong else COLOURS[0]}{FAINT}"
            else:
                strong.append(COLOURS[len(strong)])
                found[name] = strong[-1]
        return found

    @property
    def legend(self) -> dict[str, str]:
        """Return the colours, or nothing where each row is one part: its label names its colour."""
        parts = sum(len(row.parts) for row in self.bars[1:])
        return self.colours if len(self.names) > 1 and parts >= len(self.bars) else {}

    @property
    def most(self) -> float:
        """Return the value that is as long as the scale."""
        ends = [sum(row.parts.values()) for row in self.bars]
        ends += [row.spread[1] for row in self.bars if row.spread]
        return max(*ends, self.limit[1] if self.limit else 0.0, 0.0) or 1.0

    @property
    def caption(self) -> str:
        """Return the note, with what the dotted line is."""
        limit = f"Dotted: {self.limit[0]}, {self.form(self.limit[1])}." if self.limit else ""
        return " ".join(filter(None, [self.note, limit]))

    @property
    def heads(self) -> tuple[str, ...]:
        return ("", *self.names, *(["all"] * (len(self.names) > 1)))

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Return all numbers as text, for readers who do not see the bars."""
        return tuple(self._numbers(row) for row in self.bars)

    def _numbers(self, row: Bar) -> tuple[str, ...]:
        cells = [self.form(row.parts[n]) if n in row.parts else "" for n in self.names]
        total = self.form(sum(row.parts.values())) if row.parts else ""
        if row.note and cells:
            cells[0] = row.note
        return (row.label, *cells, *([total] if len(self.names) > 1 else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """One line a series, ``name: (xs, ys)``."""

    title: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    x: str
    y: str
    note: str = ""

    def __post_init__(self) -> None:
        if not self.series or not all(xs for xs, _ in self.series.values()):
            raise ValueError(f"Lines.series of `{self.title}` must not be empty")

    @property
    def legend(self) -> dict[str, str]:
        """Return the colour of each series; with more than there are colours they come again."""
        return {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(self.series)}

    @property
    def caption(self) -> str:
        return self.note

    @property
    def heads(self) -> tuple[str, ...]:
        return ("", "steps", "first", "last")

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (name, f"{len(xs)}", f"{ys[0]:.4f}", f"{ys[-1]:.4f}")
            for name, (xs, ys) in self.series.items()
        )


Chart = Bars | Lines
