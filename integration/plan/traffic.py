"""Bytes that one rank moves in a step, by link and by cause.

Network and node link count what a rank receives (it sends as much at the same time), the host link
each direction by itself. Expert parallel and tensor parallel axes carry activations, FSDP axes
weights and gradients.
"""

from collections import defaultdict
from dataclasses import dataclass

from integration.jobs.cluster import Cluster
from integration.jobs.spec import JobSpec
from integration.plan import activations, muon
from integration.plan.activations import BF16, FP32
from integration.plan.levers import Levers, uses_muon
from integration.plan.memory import gathered_bytes, offloads
from integration.plan.params import Kind, Place, counts, held, kinds, layers_of_stage
from integration.plan.topology import Axis, axes

NODE, NETWORK, TO_DEVICE, TO_HOST = "node", "network", "to device", "to host"
LINKS = (NETWORK, NODE, TO_DEVICE, TO_HOST)

GATHER_FORWARD = "all-gather, forward"
GATHER_BACKWARD = "all-gather, backward"
REDUCE = "reduce-scatter"
REPLICAS = "all-reduce of replicas"
EXPERTS = "expert all-to-all"
TENSOR = "tensor parallel"
PIPELINE = "pipeline"
MUON = "Muon"
UNSHARD = "parameter copies"
GRADIENTS = "gradient copies"
OFFLOAD = "activation offload"
OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """``bytes`` over ``link`` for ``cause``; ``part`` is experts, dense, activations, optimizer."""

    cause: str
    link: str
    part: str
    bytes: float


def flows(job: JobSpec, cluster: Cluster, levers: Levers, rank: int = 0) -> list[Flow]:
    """Return all traffic of ``rank`` in one step."""
    place = Place.of(job, rank)
    mesh = axes(job, cluster)
    found = [
        *_weights(job, levers, mesh, place.stage),
        *_replicas(job, mesh, place),
        *_activations(job, mesh, place.stage),
        *_muon(job, levers, mesh, place),
        *_host(job, cluster, levers, place),
    ]
    return [flow for flow in found if flow.bytes]


def total(found: list[Flow], **wanted: str) -> float:
    """Return the bytes of the flows with these values: ``total(flows, link=NETWORK)``."""
    return sum(
        f.bytes for f in found if all(getattr(f, name) == value for name, value in wanted.items())
    )


def table(found: list[Flow]) -> dict[str, dict[str, float]]:
    """Return cause -> link -> bytes."""
    rows: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(LINKS, 0.0))
    for flow in found:
        rows[flow.cause][flow.link] += flow.bytes
    return dict(rows)


def gathers(job: JobSpec, levers: Levers, kind: Kind) -> tuple[int, int]:
    """Return how often a step gathers ``kind`` in (forward, backward).

    Resharded after forward, so twice; under pipelining not resharded, so once. The embedding's
    backward needs no weight (distributed/fsdp.py, ``apply_fsdp_to_decoder``). The head is kept from
    the last norm through all chunks of the loss, forward and backward, and resharded; the backward
    of that norm, of the same FSDP group, gathers both again, in every microbatch
    (components/loss.py, ``ChunkedLossWrapper``). Recomputation finds the weights gathered.
    """
    if kind.role == "head":
        return activations.microbatches(job), activations.microbatches(job)
    once = job.layout.pp > 1
    skipped = kind.role == "embedding" and levers.embedding_skip_backward_gather
    return 1, int(not once and not skipped)


def _weights(job: JobSpec, levers: Levers, mesh: dict[str, Axis], stage: int) -> list[Flow]:
    """FSDP: bf16 all-gathers and fp32 reduce-scatters, each ``full * (n - 1) / n``."""
    count = counts(job, stage)
    found = []
    for kind in kinds(job):
        axis = mesh["efsdp" if kind.role == "expert" else "dp_shard"]
        part = "experts" if kind.role == "expert" else "dense"
        full = count[kind.role] * gathered_bytes(job, kind)
        forward, backward = gathers(job, levers, kind)
        # Summed over microbatches before, but for the head, whose last chunk reduces.
        reduced = activations.microbatches(job) if kind.role == "head" else 1
        for cause, size in (
            (GATHER_FORWARD, forward * full),
            (GATHER_BACKWARD, backward * full),
            (REDUCE, reduced * full * FP32 // BF16),
        ):
            found += _both(cause, part, axis.gather(size))
    return found


def _replicas(job: JobSpec, mesh: dict[str, Axis], place: Place) -> list[Flow]:
    """Gradient shards over the replicas, fp32: an all-reduce is a reduce-scatter and a gather."""
    shards = FP32 * sum(h.count * h.numel for h in held(job, place))
    node, network = mesh["dp_replicate"].gather(2.0 * shards)
    return _both(REPLICAS, "dense", (node, network))


def passes(job: JobSpec) -> int:
    """How often a layer's exchanges run: forward, backward, and recomputation in either policy.

    Selective checkpointing saves ``all_to_all_single``, and the default backend exchanges tokens
    by the list form (spmd_types/_collectives.py): they run again as well.
    """
    return 3


def _activations(job: JobSpec, mesh: dict[str, Axis], stage: int) -> list[Flow]:
    """Tokens to experts and back; sequence shards to heads and back; stages to their neighbours.

    Expert all-to-all: ``t k d`` bf16 to the experts, as much back. Tensor parallel with sequence
    parallelism: an all-gather of ``t d`` before attention and a reduce-scatter behind it, both
    again for a shared expert; embedding and head have one each, forward and backward.
    Pipeline: ``t d`` to the next stage and its gradient back, for each microbatch.
    """
    shape, layers = job.shape, layers_of_stage(job, stage)
    t, micro = activations.tokens(job), activations.microbatches(job)
    hidden = BF16 * t * shape.hidden * micro
    found = []
    exchanged = 2.0 * passes(job) * layers * shape.top_k * hidden
    found += _both(EXPERTS, "activations", mesh["ep"].all_to_all(exchanged))
    tp = mesh["tp"]
    a_layer = 2 * (2 if shape.shared_experts else 1)
    ends = 2 * (int(stage == 0) + int(stage == job.layout.pp - 1))
    collectives = passes(job) * layers * a_layer + ends
    found += _both(TENSOR, "activations", tp.gather(float(collectives * hidden * tp.degree)))
    if job.layout.pp > 1:
        neighbours = int(stage > 0) + int(stage < job.layout.pp - 1)
        link = NETWORK if mesh["pp"].crosses_network else NODE
        found.append(
            Flow(cause=PIPELINE, link=link, part="activations", bytes=float(neighbours * hidden))
        )
    return found


def _muon(job: JobSpec, levers: Levers, mesh: dict[str, Axis], place: Place) -> list[Flow]:
    """Matrices that FSDP has cut go to one rank and back, fp32; experts that are whole do not.

    A rank sends its shards and gets its directions back: 4 B a parameter each way, and as much of
    the matrices that it computes; which rank computes which is left out, so this is the mean over
    the ranks. Source: distributed/flex_shard/dist_muon.py (packed all-to-all, in the parameters'
    dtype).
    """
    if not uses_muon(job, levers):
        return []
    layout, found = job.layout, []
    for mine in held(job, place):
        kind, expert = mine.kind, mine.kind.role == "expert"
        if not kind.muon or (expert and not job.cuts_experts):
            continue
        axis = mesh["efsdp" if expert else "dp_shard"]
        matrices = kind.numel / layout.ep if expert else kind.numel / (layout.tp if kind.tp else 1)
        sent = 2.0 * FP32 * mine.count * matrices / axis.degree
        part = "experts" if expert else "dense"
        found += _both(MUON, part, axis.all_to_all(sent))
    return found


def _host(job: JobSpec, cluster: Cluster, levers: Levers, place: Place) -> list[Flow]:
    """Offloaded parameters go to the GPU in fp32 at each gather and are cast there; gradients come
    back in fp32 (FSDP2's ``CPUOffloadPolicy``); Muon's update streams as ``muon.split`` says; layer
    inputs go out and in once."""
    found = []
    if job.cpu_offload:
        for mine in held(job, place):
            size = float(FP32 * mine.count * mine.numel)
            part = "experts" if mine.kind.role == "expert" else "dense"
            times = sum(gathers(job, levers, mine.kind))
            found.append(Flow(cause=UNSHARD, link=TO_DEVICE, part=part, bytes=times * size))
            found.append(Flow(cause=GRADIENTS, link=TO_HOST, part=part, bytes=size))
    if streamed := muon.split(job, cluster, levers):
        numel = sum(h.count * h.numel for h in held(job, place) if h.kind.muon)
        for link, a_parameter in ((TO_DEVICE, streamed.to_device), (TO_HOST, streamed.to_host)):
            size = a_parameter * numel
            found.append(Flow(cause=OPTIMIZER, link=link, part="optimizer", bytes=size))
    if offloads(job, levers):
        steps = activations.microbatches(job) * layers_of_stage(job, place.stage)
        moved = float(max(0, steps - 1) * activations.boundary_bytes(job))
        found.append(Flow(cause=OFFLOAD, link=TO_HOST, part="activations", bytes=moved))
        found.append(Flow(cause=OFFLOAD, link=TO_DEVICE, part="activations", bytes=moved))
    return found


def _both(cause: str, part: str, node_and_network: tuple[float, float]) -> list[Flow]:
    node, network = node_and_network
    return [
        Flow(cause=cause, link=NODE, part=part, bytes=node),
        Flow(cause=cause, link=NETWORK, part=part, bytes=network),
    ]
