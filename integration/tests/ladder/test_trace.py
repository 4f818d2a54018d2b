"""Exposed communication and copies, from traces small enough to check by hand."""

import json
from pathlib import Path

import pytest

from integration.ladder.trace import exposed, uncovered


@pytest.mark.parametrize(
    ("intervals", "cover", "length"),
    [
        ([(0, 10)], [], 10),
        ([(0, 10)], [(0, 10)], 0),
        ([(0, 10)], [(2, 4), (3, 5)], 7),
        ([(0, 4), (2, 6)], [], 6),  # two at once count once
        ([(0, 10)], [(-5, 1), (9, 20)], 8),
        ([], [(0, 1)], 0),
        ([(3, 3)], [], 0),
    ],
)
def test_what_nothing_covers(intervals, cover, length):
    assert uncovered(intervals, cover) == length


def _trace(path: Path, *events: tuple[str, str, float, float]) -> Path:
    made = [{"cat": c, "name": n, "ts": ts, "dur": dur, "ph": "X"} for c, n, ts, dur in events]
    # A trace also holds events without a category or a length.
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *made]}))
    return path


def test_communication_is_exposed_where_no_other_kernel_runs(tmp_path):
    trace = _trace(
        tmp_path / "trace.json",
        ("kernel", "ncclDevKernel_AllGather_RING_LL", 0, 100),
        ("kernel", "gemm", 40, 30),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 40),  # hides no communication
        ("cuda_runtime", "cudaLaunchKernel", 0, 100),
    )
    communication, copies = exposed(trace)
    assert communication == pytest.approx(70e-6)
    assert copies == 0


def test_copies_between_host_and_device_are_exposed_where_no_kernel_runs(tmp_path):
    trace = _trace(
        tmp_path / "trace.json",
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 50),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 40, 30),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 100, 50),
        ("kernel", "gemm", 10, 20),
        ("kernel", "ncclDevKernel_ReduceScatter", 60, 5),
    )
    communication, copies = exposed(trace)
    assert communication == pytest.approx(5e-6)
    assert copies == pytest.approx((70 - 20 - 5) * 1e-6)
