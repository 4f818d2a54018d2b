"""The order of the rungs, what the first one needs, and what changes a job's numbers. No torch.

The order follows ``Requires:`` and, for the levers that were published, the published ladder:
activation offload, Newton-Schulz on the GPU, async unshard.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from integration.jobs.spec import JobSpec
from integration.patchset import repository
from integration.patchset.patch import Contribution

# Contribution -> why it stands here.
ORDER = {
    "cpu_device": "nothing trains on a CPU without it; on a GPU it does nothing",
    "dtensor_cpu_rng": "offloaded weights get no values without it, and it decides which",
    "trunc_normal_dtensor": "the time to the first step, of all later rungs too",
    "distinct_seed_axes": "seeds, like the two before; nothing of a step",
    "fsdp_expert_shard_check": "a check before the first step; nothing of a step",
    "shared_rope_cache": "memory that the layers hold from the start",
    "activation_offload": "370 to 508 tokens/s in the published ladder",
    "moe_combine_memory": "memory of backward: the peak that is left when blocks keep nothing",
    "dedup_dispatch": "the other change of the experts' dispatch; the job does not name it yet",
    "cpu_grad_norm": "the read of offloaded gradients between backward and optimizer",
    "dist_muon_any_device": "the next ones need it; the job does not use Muon yet",
    "flex_shard_muon": "the job changes from AdamW to Muon, which later ones make faster",
    "flex_shard_return_buffer": "right updates of mixed buckets; the next one needs it",
    "dist_muon_batched_compute": "the next ones need it",
    "muon_gpu_newton_schulz": "441 to 597 tokens/s; offloaded weights have no Muon before it",
    "flex_shard_newton_schulz": "less work in the same place",
    "flex_shard_split_fused": "needs the three before; the job does not ask for it",
    "flex_shard_fast_planning": "the time to the first step, now that there is Muon to plan",
    "flex_shard_joint_axes": "other layouts of Muon's parameters; needs the one before",
    "unshard_async_op": "a public name for what the next one calls; nothing of a step",
    "fsdp_unshard_async_op": "996 to 1,210 tokens/s in the published ladder",
    "unshard_stale_weights": "the next one needs it; the job itself never steps on stale weights",
    "unshard_async_h2d": "the copies that remain exposed after the ones before",
    "embedding_skip_backward_gather": "one all-gather less, when the others have been hidden",
}


NEWTON_SCHULZ = "muon_gpu_newton_schulz"


@dataclass(frozen=True, slots=True)
class Place:
    """What of a job, and of where it runs, decides which contributions act."""

    gpu: bool
    cpu_offload: bool
    muon: bool
    ranks: int = 1

    @classmethod
    def of(cls, job: JobSpec, *, gpu: bool, ranks: int = 1, options: Sequence[str] = ()) -> "Place":
        """Return the place of ``job``; TorchTitan's ``options`` may switch the offload."""
        offload = job.cpu_offload
        for option in options:
            name = option.replace("_", "-")
            if name == "--training.enable-cpu-offload":
                offload = True
            if name == "--training.no-enable-cpu-offload":
                offload = False
        return cls(gpu, offload, job.optimizer == "muon", ranks)

    @property
    def newton_schulz_can_move(self) -> bool:
        """Whether Newton-Schulz can run on the CPU instead, beside a GPU that does the rest.

        On one rank only: several exchange shards with NCCL, which has no tensors of a CPU.
        """
        return self.gpu and self.cpu_offload and self.muon and self.ranks == 1

    @property
    def least(self) -> tuple[str, ...]:
        """The fewest contributions with which this job starts, found by trying.

        On a CPU, pristine TorchTitan asks for CUDA. With weights on the host beside a GPU,
        ``trunc_normal_`` draws the same values for ever (pytorch#180088).
        """
        if not self.gpu:
            return ("cpu_device",)
        return ("dtensor_cpu_rng",) if self.cpu_offload else ()


def sort(contributions: Sequence[Contribution]) -> list[str]:
    """Return all names in the order of the rungs; those that ``ORDER`` does not know come last."""
    known = [c.name for c in contributions]
    ordered = [name for name in ORDER if name in known]
    ordered += [name for name in known if name not in ORDER]
    done: list[str] = []
    for name in ordered:
        # In series order, in which nothing comes before what it requires.
        done += [c.name for c in repository.close(contributions, [name]) if c.name not in done]
    return done


def changes(contribution: Contribution, place: Place) -> str:
    """Return why ``contribution`` may change this job's numbers, or nothing if it must not.

    Its own reason stands in its header. Two more change nothing in a job that stays as it is, but
    this job uses them as soon as they are in the set (``integration/ranks/contributed.py``).
    """
    numerics = " ".join(contribution.values("Numerics"))
    if numerics != "bitwise":
        return numerics.removeprefix("changes").strip() or "its header promises nothing"
    if not place.muon:
        return ""
    if contribution.name == "flex_shard_muon":
        return "the job trains with Muon, without it with AdamW"
    if contribution.name == "flex_shard_newton_schulz" and place.gpu:
        return "on a GPU the job asks for the Gram method"
    return ""
