"""Ladders of one rung that become one record, and the order in which ladders are read."""

import gzip
import json
from pathlib import Path

import pytest

from integration.evidence import trace
from integration.report import ladder, memory, merge, page, report, runs, streams
from integration.report.charts import Bars
from integration.report.page import Closed, Commands, Section, Table
from integration.tests.report import samples
from integration.tests.report.test_report import drawn, run_folder

FLASH = ("--override.imports", "some.flash", "--debug.no-deterministic")


def three() -> list[dict]:
    """Return the same job with three sets of options; the slowest is in the middle."""
    return [
        samples.alone("flash", 0.8, *FLASH),
        samples.alone("plain", 1.0, "--debug.no-deterministic"),
        samples.alone("none", 0.5, *FLASH, "--compile.enable", "activation_checkpoint:none"),
    ]


def test_ladders_of_one_rung_and_job_become_one_the_slowest_first() -> None:
    (record,) = merge.merged(three())
    assert [rung["label"] for rung in record["rungs"]] == ["plain", "flash", "none"]
    assert [rung["options"] for rung in record["rungs"]] == [
        [],
        ["--override.imports some.flash"],
        ["--override.imports some.flash", "--compile.enable", "activation_checkpoint:none"],
    ]
    assert [m["label"] for m in merge.members(record)] == ["plain", "flash", "none"]
    assert ladder.title(record).endswith("65,536 tokens a step: the full set alone")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("config", "mini"), ("layers", 4), ("experts", 16), ("ranks", 4), ("steps", 5),
        ("tokens_a_step", 8192), ("machine", samples.MACHINE | {"gpu": "NVIDIA B200"}),
        ("patches", {"one": "0" * 64}), ("torch", "2.15.0"), ("whole_documents", True),
    ],
)  # fmt: skip
def test_another_job_is_not_merged(key: str, value: object) -> None:
    records = merge.merged([*three(), samples.alone("other", 0.7, **{key: value})])
    assert [len(record["rungs"]) for record in records] == [3, 1]
    assert "members" not in records[1]


def test_one_rung_is_not_merged_with_that_of_another_set() -> None:
    other = samples.alone("other", 0.7)
    other["rungs"][0]["label"] = "pristine"
    assert len(merge.merged([samples.alone("one", 0.7), other])) == 2


def test_one_that_did_not_run_is_the_slowest_and_says_why() -> None:
    failed = samples.alone("huge", 1.0, "--training.seq_len", "9")
    failed["rungs"] = [samples.ladder()["rungs"][3] | {"label": "full set", "kind": "add"}]
    (record,) = merge.merged([*three(), failed])
    assert [rung["label"] for rung in record["rungs"]][:2] == ["huge", "plain"]
    assert "did not run: out of GPU memory" in page.render("t", "", [ladder.section([record])])


def test_gpus_come_before_cpus_and_ladders_before_what_is_merged_and_what_is_alone() -> None:
    single = samples.alone("single", 1.0, ranks=1)
    records = merge.merged([samples.long(), single, *three(), samples.ladder()])
    assert [(r["config"], r["ranks"], len(r["rungs"])) for r in records] == [
        ("slice", 2, 5), ("slice", 2, 3), ("slice", 1, 1), ("mini", 2, 24),
    ]  # fmt: skip


def test_a_merged_ladder_is_one_chart_each_and_a_table_with_mfu_and_options() -> None:
    records = merge.merged([*three(), samples.ladder()])
    section = ladder.section(records)
    assert [chart.title for chart in drawn(section)].count("Published, tokens/s a GPU") == 1
    closed = section.blocks[-1]
    assert isinstance(closed, Closed) and "the full set alone" in closed.summary
    rates, phases = drawn(Section(title="", blocks=closed.blocks))
    assert rates.title == "Tokens/s a GPU, the full set alone"
    assert phases.title == "Where a step's time goes"
    assert [row[0] for row in rates.rows] == ["plain", "flash", "none"]
    assert [row[0] for row in phases.rows] == ["plain", "flash", "none"]
    (first,) = [block for block in section.blocks if isinstance(block, Table)]
    (table,) = [block for block in closed.blocks if isinstance(block, Table)]
    assert "MFU" not in first.heads and "options" not in first.heads
    mfu = [row[table.heads.index("MFU")] for row in table.rows]
    assert mfu == ["20.0%", "25.0%", "40.0%"]
    assert [row[table.heads.index("options")] for row in table.rows][:2] == [
        "", "--override.imports some.flash",
    ]  # fmt: skip
    lead, commands = closed.blocks[:2]
    assert "varied: `--override.imports some.flash`, `--compile.enable`" in str(lead)
    assert isinstance(commands, Commands)
    assert [name for name, _ in commands.rows] == ["plain", "flash", "none"]
    (pools,) = [c for c in drawn(memory.pools(records, [])) if c.title.endswith("alone")]
    assert [r[0] for r in pools.rows if "stream" not in r[0]] == ["plain", "flash", "none"]


def test_many_rungs_are_behind_a_summary_and_few_are_not() -> None:
    few, many = (ladder.section([samples.long(n)]).blocks for n in (12, 24))
    assert not [block for block in few if isinstance(block, Closed)]
    closed = [block for block in many if isinstance(block, Closed)]
    summaries = [block.summary for block in closed]
    assert summaries == ["Where a step's time goes: 24 rungs", "Each rung: 24 rows"]
    assert isinstance(closed[1].blocks[0], Table)
    assert len(closed[1].blocks[0].rows) == 24


def test_the_rest_of_a_step_is_drawn_where_phases_do_not_fill_it() -> None:
    record = samples.ladder()
    phases = drawn(ladder.section([record]))[2]
    assert "rest" not in phases.heads
    record["rungs"][0]["median"]["optimizer_s"] -= 0.1
    phases = drawn(ladder.section([record]))[2]
    assert phases.heads[-2] == "rest"
    assert isinstance(phases, Bars)
    assert [bar.parts.get("rest") for bar in phases.bars] == [pytest.approx(0.1), None, None, None]


def test_one_line_of_a_few_losses_is_words_unless_it_is_all(tmp_path: Path) -> None:
    alone = runs.section([samples.ladder()], [])
    assert len(drawn(alone)) == 1
    run = run_folder(tmp_path / "mini" / "1", [8.5, 8.25])
    section = runs.section([samples.ladder()], [run])
    assert [chart.title for chart in drawn(section)] == ["Training runs"]
    assert "in 6 steps the loss goes from 9.0000 to 7.5000" in str(section.blocks[-1])
    apart = samples.ladder()
    apart["rungs"][1]["runs"][0] = apart["rungs"][1]["runs"][0] | {"loss": [9.0, 1.0]}
    assert len(drawn(runs.section([apart], [run]))) == 2


def test_traces_of_a_merged_ladder_come_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_shown", lambda file: file.name)
    (record,) = merge.merged(three())
    commands = {m["label"]: f"{m['command']}: full set" for m in merge.members(record)}
    files = []
    for name, long in (("none", 1), ("other", 4), ("plain", 2)):
        events, _ = trace.trim(samples.profile(kernels=100)["traceEvents"])
        for event in events:
            if event["ph"] == "X":
                event["ts"], event["dur"] = event["ts"] * long, event["dur"] * long
        kept = {"patches": {}, "command": commands.get(name, "?"), "traceEvents": events}
        files.append(tmp_path / f"trace-{name}.json.gz")
        files[-1].write_bytes(gzip.compress(json.dumps(kept).encode()))
    found = drawn(streams.section(files, [record]))
    assert [chart.title for chart in found] == ["Plain", "None", "Other"]


def test_a_page_of_several_ladders_shows_published_figures_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "recorded", lambda: [samples.ladder(), *three()])
    report.write([], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert text.count("<figcaption>Published, tokens/s a GPU</figcaption>") == 1
    assert "the full set alone</summary>" in text
