"""The one table of a benchmark, whatever the shape of its JSON."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from integration.evidence.effect import FORMS


def table(results: Any, columns: Mapping[str, str]) -> Table:
    """Return a row for each object in ``results`` that has one of ``columns``."""
    found = list(rows(results, tuple(columns)))
    # What all rows share says nothing.
    shared = set.intersection(*(set(path) for path, _ in found)) if found else set()
    used = [c for c in columns if any(c in figures for _, figures in found)]
    shown = Table("")
    for column in used:
        shown.add_column(column, justify="right")
    for path, figures in found:
        label = " · ".join(part for part in path if part not in shared) or "measured"
        cells = (figures.get(column) for column in used)
        shown.add_row(
            label,
            *(
                "" if value is None else FORMS[columns[column]](value)
                for column, value in zip(used, cells, strict=True)
            ),
        )
    return shown


def rows(node: Any, columns: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, float]]]:
    """Yield ``(where it stands, its figures)`` for each object that has one of ``columns``.

    A column may also be an object of its own, ``{"seconds": {"ours": 1.0, "theirs": 2.0}}``: then
    each of its entries is a row.
    """
    if isinstance(node, list):
        for item in node:
            for path, figures in rows(item, columns):
                yield (_title(item), *path), figures
    elif isinstance(node, dict):
        figures = {c: node[c] for c in columns if _is_number(node.get(c))}
        if figures:
            yield (), figures
        for key, value in node.items():
            if key in columns and isinstance(value, dict):
                for name, single in value.items():
                    if _is_number(single):
                        yield (name,), {key: single}
            else:
                for path, inner in rows(value, columns):
                    yield (key, *path), inner


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _title(item: Any) -> str:
    """Name an item of a list by its whole numbers: ``8 x 1792 x 6144``."""
    values = item.values() if isinstance(item, dict) else ()
    return " x ".join(str(v) for v in values if isinstance(v, int) and not isinstance(v, bool))
