"""Reads a collective from its c10d operator: the group's ranks, and bytes sent and received."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

NAMESPACES = ("c10d", "_c10d_functional")
GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL, SEND, RECEIVE = "all-to-all", "send", "receive"

_OPS = {
    "_allgather_base_": GATHER,
    "allgather_": GATHER,
    "all_gather_into_tensor": GATHER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "allreduce_": ALL_REDUCE,
    "all_reduce": ALL_REDUCE,
    "alltoall_base_": ALL_TO_ALL,
    "alltoall_": ALL_TO_ALL,
    "all_to_all_single": ALL_TO_ALL,
    "send": SEND,
    "recv_": RECEIVE,
}
# Only wait, or tell ranks of one another; no data.
_SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One call as this rank sees it.

    ``sent`` and ``received`` are bytes over any link, what a rank keeps for itself left out: by
    the ring, ``full * (n - 1) / n`` of an all-gather or reduce-scatter of ``full`` bytes, twice
    that of an all-reduce; for an all-to-all, what its splits say.
    """

    op: str
    ranks: tuple[int, ...]
    sent: float
    received: float
    dtype: torch.dtype


def read(func: Any, args: tuple) -> Collective | None:
    """Return the collective that ``func`` is, or None where it moves nothing.

    Raises:
        LookupError: an operator that is not known here.
    """
    name = func._schema.name.split("::")[1]
    if name in _SILENT:
        return None
    if name not in _OPS:
        raise LookupError(f"the dry run cannot count the collective {name}")
    op, group = _OPS[name], _group(args)
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1:
        return None
    sent, received = _bytes(name, op, args, dist.get_rank(group), len(ranks))
    return Collective(op=op, ranks=ranks, sent=sent, received=received, dtype=_dtype(args))


def _bytes(name: str, op: str, args: tuple, me: int, n: int) -> tuple[float, float]:
    if op == ALL_TO_ALL:
        if name == "alltoall_":
            outputs, inputs = args[0], args[1]
            return _nbytes(inputs) - _nbytes(inputs[me]), _nbytes(outputs) - _nbytes(outputs[me])
        if name == "alltoall_base_":
            return _exchanged(args[1], args[4], me, n), _exchanged(args[0], args[3], me, n)
        return _exchanged(args[0], args[2], me, n), _exchanged(args[0], args[1], me, n)
    if op in (SEND, RECEIVE):
        size = float(_nbytes(args[0]))
        return (size, 0.0) if op == SEND else (0.0, size)
    full = _nbytes(args[1] if name == "_reduce_scatter_base_" else args[0])
    if name == "all_gather_into_tensor":
        full *= n
    moved = full * (n - 1) / n * (2 if op == ALL_REDUCE else 1)
    return moved, moved


def _exchanged(tensor: torch.Tensor, splits: list[int], me: int, n: int) -> float:
    if not splits:
        return _nbytes(tensor) * (n - 1) / n
    row = _nbytes(tensor) / max(1, tensor.shape[0])
    return row * (sum(splits) - splits[me])


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_nbytes, tensors))


def _dtype(args: Any) -> torch.dtype:
    first = args[0]
    while not isinstance(first, torch.Tensor):
        first = first[0]
    return first.dtype


def _group(args: tuple) -> dist.ProcessGroup:
    """Return the group: an argument of c10d's operators, the last name in functional ones."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    names = [value for value in args if isinstance(value, str)]
    return _resolve_process_group(GroupName(names[-1]))
