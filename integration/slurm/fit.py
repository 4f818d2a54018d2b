"""Whether a job fits the cluster it is launched on, as the planner counts. No torch here."""

from collections.abc import Collection

from integration.jobs.cluster import Cluster
from integration.jobs.spec import JobSpec
from integration.plan import plan
from integration.plan.levers import Levers


def check(
    job: JobSpec, cluster: Cluster, *, names: Collection[str] | None, own_layout: bool
) -> str | None:
    """Refuse a job that cannot run; return what speaks against one that may not fit, if anything.

    A plan may be wrong, and TorchTitan's options change sizes: what does not fit is only said. A
    cluster whose file says nothing of its hardware is not planned.

    Args:
        names: the contributions of the set; None for all.
        own_layout: the user's options ask for another layout, which TorchTitan judges.

    Raises:
        UserError: an impossible layout, more ranks than GPUs, or FP8 on GPUs without.
    """
    if not own_layout:
        job.check()
    if cluster.hardware is None:
        return None
    plan.check(job, cluster)
    if own_layout:
        return None
    levers = Levers.of(names)
    too_large = plan.make(job, cluster, levers).too_large
    if not too_large:
        return None
    named = cluster.name if cluster.known else cluster.file
    command = [f"integration plan {job.name} --cluster {named} --ranks {job.ranks}"]
    command += [f"--without {name}" for name in levers.off()]
    return (
        f"{job.name} does not fit by its plan, which leaves TorchTitan's options out: "
        f"{', '.join(too_large)}; see: {' '.join(command)}"
    )
