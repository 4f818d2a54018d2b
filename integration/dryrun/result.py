"""What a dry run says to a machine, and with which exit code it ends. No torch here."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from integration.dryrun import compare
from integration.dryrun.request import Request
from integration.ground.errors import UserError
from integration.jobs.spec import JobSpec

# The exit code of a dry run whose numbers the plan does not agree with.
DISAGREES = 3


def require_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before the minutes of a run.

    Raises:
        UserError: it is read-only or a folder, or its own folder is missing or read-only.
    """
    if path.exists():  # /dev/stdout, say, whose folder is read-only
        good = not path.is_dir() and os.access(path, os.W_OK)
    else:
        good = path.parent.is_dir() and os.access(path.parent, os.W_OK)
    if not good:
        raise UserError(
            f"expected a file that can be written for --json, got {path}; nothing was run: make "
            f"{path.parent} a folder that you can write, or name another file"
        )


def write(path: Path, job: JobSpec, request: Request, found: dict[str, Any]) -> None:
    """Write ``found`` as JSON, with what was asked and the plan's numbers beside it.

    Raises:
        UserError: the file cannot be written.
    """
    plan = {
        "parameters": list(map(asdict, compare.parameters(job, request.rank, found).values())),
        "host": list(map(asdict, compare.host(job, request.rank, found))),
    }
    if "collectives" in found:
        asked = (job, request.rank, found)
        plan["received"] = list(map(asdict, compare.traffic_by_cause(*asked)))
        plan["kept"] = list(map(asdict, compare.state(*asked)))
        plan["peaks"] = list(map(asdict, compare.peaks(*asked)))
    values = {
        "kind": "dryrun",
        "config": job.name,
        "rank": request.rank,
        "world": job.ranks,
        "layers": job.shape.layers,
        **found,
        "beside_the_plan": plan,
    }
    try:
        path.write_text(json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"the dry run cannot be written to {path} ({error.strerror}); name another file with "
            "--json"
        ) from None


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
