"""The check at launch counts what the plan counts: every config, item by item, from real shards.

The models are TorchTitan's, parallelised on the meta device over a fake process group.
"""

import json
import subprocess
import sys

import pytest

from integration.dryrun import start
from integration.ground.units import GIB
from integration.jobs import catalog
from integration.jobs.cluster import load
from integration.patchset import overlay
from integration.plan import memory
from integration.plan.levers import Levers
from integration.ranks.host_budget import Need, Report, refusal
from integration.ranks.host_memory import Bound, HostMemory

# An FP8 model is only built on a GPU that has it; its weights are those of the plain one.
JOBS = [job for job in catalog.CATALOG.values() if not job.fp8]
# The largest shards and the smallest; of a pipeline, the first stage's and the last one's.
RANKS = {job.name: sorted({0, job.ranks - 1}) for job in JOBS}

# Imports are slow, and a process has one process group: each rank is a fork.
CODE = """
import json, os, sys
from integration.dryrun import built
from integration.dryrun.trainer import DryTrainer
from integration.jobs import catalog

class Enough(BaseException):
    pass

def write(job, rank, path):
    def parallelised(parts, config):
        with open(path, "w") as file:
            json.dump(built.host(parts, config, rank, job.ranks), file)
        raise Enough
    try:
        DryTrainer(job, rank, parallelised)
    except Enough:
        os._exit(0)

for name, ranks in json.loads(sys.argv[1]).items():
    for rank in ranks:
        if not os.fork():
            write(catalog.find(name), rank, f"{name}-{rank}")
        assert not os.wait()[1], (name, rank)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, dict[str, int]]]:
    folder = tmp_path_factory.mktemp("host")
    line = [sys.executable, "-W", "ignore", "-c", CODE, json.dumps(RANKS)]
    env = start._environment(overlay.build())
    ended = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return {
        name: {str(rank): json.loads((folder / f"{name}-{rank}").read_text()) for rank in ranks}
        for name, ranks in RANKS.items()
    }


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_the_check_counts_what_the_plan_counts(job, found):
    for rank in RANKS[job.name]:
        planned = memory.of_rank(job, load(job.cluster), Levers(), rank).host
        assert planned.pop("process")
        assert found[job.name][str(rank)] == planned


def test_the_1t_job_passes_the_check_with_what_its_plan_has(found):
    """96 nodes whose ranks have 108 GiB each: it was refused with 111.36."""
    job = catalog.JUPITER_1T
    has = load(job.cluster).host.memory_gib
    need = sum(found[job.name]["0"].values())
    bound = Bound("node", "the kernel (MemAvailable)", int(has * GIB))
    fits = Report(0, HostMemory("node", (bound,), {}), Need((("all", need),), pinned=0))
    assert refusal([fits]) is None
    assert need < (has - load(job.cluster).host.base_gib) * GIB
