"""The ladder as a table on the terminal, with the published one below it. No torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from integration.ground.units import gib
from integration.ladder.result import DECLARED, DIFFER, PUBLISHED, PUBLISHED_WHERE, Ladder, Row
from integration.ladder.rungs import Rung

LABEL_WIDTH = 34


def show(ladder: Ladder, wanted: Sequence[Rung], console: Console) -> None:
    """Print the rows of ``wanted``, pools, reasons, notes and the published ladder."""
    console.print(_rows(ladder, wanted))
    for line in _reasons(ladder, wanted):
        console.print(line, markup=False, highlight=False)
    pools = _pools(ladder, wanted)
    if pools.row_count:
        console.print(pools)
    console.print(_notes(ladder), highlight=False)
    console.print(_published(), f"{PUBLISHED_WHERE}.", highlight=False)


def outcome(row: Row) -> str:
    """Return a row in one line, for the progress."""
    if row.status != "ok":
        return f"cannot run: {row.reason}"
    rate, step = row.median["tokens_s_gpu"], row.median["step_s"]
    return f"{rate:,.0f} tokens/s a GPU, {step:.3f} s a step, numbers: {row.numbers}"


# Heading -> what a row that ran shows below it. A column in which all are empty is left out.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "tokens/s/GPU": lambda row: f"{row.median['tokens_s_gpu']:,.0f}",
    "step": lambda row: _seconds(row.median["step_s"]),
    "MFU": lambda row: f"{mfu:.1%}" if (mfu := row.median.get("mfu")) else "",
    "min-max": lambda row: "-".join(map(_seconds, row.spread["step_s"])),
    "forward": lambda row: _seconds(row.median["forward_s"]),
    "backward": lambda row: _seconds(row.median["backward_s"]),
    "optimizer": lambda row: _seconds(row.median["optimizer_s"]),
    "exposed comm.": lambda row: _seconds(row.median["exposed_communication_s"]),
    "exposed copies": lambda row: _seconds(row.median["exposed_copies_s"]),
    "start": lambda row: f"{row.median['start_s']:.1f}",
    "peak alloc.": lambda row: _gib(row.most("peak_allocated")),
    "reserved": lambda row: _gib(row.most("peak_reserved")),
    "retries": lambda row: "" if (tries := row.most("alloc_retries")) is None else str(tries),
    "host": lambda row: _gib(row.most("peak_host")),
    "numbers": lambda row: row.numbers.partition(":")[0],
}


def _rows(ladder: Ladder, wanted: Sequence[Rung]) -> Table:
    rows = [ladder.row(rung) for rung in wanted]
    cells = {
        name: [cell(row) if row.status == "ok" else "" for row in rows]
        for name, cell in COLUMNS.items()
    }
    cells["numbers"] = [
        text or {"failed": "cannot run", "open": "not yet"}[row.status]
        for text, row in zip(cells["numbers"], rows, strict=True)
    ]
    shown = {name: column for name, column in cells.items() if any(column)}
    title = f"{ladder.config} on {ladder.ranks} rank(s)"
    if ladder.tokens_a_step:  # a rung has run
        title += f", {ladder.tokens_a_step:,} tokens a step"
    table = Table(title=title, title_justify="left")
    table.add_column("rung", min_width=LABEL_WIDTH, overflow="fold")
    for name in shown:
        table.add_column(name, justify="left" if name == "numbers" else "right")
    for at, row in enumerate(rows):
        label = row.label + "".join(f"\n - {name}" for name in row.also_removed)
        style = "red" if row.numbers == DIFFER else None
        table.add_row(label, *(column[at] for column in shown.values()), style=style)
    return table


def _reasons(ladder: Ladder, wanted: Sequence[Rung]) -> Iterator[str]:
    """Yield what the cells have no room for."""
    for row in map(ladder.row, wanted):
        if row.reason:
            yield f"{row.label}: {'cannot run' if row.status == 'failed' else 'ran'}; {row.reason}"
        if row.numbers.startswith(DECLARED) or row.numbers == DIFFER:
            yield f"{row.label}: {row.numbers} (against {row.compared_with}: {row.difference})"


def _pools(ladder: Ladder, wanted: Sequence[Rung]) -> Table:
    """Return one row a rung and a column a stream, for the rungs that have pools."""
    last = {rung.label: row.runs[-1]["pools"] for rung in wanted if (row := ladder.row(rung)).runs}
    streams = list(dict.fromkeys(stream for pools in last.values() for stream in pools))
    table = Table(title="GiB held by each stream's pool: live + cached", title_justify="left")
    table.add_column("rung", overflow="fold")
    for stream in streams:
        table.add_column(stream, justify="right")
    for label, pools in last.items():
        if pools:
            table.add_row(label, *(_pool(pools.get(stream)) for stream in streams))
    return table


def _pool(held: Mapping[str, int] | None) -> str:
    return f"{_gib(held['live'])} + {_gib(held['cached'])}" if held else ""


def _notes(ladder: Ladder) -> str:
    steps = f"{ladder.rounds} run(s) of {ladder.steps} steps after {ladder.warmup} to warm up"
    return (
        f"Medians of {steps}, times in seconds, of the slowest rank; memory in GiB, the most of a "
        "rank. backward holds the output head and the loss, whose chunks run both ways; start is "
        "from launch to the first step. The last one added makes the full set. numbers: losses "
        "and gradient norms of all steps, bit by bit; an added contribution against the rung "
        "before, one left out against the full set."
    )


def _published() -> Table:
    table = Table("published ladder", "tokens/s a GPU", title_justify="left")
    for label, (low, high) in PUBLISHED.items():
        table.add_row(label, f"{low:,}" if low == high else f"{low:,} to {high:,}")
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _gib(value: int | None) -> str:
    return "" if value is None else gib(value)
