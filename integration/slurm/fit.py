"""Whether a job fits the cluster it is launched on, as the planner counts. No torch here."""

from collections.abc import Collection

from integration.jobs import cluster as planned
from integration.jobs.spec import JobSpec
from integration.plan import plan
from integration.plan.levers import Levers
from integration.slurm.cluster import Cluster


def check(
    job: JobSpec, cluster: Cluster, *, names: Collection[str] | None, own_layout: bool
) -> str | None:
    """Refuse a job that cannot run; return what speaks against one that may not fit, if anything.

    A plan may be wrong, and TorchTitan's options change sizes: what does not fit is only said. A
    cluster that the planner does not know by its name and GPUs a node is not planned.

    Args:
        names: the contributions of the set; None for all.
        own_layout: the user's options ask for another layout, which TorchTitan judges.

    Raises:
        UserError: an impossible layout, more ranks than GPUs, or FP8 on GPUs without.
    """
    if not own_layout:
        job.check()
    if cluster.name not in planned.known():
        return None
    has = planned.load(cluster.name)
    if has.gpus_a_node != cluster.gpus:
        return None
    plan.check(job, has)
    if own_layout:
        return None
    levers = Levers.of(names)
    too_large = plan.make(job, has, levers).too_large
    if not too_large:
        return None
    command = [f"integration plan {job.name} --cluster {has.name} --ranks {job.ranks}"]
    command += [f"--without {name}" for name in levers.off()]
    return (
        f"{job.name} does not fit by its plan, which leaves TorchTitan's options out: "
        f"{', '.join(too_large)}; see: {' '.join(command)}"
    )
