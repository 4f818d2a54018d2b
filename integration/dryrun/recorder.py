"""Watches a fake step: each collective with its cause, and the memory of what operators return."""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.components.loss import ChunkedLossWrapper

from integration.dryrun import causes, collectives
from integration.dryrun.collectives import ALL_REDUCE, ALL_TO_ALL, RECEIVE, SEND, Collective
from integration.dryrun.live import LiveBytes

FORWARD, BACKWARD, LOSS = "forward", "backward", "loss"
CLIP, OPTIMIZER = "gradient norm", "optimizer"

WEIGHTS, REDUCED = "gathered weights and prefetch", "gradients being reduced"
BOUNDARIES, RECOMPUTED = "boundary activations", "recomputation and MoE buffers"
LOGITS, FORWARD_BUFFERS = "logits and loss chunks", "buffers of the forward pass"
_ITEMS = {FORWARD: FORWARD_BUFFERS, BACKWARD: RECOMPUTED, LOSS: LOGITS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Calls of one kind: what for, by which operator, on which mesh axis."""

    cause: str
    op: str
    axis: str
    degree: int
    part: str


@dataclass(frozen=True, slots=True)
class _Scope:
    """Work of FSDP that is under way: ``what`` for the parameters ``names``."""

    what: str
    state: TrainingState
    names: tuple[str, ...]


class Recorder(TorchDispatchMode):
    """Counts what runs while it is on; enter it inside the ``FakeTensorMode``.

    Args:
        axes: name of a mesh axis -> this rank's group on it.
        kept: tensors that are there before and after a step: memory does not count them.
    """

    def __init__(
        self, axes: Mapping[str, tuple[int, ...]], kept: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self.live = LiveBytes()
        self.calls: Counter[Row] = Counter()
        self.sent: Counter[Row] = Counter()
        self.received: Counter[Row] = Counter()
        # Parameters that were gathered for a backward pass.
        self.gathered_in_backward: set[str] = set()
        self._axes = axes
        for tensor in kept:
            self.live.add(_local(tensor), "", FORWARD)
            self.live.release(_local(tensor))
        self.live.peaks.clear()
        self._phase = self._last = FORWARD
        self._scopes: list[_Scope] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come by here as plain tensors
        if func.namespace in collectives.NAMESPACES:
            call = collectives.read(func, args)
            if call is not None:
                self._count(call)
        answer = func(*args, **(kwargs or {}))
        phase = self.phase
        if self._last == FORWARD != phase:  # what is left of the layers waits for backward
            self.live.rename(FORWARD_BUFFERS, BOUNDARIES)
        self._last = phase
        if phase not in (CLIP, OPTIMIZER):
            item = self._scopes[-1].what if self._scopes else _ITEMS[phase]
            for tensor in tree_leaves(answer):
                if isinstance(tensor, torch.Tensor):
                    self.live.add(tensor, item, phase)
        return answer

    @property
    def phase(self) -> str:
        # The chunks of the loss have their backward passes within it.
        if self._phase == FORWARD and torch._C._current_graph_task_id() != -1:
            return BACKWARD
        return self._phase

    @contextmanager
    def during(self, phase: str) -> Generator[None]:
        """Name what runs inside ``phase``."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def watching(self) -> Generator[None]:
        """Record, with FSDP, the layers and the loss telling what they are at.

        Their methods are wrapped: with a hook on a module, or a global one,
        ``embedding_skip_backward_gather`` gathers what it does not gather without.
        """
        with ExitStack() as stack:
            for owner, name, around in (
                (FSDPParamGroup, "unshard", self._gather),
                (FSDPParamGroup, "wait_for_unshard", self._gather),
                (FSDPParamGroup, "post_backward", self._reduce),
                (CheckpointWrapper, "__call__", self._keep_inputs),
                (ChunkedLossWrapper, "__call__", lambda *_: self.during(LOSS)),
            ):
                stack.enter_context(_wrapped(owner, name, around))
            stack.enter_context(self.live.follow_resizes(lambda: self.phase))
            stack.enter_context(self)
            yield

    @contextmanager
    def _keep_inputs(self, layer: nn.Module, *inputs: Any) -> Generator[None]:
        """What enters a checkpointed layer waits for its backward."""
        if self.phase == FORWARD:
            for tensor in tree_leaves(inputs):
                if isinstance(tensor, torch.Tensor):
                    self.live.move(_local(tensor), BOUNDARIES)
        yield

    @contextmanager
    def _scope(self, what: str, group: FSDPParamGroup) -> Generator[None]:
        names = tuple(param._param_fqn or "" for param in group.fsdp_params)
        self._scopes.append(_Scope(what, group._training_state, names))
        try:
            yield
        finally:
            self._scopes.pop()

    def _gather(self, group: FSDPParamGroup, *_: Any):
        return self._scope(WEIGHTS, group)

    @contextmanager
    def _reduce(self, group: FSDPParamGroup, *_: Any) -> Generator[None]:
        """Gradients are FSDP's once it takes them over, and are kept as shards once reduced."""
        for param in group.fsdp_params:
            unsharded = getattr(param, "_unsharded_param", None)
            for grad in (getattr(unsharded, "grad", None), param.unsharded_accumulated_grad):
                if grad is not None:
                    self.live.move(_local(grad), REDUCED)
        with self._scope(REDUCED, group):
            yield
        for param in group.fsdp_params:
            if param.sharded_param.grad is not None:
                self.live.release(_local(param.sharded_param.grad))

    def _count(self, call: Collective) -> None:
        cause, part = self._cause(call)
        scope = self._scopes[-1] if self._scopes else None
        if cause == causes.GATHER_BACKWARD and scope:
            self.gathered_in_backward.update(scope.names)
        names = (*causes.AXES.get(cause, ()), *self._axes)
        fitting = [name for name in names if self._axes.get(name) == call.ranks]
        row = Row(
            cause=cause,
            op=call.op,
            axis=fitting[0] if fitting else "several",
            degree=len(call.ranks),
            part=part,
        )
        self.calls[row] += 1
        self.sent[row] += round(call.sent)
        self.received[row] += round(call.received)

    def _cause(self, call: Collective) -> tuple[str, str]:
        """Return the cause and whether experts' or dense weights, or activations, move."""
        scope = self._scopes[-1] if self._scopes else None
        if scope is not None and scope.what in (WEIGHTS, REDUCED):
            part = "experts" if any("routed_experts" in name for name in scope.names) else "dense"
            if scope.what == WEIGHTS:
                backward = scope.state == TrainingState.PRE_BACKWARD
                return (causes.GATHER_BACKWARD if backward else causes.GATHER_FORWARD), part
            if call.op != ALL_REDUCE:
                return causes.REDUCE, part
            replicas = call.ranks == self._axes.get("dp_replicate")
            # Norms, which tensor parallel ranks hold alike, see a part of the sequence each.
            return (causes.REPLICAS if replicas else causes.TENSOR), part
        if self._phase == OPTIMIZER:
            return (causes.ROUTER_BALANCE if call.op == ALL_REDUCE else causes.MUON), "optimizer"
        if self._phase == CLIP:
            return causes.GRADIENT_NORM, "optimizer"
        if call.op in (SEND, RECEIVE):
            return causes.PIPELINE, "activations"
        if call.op == ALL_TO_ALL:
            counts = not call.dtype.is_floating_point
            return (causes.TOKEN_COUNTS if counts else causes.EXPERTS), "activations"
        return causes.TENSOR, "activations"

    def rows(self) -> list[dict[str, Any]]:
        """Return the collectives, the largest first within a cause, causes as the planner's."""
        order = (*causes.PLANNED, *causes.SMALL)
        rows = sorted(self.calls, key=lambda r: (order.index(r.cause), -self.received[r], r.axis))
        return [
            {
                **{name: getattr(row, name) for name in Row.__slots__},
                "calls": self.calls[row],
                "sent": self.sent[row],
                "received": self.received[row],
            }
            for row in rows
        ]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _wrapped(owner: type, name: str, around: Callable[..., Any]) -> Generator[None]:
    """Run ``owner.name`` inside ``around(self, *args)``."""
    method = getattr(owner, name)

    @wraps(method)
    def within(self, *args, **kwargs):
        with around(self, *args):
            return method(self, *args, **kwargs)

    with patch.object(owner, name, within):
        yield
