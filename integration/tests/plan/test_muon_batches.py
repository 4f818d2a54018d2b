"""The planner's largest batch of Muon's is the one that the patches make of the same matrices."""

import json
import random
import subprocess
import sys

from integration.dryrun import start
from integration.ground.paths import REPO
from integration.jobs.catalog import JUPITER_1T
from integration.patchset import overlay
from integration.plan import host, memory
from integration.plan.host import Shard
from integration.plan.levers import Levers
from integration.plan.params import Place, held

# Of the 1T job's experts and smaller ones: some fit a slot often, some once, the last one never.
SIDES = [(1792, 6144), (512, 4096), (64, 64), (12_288, 7168)]

CODE = """
import json, sys
import torch
from torchtitan.distributed.flex_shard._host_offload import _fit_to_slots, _largest_batch_numel
from torchtitan.distributed.flex_shard._matrix_batches import (
    _batch_stacks, _MatrixStack, _NewtonSchulzSettings
)
from torchtitan.distributed.flex_shard._muon_host_offload import HostOffloadOptions

settings = _NewtonSchulzSettings((1.0, 1.0, 1.0), 5, 1e-7)
slot = _largest_batch_numel(HostOffloadOptions().max_buffer_gib * 2**30, torch.float32)
found = []
for case in json.loads(sys.argv[1]):
    stacks = [
        _MatrixStack(None, n, *sides, torch.float32, settings, ()) for n, *sides in case
    ]
    batches = _batch_stacks(stacks, matrices_per_batch=8, whole_stacks=False)
    found.append([max(b.numel for b in each) for each in (batches, _fit_to_slots(batches, slot))])
print(json.dumps(found))
"""


def test_the_largest_batch_is_what_the_patches_make():
    rng = random.Random(7)
    cases = []
    for _ in range(300):
        sides = rng.choices(SIDES, k=rng.randint(1, 3))
        turned = [side[:: rng.choice([1, -1])] for side in sides]
        cases.append([(rng.randint(1, 40), rows, columns) for rows, columns in turned])
    env = start._environment(overlay.build())
    line = [sys.executable, "-c", CODE, json.dumps(cases)]
    ended = subprocess.run(line, cwd=REPO, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for case, found in zip(cases, json.loads(ended.stdout), strict=True):
        shards = [
            Shard(4 * n * rows * columns, 1, 1, muon=True, whole=True, rows=rows, columns=columns)
            for n, rows, columns in case
        ]
        mine = [host.largest_batch(shards, streamed=streamed) for streamed in (False, True)]
        assert mine == found, case


def test_the_buffers_of_the_1t_job_are_within_their_bound():
    """A slot has room for six experts: nine are cut to five and four."""
    shards = memory.shards(JUPITER_1T, Levers(), held(JUPITER_1T, Place.of(JUPITER_1T, 0)))
    assert host.largest_batch(shards, streamed=True) == 5 * 1792 * 6144
    assert host.largest_batch(shards, streamed=False) == 9 * 1792 * 6144
