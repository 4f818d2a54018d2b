"""Model FLOP utilisation of a rung, by the plan's count of FLOP. No torch."""

from integration.jobs import cluster
from integration.jobs.spec import JobSpec
from integration.plan import step_time


def peak_flops(machine: dict[str, str | int]) -> float | None:
    """Return the GPU's dense bf16 peak in FLOP/s, by its data sheet; None if no cluster has it."""
    gpu = str(machine.get("gpu", ""))
    for file in sorted(cluster.FOLDER.glob("*.toml")):
        known = cluster.load(file.stem).gpu
        if known.name in gpu:
            return known.peak_tflops * step_time.TERA
    return None


def mfu(
    job: JobSpec, machine: dict[str, str | int], tokens_a_gpu: float, seconds: float
) -> float | None:
    """Return the useful FLOP of a step over what the peak allows in ``seconds``.

    Recomputation does not count. Attention counts as causal over the whole sequence, so sequences
    of several documents, which attend to themselves alone, have none (TorchTitan's own figure
    counts attention uncausal).
    """
    peak = peak_flops(machine)
    if peak is None:
        return None
    return step_time.token_flops(job) * tokens_a_gpu / seconds / peak
