"""Whether what all ranks take of host memory fits, and which nodes have less than the others."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from integration.ground.units import gib
from integration.plan.host import Item, Rounding
from integration.ranks.host_memory import HostMemory

# A node with less than this share of the median is named.
LOW = 0.8
NAMED = 5  # nodes


class HostMemoryError(RuntimeError):
    """The job does not fit into host memory."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one rank takes: by item, rounded where pinned."""

    by_item: tuple[tuple[str, int], ...]
    pinned: int

    @classmethod
    def of(cls, items: Iterable[Item], rounding: Rounding) -> "Need":
        held = [(item, item.held(rounding)) for item in items]
        by_item = tuple((item.name, size) for item, size in held)
        return cls(by_item, sum(size for item, size in held if item.pinned))

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.by_item)

    def __str__(self) -> str:
        if not self.by_item:
            return "nothing"
        parts = ", ".join(f"{name} {gib(size)}" for name, size in self.by_item)
        return f"{gib(self.bytes)} GiB ({parts}; {gib(self.pinned)} pinned)"


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank found. Gathered from all ranks, so that all judge alike."""

    rank: int
    host: HostMemory
    need: Need


def free_a_rank(reports: Sequence[Report], rank: int) -> tuple[int, str]:
    """Return the free bytes of ``rank``'s share of its tightest bound, and the bound's name."""
    sharing = _sharing(reports)
    bounds = reports[rank].host.bounds
    tightest = min(bounds, key=lambda bound: bound.free / len(sharing[bound.scope]))
    return tightest.free // len(sharing[tightest.scope]), tightest.name


def refusal(reports: Sequence[Report]) -> str | None:
    """Return why the job cannot fit, by the bound that lacks most, or None where it can."""
    worst: tuple[int, str] | None = None
    nodes = set()
    for members in _sharing(reports).values():
        # Ranks look at different times; the least that any of them saw counts.
        scope, report = min(members, key=lambda member: member[0].free)
        needed = sum(member.need.bytes for _, member in members)
        lacking = needed - scope.free
        if lacking <= 0:
            continue
        nodes.add(report.host.node)
        sentence = (
            f"{len(members)} rank(s) of {report.host.node} need {gib(needed)} GiB of host memory, "
            f"and {scope.name} leaves {gib(scope.free)}; a rank takes {report.need}"
        )
        worst = max(worst or (0, ""), (lacking, sentence))
    if worst is None:
        return None
    return (
        f"{worst[1]}; the kernel would kill the run on {len(nodes)} node(s): offload less, take "
        "more nodes, or raise the job's memory limit"
    )


def low_nodes(reports: Sequence[Report]) -> list[str]:
    """Return a sentence for each node that has much less free than the median, the worst first."""
    nodes: dict[str, Report] = {}
    for report in reports:
        kept = nodes.setdefault(report.host.node, report)
        if _free(report) < _free(kept):
            nodes[report.host.node] = report
    usual = median(_free(report) for report in nodes.values())
    low = sorted((report for report in nodes.values() if _free(report) < LOW * usual), key=_free)
    sentences = [
        f"{report.host.node} has {gib(_free(report))} GiB of host memory free, and the median node "
        f"{gib(usual)}; held there besides processes' own pages: {_held(report.host.sources)}"
        for report in low[:NAMED]
    ]
    if len(low) > NAMED:
        sentences.append(f"{len(low) - NAMED} more nodes have less than {LOW:.0%} of the median")
    return sentences


def _sharing(reports: Sequence[Report]) -> dict[str, list]:
    """Return scope -> (bound, report) of each rank within it."""
    sharing = defaultdict(list)
    for report in reports:
        for bound in report.host.bounds:
            sharing[bound.scope].append((bound, report))
    return sharing


def _free(report: Report) -> int:
    return min(bound.free for bound in report.host.bounds)


def _held(sources: Mapping[str, int]) -> str:
    largest = sorted(sources.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in largest if size) or "nothing"
