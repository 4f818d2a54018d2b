"""The report without a browser: what it is made of, and what it says where something is missing."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from integration.evidence import trace
from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset import repository
from integration.report import charts, ladder, memory, page, report, runs, timeline
from integration.report.charts import Bar
from integration.report.page import Missing, Section
from integration.tests.report import samples
from integration.train import summary


def run_folder(folder: Path, losses: list[float]) -> Path:
    writer = EventFileWriter(str(folder / "tb"))
    for step, loss in enumerate(losses, start=1):
        told = summary_pb2.Summary()  # pyrefly: ignore[missing-attribute]
        told.value.add(tag=summary.LOSS, simple_value=loss)
        event = event_pb2.Event(  # pyrefly: ignore[missing-attribute]
            step=step, wall_time=step, summary=told
        )
        writer.add_event(event)
    writer.close()
    return folder


def missing(section: Section) -> str:
    (block,) = section.blocks
    assert isinstance(block, Missing)
    return block.command


def drawn(section: Section) -> list[charts.Chart]:
    found = [b for block in section.blocks for b in getattr(block, "charts", [block])]
    return [block for block in found if isinstance(block, charts.Chart)]


def test_what_is_not_there_names_the_command_that_makes_it() -> None:
    assert missing(ladder.section([])) == "integration ladder slice --record"
    assert "integration train" in missing(runs.section([], []))
    assert "integration.evidence.trace" in missing(timeline.section([]))
    assert missing(memory.pools([], [])) == "integration bench unshard_async_op --record"
    text = page.render("t", "", [ladder.section([])])
    assert 'class="missing"' in text
    assert 'class="chart"' not in text.replace('".chart"', "")


def test_the_page_loads_nothing_and_holds_what_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "recorded", list)  # what is kept may speak of links
    file = samples.write(tmp_path / "ladder.json", samples.ladder())
    run = run_folder(tmp_path / "mini" / "20261130-010203", [8.5, 8.25, 8.0])
    target = tmp_path / "page" / "report.html"
    target.parent.mkdir()
    report.write([file, run], target)
    text = target.read_text()
    own = text.replace(page._plotly(), "")
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=[\"'](?!data:)", own)
    assert "http:" not in own
    for words in (
        "integration ladder slice --rounds 2", "mini/20261130-010203", "996 to 1,210",
        "did not run: out of GPU memory", "boundary activations", "unshard_async_h2d, benchmark",
    ):  # fmt: skip
        assert words in own, words
    for contribution in repository.load():
        assert f"<td>{contribution.name}</td>" in own or f">{contribution.name}</td>" in own
    assert list(target.parent.iterdir()) == [target]


def test_ladder_figures_are_the_record_s() -> None:
    record = samples.ladder()
    climb, published, phases, without = drawn(ladder.section([record]))
    rates = [rung["median"]["tokens_s_gpu"] for rung in record["rungs"][:3]]
    assert climb.data[0]["x"] == rates
    assert climb.data[0]["error_x"]["array"][0] == pytest.approx(rates[0] * (1 / 0.97 - 1))
    assert published.data[0]["x"] == [90, 996, 1300]
    assert published.data[1]["x"] == [None, 214, None]
    assert without.rows[0][0] == "full set"
    assert without.rows[1][1].startswith("did not run: out of GPU memory")
    assert [trace["name"] for trace in phases.data] == ["forward", "backward", "optimizer"]
    losses = ladder.losses(record)
    assert losses
    assert [row[0] for row in losses.rows] == ["pristine + cpu_device and 3 equal to it"]


def test_a_ladder_of_which_nothing_ran_is_a_table_of_reasons() -> None:
    failed = samples.ladder()["rungs"][3]
    section = ladder.section([samples.ladder(rungs=[failed | {"kind": "base"}, failed])])
    text = page.render("t", "", [section])
    assert text.count("did not run: out of GPU memory") == 2
    assert "adding one by one" not in text


def test_a_file_of_another_kind_or_a_folder_without_steps_is_refused(tmp_path: Path) -> None:
    other = samples.write(tmp_path / "other.json", {"kind": "bench"})
    for given in (other, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"expected a run's folder .* no page was written"):
            report.write([given], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_an_attribute_that_plotly_does_not_have_fails() -> None:
    chart = charts.bars("t", [Bar(label="a", parts={"x": 1.0})], str)
    assert json.loads(chart.json())["data"][0]["x"] == [1.0]
    chart.data[0]["markers"] = {}
    with pytest.raises(ValueError, match="markers"):
        chart.json()


def test_a_script_s_end_within_a_name_ends_nothing() -> None:
    name = "</script><b>"
    chart = charts.lines(name, {name: ([1, 2], [3.0, 4.0])}, x="step", y="loss")
    text = page.render("t", "", [Section(title="T", blocks=[chart])])
    assert name not in text
    figure = re.search(r'-figure">(.*?)</script>', text, re.DOTALL)
    assert figure
    assert json.loads(figure[1])["data"][0]["name"] == name


def test_a_trimmed_profile_keeps_streams_and_steps_alone() -> None:
    whole = samples.profile()["traceEvents"]
    kept, joined = trace.trim(whole)
    assert joined == 0
    timed = [e for e in kept if e["ph"] == "X"]
    assert {e["cat"] for e in timed} == {"kernel", "gpu_memcpy", "user_annotation"}
    gpu = [e for e in whole if e.get("cat") in trace.GPU]
    assert len([e for e in timed if e["cat"] in trace.GPU]) == len(gpu)
    assert max(len(e["name"]) for e in timed) == trace.NAME
    assert min(e["ts"] for e in timed) == 0
    assert sum(e["dur"] for e in timed if e["cat"] in trace.GPU) == pytest.approx(
        sum(e["dur"] for e in gpu), rel=1e-4
    )
    named = {(e["pid"], e["tid"]) for e in kept if e["ph"] == "M"}
    assert {(0, 7), (0, 20)} <= named


def test_too_many_kernels_are_joined_until_they_fit() -> None:
    events = samples.profile(kernels=5000)["traceEvents"]
    whole, _ = trace.trim([dict(e) for e in events])
    limit = len(trace.packed({"traceEvents": whole})) // 4
    kept, joined = trace.trim(events, limit)
    assert joined >= 1
    assert len(trace.packed({"traceEvents": kept})) <= limit
    assert any(re.fullmatch(r"\d+ kernels", e["name"]) for e in kept)
    # Nothing is lost but gaps between neighbours: communication stays apart from compute.
    assert sum(trace.is_communication(e) for e in kept if e["ph"] == "X") == 40
    with pytest.raises(ValueError, match="do not hold it"):
        trace.trim(samples.profile()["traceEvents"], 100)


def test_a_profile_is_bound_to_the_patches_it_was_made_on(tmp_path: Path) -> None:
    source = samples.write(tmp_path / "run" / "profile" / "rank0.json", samples.profile())
    target = tmp_path / "evidence" / "trace-full.json.gz"

    def trim(*options: str) -> subprocess.CompletedProcess:
        line = [sys.executable, "-m", "integration.evidence.trace", str(source), str(target)]
        return subprocess.run([*line, *options], cwd=paths.REPO, capture_output=True, text=True)

    assert "add --patches full, pristine or NAME,NAME" in trim().stderr
    assert not target.exists()
    assert trim("--patches", "shared_rope_cache").returncode == 0
    (cache,) = repository.find(repository.load(), ["shared_rope_cache"])
    bound = json.loads(gzip.decompress(target.read_bytes()))["patches"]
    assert bound == {cache.name: cache.sha256}
    names = ["cpu_device", "shared_rope_cache"]
    job = {"config": "mini", "data": "", "tokenizer": "", "options": [], "contributions": names}
    samples.write(tmp_path / "run" / "job.json", job)
    assert trim().returncode == 0
    assert list(json.loads(gzip.decompress(target.read_bytes()))["patches"]) == names
    source.write_text(json.dumps({"traceEvents": [{"ph": "X", "cat": "cpu_op"}]}))
    assert "recorded without ProfilerActivity.CUDA" in trim().stderr
    source.write_text("[]")
    assert "expected a Chrome trace" in trim().stderr


def test_the_timeline_shows_one_step_on_one_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline.paths, "REPO", tmp_path)
    folder = tmp_path / "integration" / "evidence"
    folder.mkdir(parents=True)
    for name, on_gpu in (("before", False), ("moved", True)):
        events, _ = trace.trim(samples.profile(on_gpu)["traceEvents"])
        kept = {"patches": {}, "command": "integration train slice", "traceEvents": events}
        (folder / f"trace-{name}.json.gz").write_bytes(trace.packed(kept))
    section = timeline.section(timeline.files())
    before, moved = drawn(section)
    text = page.render("t", "", [section])
    assert text.count("integration train slice") == 1
    assert "<summary>Command</summary><dl><dt>Before; Moved</dt>" in text
    assert [row[0] for row in moved.rows] == ["host", "stream 7", "stream 20"]
    assert before.layout["xaxis"]["range"] == moved.layout["xaxis"]["range"]
    kinds = {t["name"]: t for t in moved.data}
    # One step of the two: 20 all-gathers of 4 ms each 7 ms, of which a 200 ms chart shows each.
    assert len(kinds["communication"]["x"]) == 20
    assert sum(kinds["communication"]["x"]) == pytest.approx(80)
    assert kinds["copy to the GPU"]["base"] == [pytest.approx(151)]
    assert kinds["annotated on the host"]["x"] == [pytest.approx(45)]
    assert "copy to the GPU" not in {t["name"] for t in before.data}


def test_pools_are_those_of_ladder_and_benchmarks() -> None:
    section = memory.pools([samples.ladder()], repository.load())
    of_ladder, op, h2d = drawn(section)
    assert [row[0] for row in of_ladder.rows] == [
        "pristine + cpu_device", "default stream", "all-gather stream",
        "+ activation_offload", "default stream", "all-gather stream",
    ]  # fmt: skip
    assert of_ladder.rows[2] == ("all-gather stream", "2 GiB", "6 GiB", "8 GiB")
    assert {row[0] for row in op.rows} >= {"uncapped · flag off", "all-gather-copy-in"}
    assert "unshard_async_h2d" in h2d.title
