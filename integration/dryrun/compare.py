"""The dry run beside the plan, by cause and kind, and how it ends. No torch here."""

from collections import defaultdict
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from integration.dryrun.request import Request
from integration.ground.errors import UserError
from integration.jobs.cluster import load
from integration.jobs.spec import JobSpec
from integration.plan import memory, traffic
from integration.plan.levers import Levers
from integration.plan.params import Place, held

# Too small for the planner to count: 8 B an expert and layer, 4 B a parameter or an expert.
TOKEN_COUNTS, GRADIENT_NORM, ROUTER_BALANCE = "token counts", "gradient norm", "router balance"
SMALL = (TOKEN_COUNTS, GRADIENT_NORM, ROUTER_BALANCE)
PLANNED = (
    traffic.GATHER_FORWARD,
    traffic.GATHER_BACKWARD,
    traffic.REDUCE,
    traffic.REPLICAS,
    traffic.EXPERTS,
    traffic.TENSOR,
    traffic.PIPELINE,
    traffic.MUON,
)

KEPT = ("parameters", "gradients", "optimizer state", "RoPE caches")
BOUNDARIES = "boundary activations"
# Phase of the dry run -> the planner's moments that are in it.
MOMENTS = {"loss": ("loss",), "backward": ("recomputation", "reduction")}
# Kept through the step, made by the optimizer's first one, or not of tensors.
BESIDE = (*KEPT, BOUNDARIES, memory.MUON_BUFFERS, "NCCL", "CUDA context")


# Plan and dry run agree within this share of what the dry run found; else a dry run's exit code.
AGREES, DISAGREES = 0.05, 3


@dataclass(frozen=True, slots=True)
class Pair:
    """One number of both; ``plan`` is None where the planner does not count it."""

    name: str
    plan: float | None
    found: float

    @property
    def difference(self) -> float | None:
        """How far the plan is above (+) or below (-) what the dry run found."""
        if self.plan is None or not self.found:
            return None if not self.plan else float("inf")
        return self.plan / self.found - 1

    @property
    def agrees(self) -> bool:
        return self.plan is None or abs(self.plan - self.found) <= AGREES * self.found


def _levers(found: dict[str, Any]) -> Levers:
    return Levers.of(found["contributions"])


def disagreements(job: JobSpec, rank: int, found: dict[str, Any]) -> list[str]:
    """Return in words where the plan is further from the dry run than AGREES.

    Elements of parameters, bytes on the host, bytes that are received, and bytes that stay between
    steps; not the peaks, of which the plan has an upper bound.
    """
    pairs = [*parameters(job, rank, found).values(), *host(job, rank, found)]
    if "collectives" in found:
        pairs += [*traffic_by_cause(job, rank, found), *state(job, rank, found)]
    return [
        f"{pair.name}: {pair.plan:,.0f} planned, {pair.found:,.0f} found"
        for pair in pairs
        if not pair.agrees
    ]


def parameters(job: JobSpec, rank: int, found: dict[str, Any]) -> dict[str, Pair]:
    """Return elements that the rank holds of each kind of parameter, by name."""
    planned = {h.kind.name: float(h.count * h.numel) for h in held(job, Place.of(job, rank))}
    rows = {
        row["name"].removeprefix("layers.*."): float(row["count"] * prod(row["local_shape"]))
        for row in found["placements"]
    }
    return {
        name: Pair(name, planned.get(name, 0.0), rows.get(name, 0.0))
        for name in dict.fromkeys([*rows, *planned])
    }


def host(job: JobSpec, rank: int, found: dict[str, Any]) -> list[Pair]:
    """Return bytes on the rank's host by item; its process, which a dry run has not, left out."""
    planned = memory.of_rank(job, load(job.cluster), _levers(found), rank).host
    names = dict.fromkeys([*found["host"], *planned])
    del names["process"]
    return [Pair(name, planned.get(name, 0.0), found["host"].get(name, 0.0)) for name in names]


def traffic_by_cause(job: JobSpec, rank: int, found: dict[str, Any]) -> list[Pair]:
    """Return bytes that the rank receives in a step, by cause.

    Muon's are the mean over the ranks in both: which ones compute a matrix is DistMuon's choice.
    """
    flows = traffic.flows(job, load(job.cluster), _levers(found), rank)
    planned: dict[str, float] = defaultdict(float)
    for flow in flows:
        if flow.link in (traffic.NETWORK, traffic.NODE):
            planned[flow.cause] += flow.bytes
    received: dict[str, float] = defaultdict(float)
    for row in found["collectives"]:
        received[row["cause"]] += row["received"]
    if traffic.MUON in received:
        received[traffic.MUON] = found["muon_mean_bytes"]
    return [
        Pair(cause, None if cause in SMALL else planned[cause], received[cause])
        for cause in (*PLANNED, *SMALL)
        if planned[cause] or received[cause]
    ]


def state(job: JobSpec, rank: int, found: dict[str, Any]) -> list[Pair]:
    """Return bytes that stay between steps, by the planner's items."""
    chosen = _levers(found)
    place = Place.of(job, rank)
    planned = memory.sharded_state(job, chosen, held(job, place))
    planned["RoPE caches"] = float(memory.rope_bytes(job, chosen, place.stage))
    return [Pair(name, planned[name], found["memory"][name]) for name in KEPT]


def peaks(job: JobSpec, rank: int, found: dict[str, Any]) -> list[Pair]:
    """Return most bytes at once of what comes and goes in a phase, boundary activations left out:
    fake tensors are not offloaded."""
    planned = memory.of_rank(job, load(job.cluster), _levers(found), rank).moments
    totals = {
        name: sum(size for item, size in items.items() if item not in BESIDE)
        for name, items in planned.items()
    }
    pairs = []
    for phase, peak in found["peaks"].items():
        moments = [totals[name] for name in MOMENTS.get(phase, ()) if name in totals]
        size = sum(size for item, size in peak.items() if item != BOUNDARIES)
        pairs.append(Pair(phase, max(moments, default=None), float(size)))
    return pairs


def as_json(job: JobSpec, request: Request, found: dict[str, Any]) -> dict[str, Any]:
    """Return ``found`` with what was asked, and with the plan's numbers beside it."""
    plan = {
        "parameters": list(map(asdict, parameters(job, request.rank, found).values())),
        "host": list(map(asdict, host(job, request.rank, found))),
    }
    if "collectives" in found:
        asked = (job, request.rank, found)
        plan["received"] = list(map(asdict, traffic_by_cause(*asked)))
        plan["kept"] = list(map(asdict, state(*asked)))
        plan["peaks"] = list(map(asdict, peaks(*asked)))
    return {
        "kind": "dryrun",
        "config": job.name,
        "rank": request.rank,
        "world": job.ranks,
        "layers": job.shape.layers,
        **found,
        "beside_the_plan": plan,
    }


def complaint(found: dict[str, Any]) -> UserError | None:
    """Return the error to end with, if any.

    Its exit code is 1 where the fake step did not end or a check is broken, and 3 where all holds
    but the plan counts otherwise.
    """
    if found["refused"]:
        return UserError(f"{found['refused']}; see all of it with --debug", exit_code=1)
    broken = [f"{c['name']}: {c['broken']}" for c in found["checks"] if c["broken"]]
    if broken:
        return UserError("not so: " + "; and ".join(broken), exit_code=1)
    if found["disagreements"]:
        return UserError(
            f"the plan is more than {AGREES:.0%} off: {'; '.join(found['disagreements'])}; "
            "one of the two is wrong: please report it",
            exit_code=DISAGREES,
        )
    return None
