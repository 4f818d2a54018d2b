"""``integration bench``: one front, one table, the machine it needs, and evidence that is bound."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from rich.console import Console

from integration.bench import catalog, peers
from integration.bench import run as run_module
from integration.bench.run import Request, table
from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset import repository

GATHER = "embedding_skip_backward_gather"


def test_every_bench_py_is_called_and_every_peer_has_a_benchmark() -> None:
    contributions = repository.load()
    scripts = {c.name for c in contributions if (c.folder / "bench.py").is_file()}
    assert set(catalog.benches()) == scripts
    assert {peer.bench for peer in catalog.peers()} <= scripts
    for peer in catalog.peers():
        folder = next(c.folder for c in contributions if c.name == peer.bench)
        assert not peer.program or (folder / peer.program).is_file()
    assert [p.title for p in catalog.peers()] == [
        "muonium 0.2.0", "deepspeed 0.19.8", "gram-newton-schulz 0.1.6",
        "emerging-optimizers 0.3.0", "trl 1.16.0",
    ]  # fmt: skip


def printed(results: object, columns: dict[str, str]) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(table(results, columns))
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def test_one_table_of_any_shape() -> None:
    cases = [
        {"batch": n, "rows": 4, "on": True, "methods": {"gram": {"ms": n / 8, "error": 1e-3}}}
        for n in (1, 8)
    ]
    results = {
        "machine": {"cores": 2},
        "cases": cases,
        "seconds": {"ours": 0.5, "theirs": 2, "why": "no"},
        "peak": {"ms": None, "bytes": 3 * 2**30},
    }
    columns = {"ms": "milliseconds", "error": "number", "seconds": "seconds", "bytes": "bytes"}
    assert_expected_inline(
        printed(results, columns),
        """\
┏━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━┳━━━━━━━━━┳━━━━━━━┓
┃                                ┃     ms ┃ error ┃ seconds ┃ bytes ┃
┡━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━╇━━━━━━━━━╇━━━━━━━┩
│ cases · 1 x 4 · methods · gram │ 125 us │ 0.001 │         │       │
│ cases · 8 x 4 · methods · gram │   1 ms │ 0.001 │         │       │
│ ours                           │        │       │  500 ms │       │
│ theirs                         │        │       │     2 s │       │
│ peak                           │        │       │         │ 3 GiB │
└────────────────────────────────┴────────┴───────┴─────────┴───────┘
""",
    )


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request("cpu_device"), "cpu_device has no benchmark, .*test_cpu_device.py"),
        (Request("unshard_async_op"), "is measured on 2 GPUs .*finds none here.*--smoke"),
        (Request("flex_shard_newton_schulz", smoke=True), "kernels that only a GPU has"),
        (Request("shared_rop_cache"), "did you mean shared_rope_cache?"),
    ],
)
def test_what_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch, request_: Request, sentence: str
) -> None:
    monkeypatch.setattr(run_module, "gpu_count", lambda: 0)
    with pytest.raises(UserError, match=sentence):
        run_module.run(request_)


def test_a_bench_that_can_do_with_fewer_gpus_runs_on_those_that_are_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[list[str]] = []
    monkeypatch.setattr(run_module, "_call", lambda line, env: lines.append(line) or {})
    monkeypatch.setenv("INTEGRATION_OUTPUTS", str(tmp_path))
    for gpus in (1, 2, 8):
        monkeypatch.setattr(run_module, "gpu_count", lambda gpus=gpus: gpus)
        run_module.run(Request("unshard_async_h2d", ("--rounds", "1")))
        told = "unshard_async_h2d is meant for 2 GPUs; it is measured on the 1 here"
        assert (told in capsys.readouterr().out) == (gpus == 1)
    assert [line[line.index("--gpus") :] for line in lines] == [
        ["--gpus", count, "--rounds", "1"] for count in ("1", "2", "2")
    ]
    monkeypatch.setattr(run_module, "gpu_count", lambda: 1)
    with pytest.raises(UserError, match=r"unshard_async_op is measured on 2 GPUs .*finds 1 here"):
        run_module.run(Request("unshard_async_op"))
    monkeypatch.setattr(run_module, "gpu_count", lambda: 0)
    with pytest.raises(UserError, match=r"is measured on 2 GPUs, or 1 .*finds none here"):
        run_module.run(Request("unshard_async_h2d"))
    with pytest.raises(ValueError, match="least_gpus of b must be from 1 to below its 1 gpus"):
        catalog.Bench(name="b", what="", columns={}, gpus=1, least_gpus=1)


def test_the_line_has_the_overlay_the_peers_and_the_user_s_options_last() -> None:
    by_name = {c.name: c for c in repository.load()}
    benches = catalog.benches()
    mine = [p for p in catalog.peers() if p.package in ("trl", "deepspeed")]

    def line(name: str, smoke: bool = False) -> list[str]:
        overlays = {"overlay": Path("/o"), "base": Path("/b")}
        request = Request(name, ("--steps", "2"), smoke=smoke)
        made = run_module.command(by_name[name], benches[name], request, mine, Path("/p"), overlays)
        assert made[0] == sys.executable
        return [part.replace(str(paths.REPO), "") for part in made[1:]]

    assert line("dist_muon_batched_compute")[1:4] == ["--pristine", "--overlay", "/o"]
    assert line("dist_muon_batched_compute", smoke=True)[1:4] == ["--smoke", "--base", "/b"]
    offload = "/p/trl/trl/models/activation_offloading.py"
    assert line("activation_offload") == [
        "/torchtitan_contrib/activation_offload/bench.py", "--trl", offload, "--steps", "2",
    ]  # fmt: skip
    assert line(GATHER)[:4] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
    ]  # fmt: skip


def test_evidence_names_patch_machine_command_and_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (contribution,) = repository.find(repository.load(), [GATHER])
    told = {"gathered": {"median_step_ms": 2.0}, "torch": "another", "command": "a lie"}
    monkeypatch.setattr(run_module, "_call", lambda line, env: told)
    monkeypatch.setattr(run_module, "gpu_count", lambda: 0)
    monkeypatch.setenv("INTEGRATION_OUTPUTS", str(tmp_path))
    run_module.run(Request(GATHER, ("--steps", "3")))
    (file,) = (tmp_path / "bench").glob(f"{GATHER}-*.json")
    record = json.loads(file.read_text())
    assert record["patch_sha256"] == contribution.sha256
    assert record["patches"] == {GATHER: contribution.sha256}
    assert record["command"] == f"integration bench {GATHER} -- --steps 3"
    assert (record["torch"], record["gathered"]) != ("another", {})
    assert record["machine"]["cores"] >= 1
    assert list((tmp_path / "bench").iterdir()) == [file]


def test_a_failing_or_chatty_script(tmp_path: Path) -> None:
    script = tmp_path / "bench.py"
    line = [sys.executable, str(script)]
    script.write_text("print('loading {x}'); print('{\\n \"a\": {\"b\": 1}}')")
    assert run_module._call(line, {}) == {"a": {"b": 1}}
    script.write_text("raise SystemExit(3)")
    assert run_module._call(line, {}) == "exit code 3, and what it said above"
    script.write_text("print('no object')")
    assert "JSONDecodeError" in str(run_module._call(line, {}))


def test_what_could_not_run_is_found_wherever_it_stands() -> None:
    results = {"a": [{"failed": {"library": "no"}}], "cannot_run": {"muonium": "slow"}, "failed": 1}
    assert list(run_module.cannot(results)) == [("library", "no"), ("muonium", "slow")]


OLD = "ERROR: Ignored the following versions that require a different python: 9 Requires-Python\n"


def test_a_peer_that_cannot_be_had_says_so_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []

    def pip(line: list[str], **_: object) -> subprocess.CompletedProcess:
        calls.append(line)
        target = Path(next(p for p in line if p.startswith("--target=")).removeprefix("--target="))
        if target.name == "bringing":
            (target / "torch").mkdir()
        old = target.name == "old"
        return subprocess.CompletedProcess(line, int(old), "", f"{OLD}ERROR: none" if old else "")

    monkeypatch.setattr(peers.subprocess, "run", pip)
    three = [
        catalog.Peer(package=name, version="9", bench="b", importable=True)
        for name in ("old", "bringing", "good")
    ]
    reasons = {peer.title: peers.install(peer, tmp_path) for peer in three}
    assert "Requires-Python" in reasons["old 9"]
    assert reasons["bringing 9"] == "it brought another torch, which was removed"
    assert reasons["good 9"] == peers.why_not(three[2], tmp_path) == ""
    assert not (tmp_path / "bringing/torch").exists()
    assert all("--no-deps" in line for line in calls)
    for peer in three:
        peers.install(peer, tmp_path)
    assert len(calls) == 5  # the good one is there
    newer = catalog.Peer(package="good", version="10", bench="b", importable=True)
    assert peers.why_not(newer, tmp_path).startswith("9 is installed")


def test_a_real_benchmark_from_the_command_line(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "integration", "bench", "shared_rope_cache", "--smoke"]
    env = {**os.environ, "INTEGRATION_OUTPUTS": str(tmp_path)}
    done = subprocess.run(line, cwd=paths.REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "│ patched " in done.stdout
    (file,) = (tmp_path / "bench").iterdir()
    results = json.loads(file.read_text())["results"]
    # 74 layers share one cache of 256 positions, cos and sin, 128 wide, in float32.
    assert results["patched"]["cache_bytes"] == 256 * 2 * 128 * 4
    assert results["pristine"]["cache_bytes"] == 74 * 256 * 2 * 128 * 4
