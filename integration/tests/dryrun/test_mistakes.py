"""A dry run that cannot be is one sentence, said before torch is imported or a model built."""

import pytest

from integration.dryrun.compare import Pair
from integration.dryrun.result import complaint
from integration.tests.dryrun.runs import dryrun


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("jupiter",), "unknown config jupiter; did you mean jupiter_1t?"),
        (("jupiter_1t", "--rank", "384"), "jupiter_1t on 384 ranks has ranks 0 to 383"),
        (("jupiter_1t", "--world", "383"), "ep 4 must divide dp_shard 383 x tp 1 = 383 ranks"),
        (
            ("jupiter_1t", "--world", "1320"),
            "efsdp 330 x ep 4 ranks outnumber the 384 experts, so each is split in 330",
        ),
        (("leonardo_small", "--world", "62"), "= 4 must divide the 62 ranks"),
        (("leonardo_1t_fp8",), "multiplies in FP8, which a CPU has not"),
        (
            ("slice", "--experts", "4"),
            "--experts must be at least 8, as each token goes to that many",
        ),
        (("slice", "--without", "shared_rop_cache"), "did you mean shared_rope_cache?"),
        (("slice", "--without", "cpu_device"), "keep cpu_device"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, words, tmp_path):
    ended = dryrun(tmp_path, *arguments)
    assert ended.code == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not ended.found


@pytest.mark.parametrize("missing", [True, False])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(missing, tmp_path):
    folder = tmp_path / "none"
    if not missing:
        (folder / "dryrun.json").mkdir(parents=True)
    ended = dryrun(folder, "slice", "--placements")
    assert ended.code == 2
    assert "expected a file that can be written for --json, got" in ended.stderr
    assert not ended.stdout  # no table: nothing was run


def test_a_step_that_stopped_is_said_and_fails():
    checks = [{"name": "RoPE stored once", "broken": "", "why_not": ""}]
    error = complaint({"refused": "the fake step ended with code 1: why", "checks": checks})
    assert error is not None
    assert error.exit_code == 1
    assert str(error).startswith("the fake step ended with code 1: why; ")
    assert complaint({"refused": "", "checks": checks, "disagreements": []}) is None


def test_a_plan_that_is_off_has_an_exit_code_of_its_own():
    off = ["reduce-scatter: 100 planned, 106 found"]
    error = complaint({"refused": "", "checks": [], "disagreements": off})
    assert error is not None
    assert error.exit_code == 3
    assert str(error).startswith("the plan is more than 5% off: reduce-scatter: 100 planned, ")


@pytest.mark.parametrize(
    ("plan", "found", "agrees"),
    [
        *((100 + off, 100, abs(off) <= 5) for off in (-6, -5, 0, 5, 6)),
        (None, 1, True),
        (0, 0, True),
        (1, 0, False),
        (0, 1, False),
    ],
)
def test_plan_and_dry_run_agree_within_five_per_cent(plan, found, agrees):
    assert Pair("bytes", plan, found).agrees is agrees
