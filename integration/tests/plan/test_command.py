"""``integration plan`` as a user calls it: quick, without torch, and plain about mistakes."""

import json
import resource
import subprocess
import sys

import pytest

from integration.ground.paths import REPO
from integration.plan.levers import Levers

CODE = """
import sys
from integration.cli.main import main
try: main(sys.argv[1:])
except SystemExit as end: code = end.code
print("torch" in sys.modules)
sys.exit(code)
"""


def _plan(*arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-c", CODE, "plan", *arguments]
    return subprocess.run(line, cwd=REPO, capture_output=True, text=True)


def test_the_plan_of_the_1t_job(tmp_path):
    page = tmp_path / "plan.html"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = _plan("jupiter_1t", "--html", str(page))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.returncode == 0, answer.stderr
    # Under 5 s on a laptop. Of processor time, as other tests may have the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert answer.stdout.splitlines()[-1] == "False"  # no torch
    assert "951.80 B parameters, 32.77 B active" in answer.stdout
    assert "boundary activations" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("jupiter",), "did you mean jupiter_1t"),
        (("jupiter_1t", "--cluster", "jupyter"), "did you mean jupiter?"),
        (
            ("jupiter_1t", "--ranks", "1320"),
            "which divides neither the expert hidden size 1792 nor the hidden size 6144",
        ),
        (("jupiter_1t", "--ep", "5"), "ep 5 must divide dp_shard 384 x tp 1 = 384 ranks"),
        (("jupiter_1t", "--cluster", "h200"), "has 384 ranks, one a GPU, and h200 has 2 GPUs"),
        (("leonardo_1t_fp8",), "the A100 64GB of leonardo has none"),
        (
            ("leonardo_1t_fp8",),
            "name one that has, as --cluster jupiter, or the config leonardo_1t",
        ),
        (("jupiter_1t", "--without", "shared_rop_cache"), "did you mean shared_rope_cache?"),
        (("jupiter_1t", "--layers", "2"), "cut the config slice, and jupiter_1t was asked for"),
        (("jupiter_1t", "--ep", "0"), "--ep must be at least 1, got 0"),
        (("jupiter_1t", "--json", "/nowhere/plan.json"), "can be written for --json"),
        (("jupiter_1t", "--", "--training.steps", "5"), "expected nothing after `--`"),
        (("slice", "--html", "/nowhere/plan.html"), "expected to write the page to /nowhere/plan"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, words):
    answer = _plan(*arguments)
    assert answer.returncode == 2
    assert words in answer.stderr
    assert "Traceback" not in answer.stderr


def test_what_requires_a_contribution_is_left_out_with_it():
    answer = _plan("jupiter_1t", "--without", "flex_shard_muon")
    also = "flex_shard_split_fused"
    assert answer.stderr == f"left out too, as they require flex_shard_muon: {also}\n"
    both = _plan("jupiter_1t", "--without", "flex_shard_muon", "--without", also)
    assert both.stdout == answer.stdout
    assert not both.stderr


def test_the_cluster_that_is_named_to_a_job_in_fp8_has_it():
    assert _plan("leonardo_1t_fp8", "--cluster", "jupiter").returncode == 0


def test_the_page_names_what_does_not_fit(tmp_path):
    page = tmp_path / "plan.html"
    answer = _plan("jupiter_1t", "--without", "activation_offload", "--html", str(page))
    assert answer.returncode == 3
    assert "does not fit: rank 0 needs 129.6 GiB on the GPU, which has 95.0 GiB" in answer.stdout
    assert "Does not fit" in page.read_text()


def test_json_is_printed_alone_or_written_beside_the_tables(tmp_path):
    printed = _plan("jupiter_1t", "--json")
    found = json.loads(printed.stdout.removesuffix("False\n"))
    assert (found["kind"], found["config"], found["too_large"]) == ("plan", "jupiter_1t", [])
    assert found["job"]["ranks"] == 384
    assert {change["name"] for change in found["changes"]} == set(Levers.names())
    file = tmp_path / "plan.json"
    written = _plan("--json", str(file), "jupiter_1t")
    assert written.stdout.removesuffix("False\n").endswith(f"json: {file}\n")
    assert "951.80 B parameters" in written.stdout
    assert json.loads(file.read_text()) == found
    # Wherever it stands, the config is no file.
    before = _plan("--json", "jupiter_1t", "--cluster", "jupiter")
    assert json.loads(before.stdout.removesuffix("False\n")) == found
