"""The report without a browser: what it is made of, and what it says where something is missing."""

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from integration.evidence import trace
from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset import repository
from integration.report import charts, ladder, memory, page, picture, report, runs, streams
from integration.report.charts import Bar
from integration.report.page import Beside, Closed, Missing, Section
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
    """Return all charts of a section, also those that are closed."""

    def flat(blocks: Sequence[page.Block]) -> Iterator[page.Block]:
        for block in blocks:
            if isinstance(block, Closed):
                yield from flat(block.blocks)
            elif isinstance(block, Beside):
                yield from block.charts
            else:
                yield block

    return [block for block in flat(section.blocks) if isinstance(block, charts.Chart)]


def test_what_is_not_there_names_the_command_that_makes_it() -> None:
    assert missing(ladder.section([])) == "integration ladder slice --record"
    assert "integration train" in missing(runs.section([], []))
    assert "integration.evidence.trace" in missing(streams.section([]))
    assert missing(memory.pools([], [])) == "integration bench unshard_async_op --record"
    text = page.render("t", "", [ladder.section([])])
    assert 'class="missing"' in text
    assert 'class="chart"' not in text


def test_the_page_loads_nothing_and_holds_what_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "recorded", list)  # what is kept may speak of links
    samples.benches(tmp_path, monkeypatch)
    file = samples.write(tmp_path / "ladder.json", samples.ladder())
    run = run_folder(tmp_path / "mini" / "20261130-010203", [8.5, 8.25, 8.0])
    target = tmp_path / "page" / "report.html"
    target.parent.mkdir()
    report.write([file, run], target)
    text = target.read_text()
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=[\"'](?!data:)", text)
    assert "http:" not in text and "<script" not in text
    assert len(text) < 500_000
    for words in (
        "integration ladder slice --rounds 2", "mini/20261130-010203", "996 to 1,210",
        "did not run: out of GPU memory", "boundary activations", "unshard_async_h2d, benchmark",
    ):  # fmt: skip
        assert words in text, words
    for contribution in repository.load():
        assert f">{contribution.name}</td>" in text
    assert list(target.parent.iterdir()) == [target]


def test_ladder_figures_are_the_record_s() -> None:
    record = samples.ladder()
    climb, published, phases, without = drawn(ladder.section([record]))
    rates = [rung["median"]["tokens_s_gpu"] for rung in record["rungs"][:3]]
    assert isinstance(climb, charts.Bars) and isinstance(published, charts.Bars)
    assert [bar.parts["tokens/s"] for bar in climb.bars[:3]] == rates
    assert climb.bars[0].spread == pytest.approx((rates[0] / 1.05, rates[0] / 0.97))
    assert [dict(bar.parts) for bar in published.bars] == [
        {"before": 90}, {"before": 996, "gained": 214}, {"before": 1300},
    ]  # fmt: skip
    assert without.rows[0][0] == "full set"
    assert without.rows[1][1].startswith("did not run: out of GPU memory")
    assert phases.heads == ("", "forward", "backward", "optimizer", "all")
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


def test_a_chart_of_nothing_or_of_more_kinds_than_colours_is_refused() -> None:
    """Two parts of one colour cannot be told apart."""
    many = {f"part {n}": 1.0 for n in range(len(charts.COLOURS))}
    fits = charts.Bars(title="t", bars=[Bar(label="all", parts=many)], form=str)
    assert len(set(fits.colours.values())) == len(many)
    with pytest.raises(ValueError, match="at most 16 kinds of parts"):
        charts.Bars(title="t", bars=[Bar(label="all", parts=many | {"one more": 1.0})], form=str)
    with pytest.raises(ValueError, match="must not be empty"):
        charts.Bars(title="t", bars=[], form=str)
    with pytest.raises(ValueError, match="must not be empty"):
        charts.Lines(title="t", series={"a": ([], [])}, x="step", y="loss")


def test_markup_within_a_name_ends_nothing() -> None:
    name = "</figure><b>"
    lines = charts.Lines(title=name, series={name: ([1, 2], [3.0, 4.0])}, x="step", y="loss")
    rows = [Bar(label=name, parts={name: 1.0}, text=name), Bar(label=name, note=name)]
    text = page.render(
        "t", "", [Section(title="T", blocks=[lines, charts.Bars(title=name, bars=rows, form=str)])]
    )
    assert name not in text


def test_a_loss_that_is_no_number_leaves_a_gap() -> None:
    lines = charts.Lines(
        title="t", series={"a": ([1, 2, 3], [3.0, float("nan"), 1.0])}, x="step", y="loss"
    )
    assert 'points="0.0,0.0 1000.0,300.0"' in page.render(
        "t", "", [Section(title="T", blocks=[lines])]
    )


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


def test_streams_are_busy_with_what_they_ran_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams.paths, "REPO", tmp_path)
    folder = tmp_path / "integration" / "evidence"
    folder.mkdir(parents=True)
    for name, on_gpu in (("before", False), ("moved", True)):
        events, _ = trace.trim(samples.profile(on_gpu)["traceEvents"])
        kept = {"patches": {}, "command": "integration train slice", "traceEvents": events}
        (folder / f"trace-{name}.json.gz").write_bytes(trace.packed(kept))
    section = streams.section(streams.files())
    before, moved = drawn(section)
    text = page.render("t", "", [section])
    assert text.count("integration train slice") == 1
    assert "<summary>Command</summary><dl><dt>Before; Moved</dt>" in text
    assert isinstance(moved, charts.Bars) and isinstance(before, charts.Bars)
    assert [bar.label for bar in moved.bars] == ["the whole step", "stream 7", "stream 20"]
    # One step of the two, of 200 ms: 20 all-gathers of 4 ms, and a copy of 20 ms each way.
    assert moved.bars[0].parts == {"the whole step": pytest.approx(200_000)}
    assert moved.bars[2].parts["communication"] == pytest.approx(80_000)
    copies = [moved.bars[2].parts.get(f"copy to the {to}") for to in ("GPU", "host")]
    assert copies == [pytest.approx(20_000)] * 2 or moved.bars[1].parts.get("copy to the host")
    assert "copy to the GPU" not in before.names


def test_pools_are_those_of_ladder_and_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples.benches(tmp_path, monkeypatch)
    section = memory.pools([samples.ladder()], repository.load())
    of_ladder, op, h2d = drawn(section)
    assert [row[0] for row in of_ladder.rows] == [
        "pristine + cpu_device", "default stream", "all-gather stream",
        "+ activation_offload", "default stream", "all-gather stream",
    ]  # fmt: skip
    assert of_ladder.rows[2] == ("all-gather stream", "2 GiB", "6 GiB", "8 GiB")
    assert [row[0] for row in op.rows] == [
        "uncapped · flag off", "all-gather-copy-in", "default",
        "uncapped · flag on", "all-gather-copy-in", "default",
    ]  # fmt: skip
    assert op.rows[1] == ("all-gather-copy-in", "2 GiB", "6 GiB", "8 GiB")
    assert "unshard_async_h2d" in h2d.title


def test_readme_s_pictures_are_of_the_evidence_that_is_kept() -> None:
    """`integration report --pictures` writes them anew."""
    for name, text in picture.pictures().items():
        assert (picture.FOLDER / name).read_text() == text, name
        assert ElementTree.fromstring(text).tag.endswith("svg")


def test_a_picture_holds_bars_spreads_notes_and_no_markup_of_a_name() -> None:
    rows = [
        Bar(label="<b>", parts={"x": 2.0}, text="2", spread=(1.5, 2.5)),
        Bar(label="out", note="did not run: <memory>"),
    ]
    root = ElementTree.fromstring(picture.svg(charts.Bars(title="t", bars=rows, form=str)))
    space = "{http://www.w3.org/2000/svg}"
    (bar,), (line,) = root.findall(f"{space}rect"), root.findall(f"{space}line")
    scale = picture.WIDTH - picture.LABELS - picture.FIGURES
    assert float(bar.attrib["width"]) == pytest.approx(scale * 2.0 / 2.5)
    assert float(line.attrib["x2"]) - float(line.attrib["x1"]) == pytest.approx(scale / 2.5)
    assert {t.text for t in root.findall(f"{space}text")} >= {"<b>", "did not run: <memory>"}
