"""A plan: memory, traffic and time of a job on a cluster, and what each contribution changes."""

from dataclasses import dataclass

from integration.ground.errors import UserError
from integration.ground.units import GIB
from integration.jobs.cluster import Cluster
from integration.jobs.spec import JobSpec
from integration.plan import memory, step_time, topology, traffic
from integration.plan.levers import Levers
from integration.plan.memory import RankMemory
from integration.plan.step_time import StepTime
from integration.plan.traffic import Flow

DOES_NOT_FIT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one rank and the worst rank need; ``flows`` and ``time`` are the slowest stage's."""

    job: JobSpec
    cluster: Cluster
    levers: Levers
    rank: RankMemory
    worst: RankMemory
    flows: list[Flow]
    time: StepTime
    warnings: list[str]

    @property
    def fits(self) -> bool:
        return not self.too_large

    @property
    def exit_code(self) -> int:
        """What ``integration plan`` ends with: 0, or 3 where the job does not fit."""
        return 0 if self.fits else DOES_NOT_FIT

    @property
    def too_large(self) -> list[str]:
        """What does not fit, in words."""
        checks = (
            ("GPU", self.worst.hbm_total, self.cluster.gpu.hbm_gib),
            ("host", self.worst.host_total, self.cluster.host.memory_gib),
        )
        return [
            f"rank {self.worst.rank} needs {need / GIB:.1f} GiB on the {where}, "
            f"which has {has:.1f} GiB"
            for where, need, has in checks
            if need > has * GIB
        ]


def check(job: JobSpec, cluster: Cluster) -> None:
    """Refuse a job for which ``cluster`` has not the GPUs, whatever its layout.

    Raises:
        UserError: more ranks than GPUs, or FP8 on a GPU without.
    """
    gpus = cluster.nodes * cluster.gpus_a_node
    if job.ranks > gpus:
        raise UserError(
            f"{job.name} has {job.ranks} ranks, one a GPU, and {cluster.name} has {gpus} GPUs "
            f"({cluster.nodes} nodes of {cluster.gpus_a_node}); name fewer with --ranks (launch: "
            "--nodes)"
        )
    if job.fp8 and cluster.gpu.fp8_tflops is None:
        raise UserError(
            f"{job.name} multiplies in FP8, and the {cluster.gpu.name} of {cluster.name} has none "
            f"(no gpu.fp8_tflops); name one that has, as --cluster jupiter, or the config "
            f"{job.name.removesuffix('_fp8')}"
        )


def make(job: JobSpec, cluster: Cluster, levers: Levers | None = None, rank: int = 0) -> Plan:
    """Return the plan of ``job``.

    Raises:
        UserError: an impossible layout, more ranks than GPUs, a rank that is not there, or FP8 on
            a GPU without.
    """
    job.check()
    check(job, cluster)
    levers = levers or Levers()
    if not 0 <= rank < job.ranks:
        raise UserError(f"--rank {rank} is not there: {job.name} has ranks 0 to {job.ranks - 1}")
    worst = memory.worst(job, cluster, levers)
    # The slowest stage rules a pipeline; without one all ranks move the same.
    a_stage = job.ranks // job.layout.pp
    stages = [stage * a_stage for stage in range(job.layout.pp)]
    timed = {first: traffic.flows(job, cluster, levers, first) for first in stages}
    times = {
        first: step_time.step(job, cluster, levers, flows, first) for first, flows in timed.items()
    }
    slowest = max(times, key=lambda first: times[first].seconds)
    return Plan(
        job=job,
        cluster=cluster,
        levers=levers,
        rank=memory.of_rank(job, cluster, levers, rank),
        worst=worst,
        flows=timed[slowest],
        time=times[slowest],
        warnings=topology.warnings(job, cluster),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What leaving one contribution out adds (bytes, seconds)."""

    name: str
    hbm: float
    host: float
    network: float
    seconds: float


def changes(full: Plan) -> list[Change]:
    """Return for each contribution that is on what the job costs more without it."""
    found = []
    for name in Levers.names():
        if name in full.levers.off():
            continue
        less = make(full.job, full.cluster, full.levers.without(name))
        found.append(
            Change(
                name=name,
                hbm=less.worst.hbm_total - full.worst.hbm_total,
                host=less.worst.host_total - full.worst.host_total,
                network=traffic.total(less.flows, link=traffic.NETWORK)
                - traffic.total(full.flows, link=traffic.NETWORK),
                seconds=less.time.seconds - full.time.seconds,
            )
        )
    return found
