"""Bytes of every collective by hand, and the life of storages, on small real tensors."""

import os
import subprocess
import sys

import torch

from integration.dryrun.recorder import LiveBytes
from integration.ground.paths import REPO

# Rank 1 of 4. fp32: 4 B. A process of its own, as a process group is the process's.
CODE = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from integration.dryrun import collectives

class Read(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in collectives.NAMESPACES:
            call = collectives.read(func, args)
            if call is not None:
                print(call.op, call.sent, call.received, *call.ranks)
        return func(*args, **(kwargs or {}))

dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
small, large = torch.zeros(6), torch.zeros(24)
rows = torch.zeros(10, 2)
with Read():
    dist.all_gather_into_tensor(large, small)
    dist.reduce_scatter_tensor(small, large)
    dist.all_reduce(small)
    dist.all_to_all_single(torch.zeros(8, 2), rows, [1, 2, 2, 3], [4, 3, 2, 1])
    dist.all_to_all_single(large, large)
    dist.all_to_all(*([torch.zeros(n) for n in (1, 2, 3, 4)] for _ in range(2)))
    functional.all_to_all_single(rows, [1, 2, 2, 3], [4, 3, 2, 1], dist.group.WORLD).wait()
    functional.all_gather_single(small, 0, dist.group.WORLD).wait()
    functional.reduce_scatter_tensor(large, "sum", 0, dist.group.WORLD).wait()
    functional.all_reduce(small, "sum", dist.group.WORLD).wait()
    dist.send(small, 2)
    dist.recv(small, 0)
    try:
        dist.broadcast(small, 0)
    except LookupError as error:
        print(error)
"""
BY_HAND = """\
all-gather 72.0 72.0 0 1 2 3
reduce-scatter 72.0 72.0 0 1 2 3
all-reduce 36.0 36.0 0 1 2 3
all-to-all 56.0 48.0 0 1 2 3
all-to-all 72.0 72.0 0 1 2 3
all-to-all 32 32 0 1 2 3
all-to-all 56.0 48.0 0 1 2 3
all-gather 72.0 72.0 0 1 2 3
reduce-scatter 72.0 72.0 0 1 2 3
all-reduce 36.0 36.0 0 1 2 3
send 24.0 0.0 0 1 2 3
receive 0.0 24.0 0 1 2 3
the dry run cannot count the collective broadcast_
"""


def test_bytes_of_collectives():
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    line = [sys.executable, "-W", "ignore", "-c", CODE]
    answer = subprocess.run(line, env=env, capture_output=True, text=True)
    assert answer.stdout == BY_HAND, answer.stderr


def test_storages_live_and_die():
    live = LiveBytes()
    one = torch.empty(10)
    live.add(one, "a", "forward")
    live.add(one.view(5, 2), "b", "forward")  # the same storage
    assert live.now == {"a": 40}
    two = torch.empty(5)
    live.add(two, "b", "forward")
    del one
    assert live.now == {"a": 0, "b": 20}
    assert live.peaks == {"forward": {"a": 40, "b": 20}}
    live.move(two, "c")
    live.rename("c", "d")
    assert +live.now == {"d": 20}
    with live.follow_resizes(lambda: "backward"):
        two.untyped_storage().resize_(0)
        assert not +live.now
        two.untyped_storage().resize_(80)
    assert live.peaks["backward"] == {"d": 80}
    live.release(two)
    assert not +live.now
