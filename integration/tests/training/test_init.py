"""CPU-offloaded initialisation: it ends, shards differ, replicas agree, the law is the right one.

On the pins a CPU draw of a DTensor repeats on every rank (and, on a GPU mesh, on every call, so
that ``trunc_normal_`` never ends). The contribution ``dtensor_cpu_rng`` mends that with no seed
axis set. Runs on two GPUs where they are, else on two gloo ranks.
"""

import json
import math
import subprocess
from pathlib import Path

import pytest

from integration.data import source as data
from integration.patchset import overlay
from integration.ranks.moe import INIT_STD
from integration.train import launch, summary
from integration.train.run import Job, Run

pytestmark = pytest.mark.timeout(600)

OFFLOAD = ("--training.enable_cpu_offload",)
# Expert parallelism shares out experts, so both kinds of mesh axis occur: FSDP's and EP's.
SHARDED = (*OFFLOAD, "--parallelism.expert_parallel_degree", "2")
REPLICATED = (
    *OFFLOAD,
    *("--parallelism.data_parallel_replicate_degree", "2"),
    *("--parallelism.expert_parallel_degree", "1"),
)
LAYERS = 4  # of mini
RANKS = 2


def _inspect(folder: Path, options: tuple[str, ...]) -> list[dict]:
    tokenizer, dataset = data.default_folders()
    job = Job("mini", str(dataset), str(tokenizer), options, ())
    start = launch.Launch(
        run=Run(folder),
        job=job,
        patched=overlay.build(),
        ranks=RANKS,
        vocab=data.tokenizer_size(tokenizer),
    )
    line, env = start.command(), start.environment()
    at = line.index("torchtitan.train")
    out = folder / "rows.json"
    line[at : at + 1] = ["integration.tests.training.inspect_init", str(out)]
    # No hang: the pins' loop never ends.
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    logs = "\n".join(p.read_text()[-3000:] for p in folder.glob("logs/**/stderr.log"))
    assert done.returncode == 0, done.stderr[-2000:] + logs
    return json.loads(out.read_text())


def _law(name: str) -> tuple[float, float]:
    """Return mean and standard deviation of the initialiser of ``name``.

    ``trunc_normal_`` cuts at +-2, which is 100 and more standard deviations here: the truncated
    law's standard deviation is the normal's to the last bit.
    """
    if "norm" in name:
        return 1.0, 0.0
    into_residual = name.endswith(("wo.weight", "w2_EDF"))
    return 0.0, INIT_STD / math.sqrt(2 * LAYERS) if into_residual else INIT_STD


@pytest.mark.parametrize("options", [SHARDED, REPLICATED], ids=["fsdp+ep", "hsdp"])
def test_offloaded_init(tmp_path, options):
    rows = _inspect(tmp_path, options)
    assert len(rows) == 47
    random = [row for row in rows if _law(row["name"])[1] > 0]
    assert [row["name"] for row in rows if not row["replicas_equal"]] == []
    assert {row["device"] for row in rows} == {"cpu"}
    if options is SHARDED:
        assert [row["name"] for row in random if row["shards"] != RANKS] == []
        assert [row["name"] for row in random if not row["shards_differ"]] == []
    else:
        assert {row["replicas"] for row in rows} == {RANKS}
    far = []
    for row in rows:
        mean, std = _law(row["name"])
        root = math.sqrt(row["numel"])
        # Five standard errors: of the mean, std/sqrt(n); of the deviation, std/sqrt(2n).
        if abs(row["mean"] - mean) > 5 * std / root:
            far.append((row["name"], "mean", row["mean"]))
        if abs(row["std"] - std) > 5 * std / (math.sqrt(2) * root):
            far.append((row["name"], "std", row["std"]))
    assert far == []


def test_the_loss_falls_alike_with_and_without_offload(trainer):
    """Alike, not equal: on a GPU the two start from other draws."""
    options = ("--training.steps", "10", "--checkpoint.no-enable")
    curves = []
    for extra in ((), OFFLOAD):
        training = trainer.train("--ranks", str(RANKS), "--", *options, *extra)
        folder = sorted(training.outputs.glob("mini/*"))[-1]
        curves.append(summary.scalars(folder / "tb", summary.LOSS))
    without, offloaded = curves
    assert list(without) == list(offloaded) == list(range(1, 11))
    for step, loss in without.items():
        assert offloaded[step] == pytest.approx(loss, rel=0.05), step
    assert offloaded[10] < 0.95 * offloaded[1]
