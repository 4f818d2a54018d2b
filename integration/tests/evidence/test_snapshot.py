"""What is allocated at the peak, from a history small enough to replay by hand; and its trimming.

The allocator's own snapshots need a GPU; these have their keys, as of torch 2.14.
"""

import gzip
import pickle
import pickletools
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.evidence import snapshot
from integration.evidence.snapshot import Holder, Peak
from integration.ground.errors import UserError
from integration.ground.paths import REPO

SIDE = 94_000_000_000_000  # a stream's handle, which is a pointer
SITE = "/tmp/.venv/lib/python3.11/site-packages"
OVERLAY = "/tmp/cache/overlay/1f2e"
COLLECTIVES = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
# The opcodes of unpickleData in torch/utils/viz/MemoryViz.js.
KNOWN = """
APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST
EMPTY_TUPLE FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO
SETITEM SETITEMS SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3
"""

Stack = list[dict[str, Any]]


def _frame(file: str, name: str, line: int = 1) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


MOE: Stack = [
    _frame(f"{SITE}/torch/nn/functional.py", "linear", 9),
    _frame(f"{SITE}/torch/nn/modules/module.py", "_call_impl"),
    _frame(f"{OVERLAY}/torchtitan/models/moe.py", "forward", 31),
    _frame(f"{OVERLAY}/torchtitan/trainer.py", "train_step"),
    _frame("/usr/lib/python3.11/runpy.py", "_run_code"),
]
GATHER: Stack = [
    _frame(f"{SITE}/torch/_ops.py", "__call__"),
    _frame(f"{OVERLAY}/{COLLECTIVES}", "all_gather"),
    *MOE[2:],
]
NOBODY: Stack = [
    _frame("/tmp/torchinductor_me/ab/cab.py", "call"),
    _frame("/usr/lib/python3.11/threading.py", "run"),
]


def _event(action: str, addr: int, size: int, time: int, **more: Any) -> dict[str, Any]:
    event = {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 5_000_000 + time}
    return {**event, "compile_context": "N/A", "user_metadata": "", **more}


def _block(address: int, size: int, state: str, frames: Stack | None = None) -> dict[str, Any]:
    block = {"address": address, "size": -(-size // 512) * 512, "requested_size": size}
    return {**block, "state": state, "frames": frames or []}


def _segment(stream: int, *blocks: dict[str, Any]) -> dict[str, Any]:
    total = sum(block["size"] for block in blocks)
    return {
        "device": 1,
        "address": blocks[0]["address"],
        "total_size": total,
        "stream": stream,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": MOE,
        "blocks": list(blocks),
    }


def made_snapshot() -> dict[str, Any]:
    """Return a history on the second of two devices.

    Allocated are 1000 before it, then 1700, 2300, 2200, 1600, 1800, 2900, 2950, 3000, 2950, 2250
    and 2550.
    """
    trace = [
        _event("segment_alloc", 4096, 8192, 0, frames=MOE),
        _event("alloc", 4096, 700, 1, frames=MOE),
        _event("alloc", 9000, 600, 2, frames=GATHER, stream=SIDE),
        # Was there before, and is freed by this stack, which did not allocate it.
        _event("free_requested", 100, 100, 3, frames=MOE),
        _event("free_completed", 100, 100, 3, frames=MOE),
        # Another stream still reads what was gathered.
        _event("free_requested", 9000, 600, 4, frames=GATHER, stream=SIDE),
        _event("alloc", 30_000, 200, 4, frames=GATHER, stream=SIDE),
        _event("alloc", 5000, 1100, 5),
        _event("alloc", 7000, 50, 6, frames=NOBODY),
        _event("alloc", 7100, 50, 500_000, frames=MOE, stream=SIDE),
        _event("free_requested", 7100, 50, 500_001, stream=SIDE),
        _event("free_completed", 7100, 50, 500_001, stream=SIDE),
        _event("free_completed", 9000, 600, 500_002, frames=GATHER, stream=SIDE),
        # Freed before the history began.
        _event("free_completed", 60_000, 40, 500_003, stream=SIDE),
        _event("free_requested", 4096, 700, 500_004, frames=MOE),
        _event("free_completed", 4096, 700, 500_004, frames=MOE),
        # The same address again.
        _event("alloc", 4096, 300, 500_005, frames=GATHER, stream=SIDE),
        {"action": "oom", "device_free": 7, "size": 9, "stream": 0, "time_us": 5_500_006},
    ]
    segments = [
        _segment(0, _block(5000, 1100, "active_allocated"), _block(7000, 50, "active_allocated")),
        _segment(0, _block(20_000, 900, "active_allocated"), _block(21_024, 500, "inactive")),
        _segment(SIDE, _block(30_000, 200, "active_allocated", GATHER)),
        _segment(SIDE, _block(4096, 300, "active_allocated", GATHER)),
        _segment(SIDE, _block(61_000, 8, "active_pending_free")),
        {**_segment(0, _block(20_000, 10**9, "active_allocated")), "device": 0},
    ]
    return {
        "device_traces": [[], trace],
        "segments": segments,
        "allocator_settings": {"max_split_size": -1},
        "external_annotations": [{"file": "/tmp/annotated"}],
        "stream_names": {0: "default stream", SIDE: "all-gather stream"},
    }


def _step(events: int) -> tuple[dict[str, Any], int]:
    """Return the history of a step on two streams, and the most that was allocated meanwhile."""
    rng = random.Random(0)
    files = [f"{SITE}/torch/nn/file_{n}.py" for n in range(20)]
    files += [f"{OVERLAY}/torchtitan/models/file_{n}.py" for n in range(20)]
    frames = [_frame(rng.choice(files), f"f{n}", rng.randrange(999)) for n in range(2000)]
    stacks = [rng.choices(frames, k=40) for _ in range(400)]
    # Address -> size and stream; the weights, which stay, are there before.
    live = {2**46 + 2**21 * n: (rng.randrange(1, 2**21), 0) for n in range(500)}
    allocated = most = sum(size for size, _ in live.values())
    weights, pending, trace, time = set(live), [], [], 0
    while len(trace) < events:
        time += rng.randrange(40)
        freed = rng.choice(list(live)) if rng.random() < 0.4 else None
        if freed is not None and freed not in weights:
            size, stream = live.pop(freed)
            allocated -= size
            trace.append(_event("free_requested", freed, size, time, stream=stream))
            pending.append(_event("free_completed", freed, size, time, stream=stream))
        elif pending and rng.random() < 0.5:
            trace.append({**pending.pop(0), "time_us": 5_000_000 + time})
        else:
            address, size = 2**47 + 512 * rng.randrange(2**27), 512 * rng.randrange(1, 2**15)
            if address in live or any(address == event["addr"] for event in pending):
                continue
            stream = rng.choice((0, SIDE))
            live[address] = size, stream
            allocated += size
            stack = rng.choice(stacks)
            trace.append(_event("alloc", address, size, time, stream=stream, frames=stack))
        most = max(most, allocated)
    segments = [
        _segment(stream, _block(address, size, "active_allocated"))
        for address, (size, stream) in live.items()
    ]
    segments += [
        _segment(event["stream"], _block(event["addr"], event["size"], "active_pending_free"))
        for event in pending
    ]
    return {"device_traces": [[], trace], "segments": segments}, most


def _kept(made: dict[str, Any]) -> dict[str, Any]:
    """Return what is read of what is written of ``made``, trimmed."""
    return pickle.loads(gzip.decompress(snapshot.packed(snapshot.trim(made))))


PEAK = Peak(
    allocated=3000,
    pending=648,
    seconds=0.5,
    events=18,
    holders=(
        Holder(1100, 1, "(no Python stack)", "default stream"),
        Holder(900, 1, "(before the first event)", "default stream"),
        Holder(700, 1, "torchtitan/models/moe.py:forward", "default stream"),
        Holder(200, 1, f"{COLLECTIVES}:all_gather", "all-gather stream"),
        Holder(50, 1, "cab.py:call", "default stream"),
        Holder(50, 1, "torchtitan/models/moe.py:forward", "all-gather stream"),
    ),
)


def test_the_peak_is_told_by_who_holds_it():
    assert snapshot.peak(made_snapshot()) == PEAK


def test_a_peak_before_the_first_event_is_one_too():
    made = made_snapshot()
    made["device_traces"][1] = [
        _event("free_requested", 1, 5, 0),
        _event("free_completed", 1, 5, 0),
        _event("alloc", 1, 5, 9),
    ]
    made["segments"] = [_segment(0, _block(1, 5, "active_allocated", MOE))]
    found = snapshot.peak(made)
    assert (found.allocated, found.seconds) == (5, 0)
    assert [h.place for h in found.holders] == ["(before the first event)"]


def test_a_stream_without_a_name_is_told_by_its_handle():
    made = made_snapshot()
    del made["stream_names"]
    assert {h.stream for h in snapshot.peak(made).holders} == {
        "default stream",
        f"stream {SIDE:#x}",
    }


def test_trimming_keeps_the_peak():
    kept = _kept(made_snapshot())
    assert snapshot.peak(kept) == PEAK
    assert _kept(kept) == kept


def test_trimming_keeps_what_memory_viz_reads():
    made, kept = made_snapshot(), _kept(made_snapshot())
    assert [len(trace) for trace in kept["device_traces"]] == [0, 18]
    first, second = kept["device_traces"][1][:2]
    assert (first["action"], first["time_us"], second["time_us"]) == ("segment_alloc", 0, 1)
    assert second["addr"] == 4096
    assert "addr" not in kept["device_traces"][1][-1]
    assert [s["device"] for s in kept["segments"]] == [1] * 5
    assert [b["state"] for b in kept["segments"][1]["blocks"]] == ["active_allocated", "inactive"]
    assert kept["segments"][0]["segment_pool_id"] == (0, 0)
    assert kept["allocator_settings"] == made["allocator_settings"]
    assert made == made_snapshot()  # left as it was


def test_a_stack_keeps_its_innermost_frames_and_who_they_work_for():
    made = made_snapshot()
    deep = [_frame(f"{SITE}/torch/nn/f{n}.py", "f", n) for n in range(12)]
    made["device_traces"][1][1]["frames"] = [*GATHER[:1], *deep, *MOE[1:]]
    made["device_traces"][1][2]["frames"] = GATHER[:1]  # nothing else than plumbing
    _, first, second, *_ = _kept(made)["device_traces"][1]
    assert first["frames"] == [
        *(_frame(f"torch/nn/f{n}.py", "f", n) for n in range(8)),
        _frame("torchtitan/models/moe.py", "forward", 31),
    ]
    assert second["frames"] == [_frame("torch/_ops.py", "__call__")]


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (f"{SITE}/triton/runtime/jit.py", "triton/runtime/jit.py"),
        (f"{SITE}/torch/_tensor.py", "torch/_tensor.py"),
        (f"{OVERLAY}/torch/_tensor.py", "torch/_tensor.py"),
        ("/tmp/torch/checkout/torchtitan/trainer.py", "torchtitan/trainer.py"),
        ("/tmp/torchinductor_me/ab/cab.py", "cab.py"),
        ("triton/runtime/jit.py", "triton/runtime/jit.py"),
        ("<eval_with_key>.3", "<eval_with_key>.3"),
    ],
)
def test_files_are_told_as_their_package_has_them(file, told):
    assert snapshot.relative(file) == told


def test_no_path_of_the_machine_is_kept():
    kept = gzip.decompress(snapshot.packed(snapshot.trim(made_snapshot())))
    assert b"/tmp" in pickle.dumps(made_snapshot())
    assert not [path for path in (b"/tmp", b"/usr", b"site-packages") if path in kept]


def test_a_step_of_20000_events_is_small_and_has_the_peak_that_was_counted():
    made, most = _step(20_000)
    data = snapshot.packed(snapshot.trim(made))
    kept = pickle.loads(gzip.decompress(data))
    assert len(data) < 500_000
    assert data == snapshot.packed(snapshot.trim(made))
    found = snapshot.peak(made)
    assert found.allocated == most == sum(h.bytes for h in found.holders)
    assert found.pending
    assert snapshot.peak(kept) == found


def test_memory_viz_can_unpickle_it():
    data = gzip.decompress(snapshot.packed(snapshot.trim(made_snapshot())))
    opcodes = list(pickletools.genops(data))
    assert {opcode.name for opcode, _, _ in opcodes} <= set(KNOWN.split())
    assert opcodes[0][1] == 4


class _Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return Path.touch, (self.target,)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    file, ran = tmp_path / "in.pickle", tmp_path / "ran"
    file.write_bytes(pickle.dumps({**made_snapshot(), "more": _Malicious(ran)}))
    with pytest.raises(UserError, match=r"which is not loaded: a snapshot is plain data"):
        snapshot.read(file)
    assert not ran.exists()


@pytest.mark.parametrize("packed", [False, True])
def test_a_snapshot_is_read_compressed_or_not(tmp_path, packed):
    file, data = tmp_path / "in", pickle.dumps(made_snapshot())
    file.write_bytes(gzip.compress(data) if packed else data)
    assert snapshot.read(file) == made_snapshot()


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"", "EOFError"),
        (b"no pickle", "UnpicklingError"),
        (gzip.compress(pickle.dumps(made_snapshot()))[:-9], "EOFError"),
        (pickle.dumps(made_snapshot())[:-99], "truncated"),
        (pickle.dumps([1]), "TypeError"),
        (pickle.dumps({"segments": []}), "KeyError('device_traces')"),
        (pickle.dumps({"device_traces": [[{"action": "alloc"}]], "segments": []}), "size, stream"),
        (pickle.dumps({"device_traces": [[]], "segments": []}), "found none; record them"),
    ],
)
def test_what_is_no_snapshot_is_told_in_a_sentence(tmp_path, data, hint):
    file = tmp_path / "in.pickle"
    file.write_bytes(data)
    with pytest.raises(UserError, match=re.escape(hint)):
        snapshot.read(file)


def _run(*arguments: Path | str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "integration.evidence.snapshot", *map(str, arguments)]
    return subprocess.run(line, cwd=REPO, capture_output=True, text=True)


def test_the_command_shows_the_peak_and_writes_the_trimmed_file(tmp_path):
    file, kept = tmp_path / "in.pickle", tmp_path / "new" / "out.pickle.gz"
    file.write_bytes(pickle.dumps(made_snapshot()))
    answer = _run(file, kept, "--rows", "3")
    assert answer.returncode == 0, answer.stderr
    assert "2.93 KiB allocated, 648 B pending, 0.500 s into the recording" in answer.stdout
    assert re.search(r"900 B .* 30.0% .* 1 .* default stream .* \(before the first", answer.stdout)
    assert re.search(r"300 B .* 3 .*\(others\)", answer.stdout)
    assert [f.name for f in kept.parent.iterdir()] == ["out.pickle.gz"]
    assert snapshot.peak(snapshot.read(kept)) == PEAK


def test_the_command_refuses_what_is_no_snapshot(tmp_path):
    answer = _run(tmp_path / "nowhere", tmp_path / "out")
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: expected an allocator snapshot")
    assert answer.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*.pickle*"))
