"""Bitwise parity: a contribution that should not change numbers must not change one bit.

The same seeded training, with the contribution and without it: every step's loss and gradient
norm, at full precision, must be equal. On a CPU, where pristine TorchTitan cannot train, *without*
means the pins and ``cpu_device``; that one is compared where pristine trains, on a GPU.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from integration.data import source as data
from integration.evidence import record as evidence
from integration.ground import machine
from integration.patchset import overlay
from integration.patchset.patch import Contribution
from integration.train import launch, summary
from integration.train.run import Job, Run

# AdamW, as the set without ``flex_shard_muon`` has nothing else.
CONFIG = "mini_adamw"
STEPS = 10
CPU_BASE = "cpu_device"
# Long enough for every path of the model, short enough for two cores.
OPTIONS = (
    *("--training.steps", str(STEPS)),
    *("--debug.seed", "42", "--debug.deterministic"),
    "--checkpoint.no-enable",
)


@dataclass(frozen=True, slots=True)
class Curve:
    """Loss and gradient norm of every step, as float32 values in Python floats."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Parity:
    """What the comparison of one contribution gave."""

    name: str
    equal: bool | None  # None: not compared
    words: str
    curve: Curve | None = None


def compare(contributions: Sequence[Contribution], folder: Path) -> list[Parity]:
    """Train once for the baseline and once for each contribution whose header says ``bitwise``.

    Args:
        folder: where the runs' logs and TensorBoard files go.
    """
    gpus = machine.gpu_count()
    base = () if gpus else (CPU_BASE,)
    baseline: Curve | None = None
    results = []
    for contribution in contributions:
        if contribution.values("Numerics") != ("bitwise",):
            results.append(Parity(contribution.name, None, "changes numbers, as its header says"))
            continue
        if contribution.name in base:
            results.append(
                Parity(contribution.name, None, "needs a GPU: pristine trains nowhere else")
            )
            continue
        if baseline is None:
            baseline = curve(base, folder / "baseline", ranks=gpus or 2)
        got = curve((*base, contribution.name), folder / contribution.name, ranks=gpus or 2)
        results.append(_judge(contribution.name, baseline, got))
    return results


def record(contribution: Contribution, parity: Parity) -> Path | None:
    """Keep a comparison that was made as evidence; return the file."""
    if parity.curve is None:
        return None
    device = "cuda" if machine.gpu_count() else "cpu"
    results = {
        "config": CONFIG,
        "compared_with": "pristine" if device == "cuda" else f"pins and {CPU_BASE}",
        "options": " ".join(OPTIONS),
        "equal": parity.equal,
        "verdict": parity.words,
        **asdict(parity.curve),
    }
    command = f"integration test {contribution.name} --prove --record"
    return evidence.write(contribution, f"parity-{device}", command, results)


def curve(names: Sequence[str], folder: Path, *, ranks: int) -> Curve:
    """Train ``CONFIG`` for ten seeded steps under the overlay of ``names``; return its curve.

    Raises:
        UserError: the training failed.
    """
    patched = overlay.build(names)
    tokenizer, dataset = data.default_folders()
    job = Job(CONFIG, str(dataset), str(tokenizer), OPTIONS, patched.names)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix="run-") as run_folder:
        run = Run(Path(run_folder))
        start = launch.Launch(
            run=run,
            job=job,
            patched=patched,
            ranks=ranks,
            vocab=data.tokenizer_size(tokenizer),
        )
        ended = launch.launch(start, show=launch.Show.NOTHING)
        if failure := launch.explain(run, ended):
            raise failure
        tb = run.folder / "tb"
        return Curve(
            tuple(summary.scalars(tb, summary.LOSS).values()),
            tuple(summary.scalars(tb, summary.GRAD_NORM).values()),
        )


def _judge(name: str, baseline: Curve, got: Curve) -> Parity:
    other, run = ({"loss": c.losses, "grad_norm": c.grad_norms} for c in (baseline, got))
    for logged in (*other.values(), *run.values()):
        if len(logged) != STEPS:
            return Parity(name, False, f"{len(logged)} of {STEPS} steps were logged", got)
    words = evidence.differing(run, other)
    return Parity(name, not words, words or f"bitwise equal over {STEPS} steps", got)
