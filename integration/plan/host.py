"""Memory of one rank on its host, by item: one account for the plan and for the check at launch.

The planner hands in shards that it counted, ``ranks.host_check`` the real ones. No torch here.

[Note: Rounded bytes]
Torch's pinned allocator makes each block a power of two (``CachingHostAllocator.h``, ``allocate``;
pytorch issues 150517, 171662): 2.08 GiB take 4. Only blocks above
``pinned_max_round_threshold_mb`` or ``pinned_max_cached_size_mb`` of ``PYTORCH_ALLOC_CONF`` keep
their size. Pinned pages are never given back to the system, swapped or compressed, so a sum of
requested bytes would admit jobs that the kernel kills. The pool of ``activation_offload`` asks the
kernel for its pages and registers these: whole pages, and no more.
"""

import mmap
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from integration.ground.units import GIB
from integration.plan.activations import FP32

# Bound of the activation pool of a process; what is beyond it stays on the GPU.
POOL_GIB = 64.0
# Bound of what a data loader holds beside the process: its open files, the piece of a document that
# is being tokenised, the tokens of a batch and of what is packed behind it. It does not grow with
# the data, as documents are cut and streamed.
LOADER_BYTES = 256 * 2**20
# Of ``muon_gpu_newton_schulz``: blocks that momentum is packed in, batches in flight, matrices a
# batch, and bytes of an element that the host hands to the GPU or gets back.
MOMENTUM_BLOCK, SLOTS, MATRICES_A_BATCH, STAGED_ELEMENT = 2**30, 3, 8, 2
# Elements of a slot: its default ``max_buffer_gib`` over the slots and over the 14 B of an element
# on the GPU where all of an update is there; other splits cut their batches alike.
SLOT_ELEMENTS = 3 * 2**30 // (SLOTS * 14)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Largest block that the pinned allocator rounds up, in bytes; None: every one."""

    threshold: int | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Rounding":
        """Return what ``PYTORCH_ALLOC_CONF`` (or its old name) asks for."""
        text = environment.get("PYTORCH_ALLOC_CONF") or environment.get(
            "PYTORCH_CUDA_ALLOC_CONF", ""
        )
        found = re.findall(r"pinned_max_(?:round_threshold|cached_size)_mb:(\d+)", text)
        return cls(min(int(value) for value in found) * 2**20 if found else None)

    def block(self, size: int) -> int:
        """Return the bytes that a pinned block of ``size`` bytes takes.

        >>> Rounding().block(5), Rounding(threshold=4).block(5)
        (8, 5)
        """
        if size == 0 or (self.threshold is not None and size > self.threshold):
            return size
        return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Item:
    """Allocations of one kind on one rank: ``blocks`` are (count, bytes).

    ``by_torch`` are pinned blocks of torch's allocator, which rounds them.
    """

    name: str
    blocks: tuple[tuple[int, int], ...]
    pinned: bool = False
    by_torch: bool = True

    @property
    def label(self) -> str:
        return f"{self.name}, pinned" if self.pinned else self.name

    def held(self, rounding: Rounding) -> int:
        """Return the bytes that it takes."""
        rounds = self.pinned and self.by_torch
        return sum(
            count * (rounding.block(size) if rounds else size) for count, size in self.blocks
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of ``count`` parameters, ``size`` bytes each.

    The optimizer adds ``states`` copies: one under Muon (momentum), two under Adam (both moments).
    Those of ``muon`` may be pinned by ``muon_gpu_newton_schulz``. ``whole`` says that the rank has
    whole matrices, of ``rows`` x ``columns``.
    """

    size: int
    states: int = 2
    count: int = 1
    muon: bool = False
    whole: bool = False
    rows: int = 0
    columns: int = 0

    @property
    def matrices(self) -> int:
        return self.size // FP32 // (self.rows * self.columns) if self.whole else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OnHost:
    """What of a job is on the host.

    ``streamed`` is Muon's update through the GPU; ``boundary`` and ``boundaries`` are bytes and
    number of the layers' inputs that are offloaded.
    """

    model: bool = False
    pinned: bool = False
    streamed: bool = False
    staging: bool = False
    pinned_staging: bool = False
    boundary: int = 0
    boundaries: int = 0

    def items(self, shards: Sequence[Shard]) -> Iterator[Item]:
        """Yield what the rank takes beside its process, items of no bytes left out.

        FSDP2 pins offloaded shards, and its gradients arrive in pinned memory (a non-blocking copy
        to the host makes it). The optimizer's state, made like a CPU tensor, is not pinned, but for
        momentum of updates that stream through the GPU. An asynchronous checkpoint holds a second
        copy of parameters and state.
        """
        yield Item("data loader", ((1, LOADER_BYTES),))
        parameters = _blocks((shard.count, shard.size) for shard in shards)
        state = _blocks((shard.count * shard.states, shard.size) for shard in shards)
        if self.model and shards:
            yield Item("parameters", parameters, self.pinned)
            yield Item("gradients", parameters, self.pinned)
            streamed = [shard for shard in shards if self.streamed and shard.muon]
            others = (shard for shard in shards if not (self.streamed and shard.muon))
            plain = _blocks((shard.count * shard.states, shard.size) for shard in others)
            if plain:
                yield Item("optimizer state", plain)
            if streamed:
                yield Item("Muon's momentum", _blocks(_packed(streamed)), True)
                # Where both momentum and weight are updated on the host; other splits take less.
                staged = STAGED_ELEMENT * largest_batch(streamed, streamed=True)
                yield Item("Muon's staging", ((2 * SLOTS, staged),), True)
        if self.staging and shards:
            yield Item("checkpoint staging", _blocks((*parameters, *state)), self.pinned_staging)
        if self.boundaries:
            pages = ((self.boundaries, whole_pages(self.boundary)),)
            yield Item("boundary activations", pages, True, by_torch=False)


def whole_pages(size: int) -> int:
    """Return what ``size`` bytes take in the activation pool."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def in_flight(microbatches: int, stages: int, stage: int) -> int:
    """Return the microbatches whose backward is to come on ``stage``: 1F1B has ``stages - stage``
    (arXiv 2104.04473)."""
    return min(microbatches, stages - stage)


def offloaded(
    layers: Iterable[int],
    microbatches: int,
    size: int,
    *,
    most_gib: float | None,
    fraction: float = 1.0,
) -> int:
    """Return how many layer inputs of ``size`` bytes are on the host at once.

    The last layer of each part of a model keeps its own, which backward wants at once.

    Args:
        layers: of each part of the model on this rank.
        microbatches: whose backward is to come, as ``in_flight`` says.
        most_gib: the bound of a process's pool; None: none.
        fraction: of the layers, as the policy says.
    """
    most = None if most_gib is None or not size else int(most_gib * GIB) // whole_pages(size)
    # The policy rounds up (``BlockInputPolicy``): first to the millionth, as 100 * 0.07 is above 7.
    every = sum(microbatches * ceil(round(fraction * max(0, n - 1), 6)) for n in layers)
    return every if most is None else min(every, most)


def largest_batch(shards: Iterable[Shard], *, streamed: bool) -> int:
    """Return the elements of the largest batch of matrices that are whole on this rank.

    Matrices of one shape, either way round, make ``n // 8`` batches, or one where there are fewer:
    four of the attention's in one batch are more than eight experts. Batch ``b`` begins at matrix
    ``ceil(b n / batches)``, wide matrices first. Those that are ``streamed`` are cut where wide and
    tall meet, and further until each fits a slot of the buffers, though no matrix is cut. Source:
    distributed/flex_shard/_matrix_batches.py of ``dist_muon_batched_compute``, and
    ``_fit_to_slots`` of ``muon_gpu_newton_schulz``.
    """
    total: dict[tuple[int, int], Counter[bool]] = defaultdict(Counter)
    for shard in shards:
        if shard.muon and shard.whole:
            sides = (min(shard.rows, shard.columns), max(shard.rows, shard.columns))
            total[sides][shard.rows > shard.columns] += shard.count * shard.matrices
    largest = 0
    for (short, long), n_tall in total.items():
        wide, n = n_tall[False], n_tall.total()
        batches = max(1, n // MATRICES_A_BATCH)
        edges = {-(-b * n // batches) for b in range(batches + 1)}
        most = n
        if streamed:
            edges.add(wide)
            most = max(1, SLOT_ELEMENTS // (short * long))
        for first, last in pairwise(sorted(edges)):
            parts = -(-(last - first) // most)
            largest = max(largest, -(-(last - first) // parts) * short * long)
    return largest


def _packed(shards: Iterable[Shard]) -> Iterator[tuple[int, int]]:
    """Yield the blocks of momentum: each has as many shards as fit. Their order, which DistMuon's
    buckets make, is not known here; the largest come first."""
    sizes = sorted((s.size for s in shards for _ in range(s.count)), reverse=True)
    room, left = 0, sum(sizes)
    for size in sizes:
        if size > room:
            room = max(size, min(MOMENTUM_BLOCK, left))
            yield 1, room
        room, left = room - size, left - size


def _blocks(blocks: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return (count, bytes) with equal sizes joined, none of them empty."""
    counts: Counter[int] = Counter()
    for count, size in blocks:
        if size:
            counts[size] += count
    return tuple((count, size) for size, count in counts.items())
