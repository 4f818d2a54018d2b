"""The table at the end of a run, read from TorchTitan's own TensorBoard files."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import cast

from rich.table import Table

from integration.ground import terminal
from integration.train.run import Run

LOSS = "loss_metrics/global_avg_loss"
GRAD_NORM = "grad_norm"
TOKENS_A_SECOND = "throughput(tps)"  # a device
SECONDS_A_STEP = "time_metrics/end_to_end(s)"


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """Return step -> value of ``tag`` over all event files below ``folder``; later files win.

    TensorBoard keeps float32, in which TorchTitan computes loss and gradient norm: nothing is lost.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: dict[int, tuple[float, float]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        if tag not in cast(list[str], events.Tags()["scalars"]):
            continue
        for event in events.Scalars(tag):
            known = values.get(event.step)
            if known is None or event.wall_time >= known[0]:
                values[event.step] = (event.wall_time, event.value)
    return {step: value for step, (_, value) in sorted(values.items())}


def show(run: Run, *, first_step: int, ranks: int, contributions: Sequence[str]) -> None:
    """Print the table for the steps from ``first_step`` on; a run that has ended fails no more."""
    try:
        table = _table(run, first_step=first_step, ranks=ranks, contributions=contributions)
        # A log file has no width of its own; what is there to be copied must not be folded.
        terminal.console(160).print(table)
    except Exception as error:
        terminal.say(f"the table of {run.folder} cannot be shown: {error!r}", error=True)


def _table(run: Run, *, first_step: int, ranks: int, contributions: Sequence[str]) -> Table:
    tb = run.folder / "tb"
    losses = {s: v for s, v in scalars(tb, LOSS).items() if s >= first_step}
    end = run.end()
    table = Table(show_header=False, title=str(run.folder), title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # paths stay whole, to be copied
    if losses:
        steps = list(losses)
        # The first step includes start-up work, so rates are medians of the later ones.
        later = steps[1:] or steps
        rate = scalars(tb, TOKENS_A_SECOND)
        seconds = scalars(tb, SECONDS_A_STEP)
        table.add_row("first loss", f"{losses[steps[0]]:.4f} (step {steps[0]})")
        table.add_row("last loss", f"{losses[steps[-1]]:.4f} (step {steps[-1]})")
        table.add_row("tokens/s", f"{ranks * median(rate[s] for s in later):,.0f}")
        table.add_row("seconds a step", f"{median(seconds[s] for s in later):.3f}")
    else:
        table.add_row("steps", "none: the run was already at its last step")
    if end is not None:
        peaks = [peak / 2**30 for peak in end["peak_host_bytes"]]
        table.add_row(
            "peak host memory", f"{max(peaks):.2f} GiB a rank, {sum(peaks):.2f} GiB in all"
        )
    table.add_row("contributions", ", ".join(contributions) or "none (pristine)")
    checkpoints = run.checkpoints()
    table.add_row("checkpoint", str(run.checkpoint(checkpoints[-1])) if checkpoints else "none")
    table.add_row("TensorBoard", str(tb))
    return table
