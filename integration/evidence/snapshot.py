"""What holds a rung's memory at its peak, from rank 0's allocator history. No torch.

    python -m integration.evidence.snapshot IN.pickle[.gz] [OUT.pickle.gz]

IN is what ``integration ladder --traces`` keeps, or ``torch.cuda.memory._dump_snapshot`` writes.
OUT is the same, smaller and without paths of a machine. Gunzipped, either is for
https://pytorch.org/memory_viz.

[Note: What counts as allocated]
A block is allocated from ``alloc`` to ``free_requested``: there the allocator lowers what
``max_memory_allocated`` reports. If another stream uses it, it is *pending* until
``free_completed`` and serves nobody before. Sizes are those that were asked for; the allocator
rounds them up, so this peak is somewhat below ``max_memory_allocated``.

[Note: What has no stack]
A block from before the first event has none; nor has one that backward allocates from C++, in
autograd's own thread.
"""

import gzip
import pickle
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from integration.evidence.record import unpacked
from integration.ground import terminal
from integration.ground.errors import UserError
from integration.ground.files import replace_all
from integration.ground.units import size

Record = dict[str, Any]  # a snapshot, or an event, a segment, a block or a frame of it
Frame = tuple[str, int, str]  # file, line, function

FRAMES = 8  # kept of a stack, the innermost
PACKAGES = ("torch", "torchtitan", "torchtitan_recipes", "integration")
# Whose frame a block is put down to: what they call does not know what it is for.
OWNERS = (
    "torchtitan/",
    "torchtitan_recipes/",
    "integration/",
    "torch/distributed/fsdp/",
    "torch/optim/",
)
# Between any two frames of a model, and the same for each.
PLUMBING = (
    "torch/_compile.py",
    "torch/_dynamo/",
    "torch/_functorch/",
    "torch/_library/",
    "torch/_ops.py",
    "torch/autograd/function.py",
    "torch/distributed/tensor/_dispatch.py",
    "torch/nn/modules/module.py",
    "torch/overrides.py",
    "torch/utils/_contextlib.py",
)
BEFORE = "(before the first event)"
NO_STACK = "(no Python stack)"

BLOCK_ACTIONS = ("alloc", "free_requested", "free_completed")
EVENT = ("action", "size", "stream", "time_us")
SEGMENT = ("device", "address", "total_size", "stream", "blocks")
BLOCK = ("address", "size", "requested_size", "state")
# What memory_viz reads besides, where it is there.
EVENT_TOO = ("addr", "device_free", "pool_id")
SEGMENT_TOO = ("segment_type", "segment_pool_id", "allocated_size", "active_size", "is_expandable")
TOP_TOO = ("allocator_settings", "stream_names")
PROTOCOL = 4  # of pickle, the newest that memory_viz reads


class Block(NamedTuple):
    """An allocated block and where it comes from; ``stream`` is the handle of its pool's stream."""

    size: int
    stream: int
    place: str


@dataclass(frozen=True, slots=True)
class Holder:
    """What one function holds in the pool of one stream."""

    bytes: int
    count: int
    place: str  # file:function
    stream: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment with the most allocated, as in [Note: What counts as allocated].

    ``pending`` are bytes that were freed by then and wait for another stream. ``seconds`` are since
    the first of ``events``. ``holders`` are sorted, the largest first.
    """

    allocated: int
    pending: int
    seconds: float
    events: int
    holders: tuple[Holder, ...]


def peak(snapshot: Record) -> Peak:
    """Replay the events of the device that has the most of them, up to its peak."""
    trace = snapshot["device_traces"][_device(snapshot)]
    live, pending = _at_begin(snapshot)
    sign = {"alloc": 1, "free_requested": -1}
    changes = (sign.get(event["action"], 0) * event["size"] for event in trace)
    totals = list(accumulate(changes, initial=sum(block.size for block in live.values())))
    allocated = max(totals)
    done = totals.index(allocated)  # events
    for event in trace[:done]:
        if event["action"] == "alloc":
            place = _place(_useful(event.get("frames", ()))) or NO_STACK
            live[event["addr"]] = Block(event["size"], event["stream"], place)
        elif event["action"] == "free_requested":
            pending[event["addr"]] = live.pop(event["addr"])
        elif event["action"] == "free_completed":
            pending.pop(event["addr"])
    return Peak(
        allocated=allocated,
        pending=sum(block.size for block in pending.values()),
        seconds=(trace[max(done - 1, 0)]["time_us"] - trace[0]["time_us"]) / 1e6,
        events=len(trace),
        holders=_holders(live.values(), snapshot.get("stream_names", {0: "default stream"})),
    )


def _device(snapshot: Record) -> int:
    traces = snapshot["device_traces"]
    return max(range(len(traces)), key=lambda device: len(traces[device]))


def _at_begin(snapshot: Record) -> tuple[dict[int, Block], dict[int, Block]]:
    """Return what was allocated and what pending before the first event, by address.

    That is what is so at the end, in the segments, with the events undone.
    """
    device = _device(snapshot)
    live, pending = {}, {}
    found = {"active_allocated": live, "active_pending_free": pending}
    for segment in snapshot["segments"]:
        for block in segment["blocks"] if segment["device"] == device else ():
            if (kind := found.get(block["state"])) is not None:
                place = _place(_useful(block.get("frames", ()))) or BEFORE
                kind[block["address"]] = Block(block["requested_size"], segment["stream"], place)
    for event in reversed(snapshot["device_traces"][device]):
        if event["action"] == "alloc":
            live.pop(event["addr"], None)
        elif event["action"] == "free_requested":
            pending.pop(event["addr"], None)
            # The stack of this event may be where it was freed.
            live[event["addr"]] = Block(event["size"], event["stream"], BEFORE)
        elif event["action"] == "free_completed":
            pending[event["addr"]] = Block(event["size"], event["stream"], BEFORE)
    return live, pending


def _holders(blocks: Iterable[Block], names: Mapping[int, str]) -> tuple[Holder, ...]:
    sizes: Counter[tuple[str, int]] = Counter()
    counts: Counter[tuple[str, int]] = Counter()
    for block in blocks:
        sizes[block.place, block.stream] += block.size
        counts[block.place, block.stream] += 1
    return tuple(
        Holder(total, counts[key], key[0], names.get(key[1], f"stream {key[1]:#x}"))
        for key, total in sizes.most_common()
    )


def _useful(frames: Iterable[Record]) -> tuple[Frame, ...]:
    """Return the innermost frames that say something; one of ``OWNERS`` is always among them."""
    named = [(relative(f["filename"]), f["line"], f["name"]) for f in frames]
    telling = [f for f in named if not f[0].startswith(PLUMBING)] or named[:1]
    owner = [f for f in telling if f[0].startswith(OWNERS)][:1]
    kept = telling[:FRAMES]
    return (*kept, *(f for f in owner if f not in kept))


def _place(frames: tuple[Frame, ...]) -> str:
    owned = [f for f in frames if f[0].startswith(OWNERS)]
    return next((f"{file}:{function}" for file, _, function in (*owned, *frames)), "")


@cache
def relative(file: str) -> str:
    """Return ``file`` as its package has it, or its name alone.

    >>> relative("/tmp/overlay/torchtitan/trainer.py"), relative("/usr/lib/python3/ast.py")
    ('torchtitan/trainer.py', 'ast.py')
    """
    if not file.startswith("/"):
        return file
    parts = file.split("/")
    for at in reversed(range(len(parts) - 1)):
        if parts[at] in PACKAGES:
            return "/".join(parts[at:])
        if parts[at] == "site-packages":
            return "/".join(parts[at + 1 :])
    return parts[-1]


def trim(snapshot: Record) -> Record:
    """Return what memory_viz needs of the device that has the most events, with short stacks."""
    device = _device(snapshot)
    trace = snapshot["device_traces"][device]
    start = trace[0]["time_us"]
    traces: list[list[Record]] = [[] for _ in snapshot["device_traces"]]
    for event in trace:
        slim = _only(event, (*EVENT, *EVENT_TOO, "frames"))
        traces[device].append({**slim, "time_us": event["time_us"] - start})
    segments = []
    for segment in snapshot["segments"]:
        if segment["device"] == device:
            blocks = [_only(block, (*BLOCK, "frames")) for block in segment["blocks"]]
            slim = _only(segment, (*SEGMENT, *SEGMENT_TOO, "frames"))
            segments.append({**slim, "blocks": blocks})
    return {"device_traces": traces, "segments": segments, **_only(snapshot, TOP_TOO)}


def _only(record: Record, keys: Iterable[str]) -> Record:
    """Return ``record`` with these of its keys, its words and stacks interned."""
    slim = {key: record[key] for key in keys if key in record}
    if "frames" in slim:
        slim["frames"] = _stack(_useful(slim["frames"]))
    return {k: sys.intern(v) if isinstance(v, str) else v for k, v in slim.items()}


# Equal ones are one object, so that pickle's memo stores each once.
@cache
def _stack(frames: tuple[Frame, ...]) -> list[Record]:
    return [_frame(*frame) for frame in frames]


@cache
def _frame(file: str, line: int, function: str) -> Record:
    return {"filename": sys.intern(file), "line": line, "name": sys.intern(function)}


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles dicts, lists, tuples, strings and numbers, and a snapshot has nothing else.

    A pickle runs code through the globals that it names; here none is looked up.
    """

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(
            f"{module_name}.{global_name}, which is not loaded: a snapshot is plain data"
        )


def packed(snapshot: Record) -> bytes:
    """Return the file's bytes: the same for the same snapshot."""
    return gzip.compress(pickle.dumps(snapshot, protocol=PROTOCOL), mtime=0)


def read(file: Path) -> Record:
    """Return a snapshot, compressed or not.

    Raises:
        UserError: it is none, or has no events.
    """
    try:
        snapshot = _PlainUnpickler(BytesIO(unpacked(file))).load()
        events = [event for trace in snapshot["device_traces"] for event in trace]
        _require(EVENT, events)
        _require(("addr",), (e for e in events if e["action"] in BLOCK_ACTIONS))
        _require(SEGMENT, snapshot["segments"])
        _require(BLOCK, (b for segment in snapshot["segments"] for b in segment["blocks"]))
    except Exception as error:  # a broken pickle may raise any
        raise UserError(
            f"expected an allocator snapshot, as torch.cuda.memory._dump_snapshot writes it, in "
            f"{file}, found: {error!r}; nothing was written"
        ) from None
    if not events:
        raise UserError(
            f"expected allocator events in {file}, found none; record them before what they are of "
            f"with torch.cuda.memory._record_memory_history, or take integration ladder --traces"
        )
    return snapshot


def _require(keys: Iterable[str], records: Iterable[Record]) -> None:
    for record in records:
        if missing := [key for key in keys if key not in record]:
            raise ValueError(f"{', '.join(missing)} missing from {sorted(record)}")


def show(found: Peak, console: Console, rows: int) -> None:
    """Print the peak and its largest ``rows`` holders."""
    pending = f", {size(found.pending)} pending" if found.pending else ""
    table = Table(
        title=f"{size(found.allocated)} allocated{pending}, {found.seconds:.3f} s into the "
        f"recording of {found.events:,} events",
        title_justify="left",
    )
    for name in ("size", "share", "blocks"):
        table.add_column(name, justify="right")
    table.add_column("stream")
    table.add_column("from", overflow="fold")
    rest = found.holders[rows:]
    other = Holder(sum(h.bytes for h in rest), sum(h.count for h in rest), "(others)", "")
    for holder in (*found.holders[:rows], *([other] if rest else ())):
        share = f"{holder.bytes / found.allocated:.1%}"
        table.add_row(size(holder.bytes), share, f"{holder.count:,}", holder.stream, holder.place)
    console.print(table)


def main(source: Positional[Path], target: Positional[Path | None] = None, rows: int = 30) -> None:
    """Show what is allocated at the peak, and trim the snapshot.

    Args:
        source: A pickled allocator snapshot.
        target: The file to write the trimmed snapshot to, NAME.pickle.gz.
        rows: The lines of the table.
    """
    snapshot = read(source)
    console = terminal.console(180)
    show(peak(snapshot), console, rows)
    if target is None:
        return
    data = packed(trim(snapshot))
    replace_all(target.parent, {target.name: data})
    print(f"{target}: {len(data) / 1e3:,.0f} kB; gunzip it for https://pytorch.org/memory_viz")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
