"""What a dry run says to a machine, and with which exit code it ends. No torch here."""

from dataclasses import asdict
from typing import Any

from integration.dryrun import compare
from integration.dryrun.request import Request
from integration.ground.errors import UserError
from integration.jobs.spec import JobSpec

# The exit code of a dry run whose numbers the plan does not agree with.
DISAGREES = 3


def as_json(job: JobSpec, request: Request, found: dict[str, Any]) -> dict[str, Any]:
    """Return ``found`` with what was asked, and with the plan's numbers beside it."""
    plan = {
        "parameters": list(map(asdict, compare.parameters(job, request.rank, found).values())),
        "host": list(map(asdict, compare.host(job, request.rank, found))),
    }
    if "collectives" in found:
        asked = (job, request.rank, found)
        plan["received"] = list(map(asdict, compare.traffic_by_cause(*asked)))
        plan["kept"] = list(map(asdict, compare.state(*asked)))
        plan["peaks"] = list(map(asdict, compare.peaks(*asked)))
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
            f"the plan is more than {compare.AGREES:.0%} off: {'; '.join(found['disagreements'])}; "
            "one of the two is wrong: please report it",
            exit_code=DISAGREES,
        )
    return None
