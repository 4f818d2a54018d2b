"""What a ladder found, and its JSON file: written after each rung, read again by ``--resume``.

No torch here. The file's keys are the fields below; ``integration report`` reads them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from integration.evidence.record import differing
from integration.ground import files
from integration.ground.errors import UserError
from integration.jobs import cluster
from integration.jobs.spec import JobSpec
from integration.ladder import rungs
from integration.ladder.order import Place, changes
from integration.ladder.rungs import Rung
from integration.patchset.patch import Contribution
from integration.plan import step_time

KIND = "ladder"
EQUAL = "equal"
DIFFER = "DIFFER"
NOT_COMPARED = "not compared"
DECLARED = "changes as declared"
# The published ladder. Each pair is one machine's before and after; the pairs are not of one run.
PUBLISHED = {
    "start": (90, 90),
    "32k tokens, full activation checkpointing": (370, 370),
    "activation offload": (370, 508),
    "Newton-Schulz on the GPU": (441, 597),
    "async unshard": (996, 1210),
    "end": (1300, 1300),
}
PUBLISHED_WHERE = (
    "published figures, in tokens/s a GPU, of another machine (384 GH200) and a larger model; each "
    "pair is before and after, and the pairs are not of one run"
)


@dataclass
class Row:
    """One rung: its runs, one a round, and what they amount to.

    ``runs`` are as ``probe.py`` writes them: seconds and bytes, losses of all steps, times of the
    measured ones. ``spread`` is the least and the greatest of the measured steps.
    """

    label: str
    kind: str
    contribution: str | None
    set: list[str]
    also_removed: list[str]
    status: str = "open"  # then ok or failed; only these are saved
    reason: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    median: dict[str, float | None] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)
    numbers: str = NOT_COMPARED
    compared_with: str | None = None
    difference: str = ""

    @classmethod
    def of(cls, rung: Rung) -> "Row":
        return cls(
            rung.label, rung.kind, rung.contribution, list(rung.names), list(rung.also_removed)
        )

    def add(self, run: dict[str, Any], *, ranks: int) -> None:
        """Take one more run in."""
        self.status, self.reason = "ok", ""
        self.runs.append(run)
        steps = [s for r in self.runs for s in r["step_s"]]
        self.median = {
            "tokens_s_gpu": run["tokens_a_step"] / ranks / median(steps),
            "step_s": median(steps),
            "start_s": median(r["start_s"] for r in self.runs),
        }
        for phase in run["phases"]:
            values = [s for r in self.runs for s in r["phases"][phase] or ()]
            self.median[phase] = median(values) if values else None
        self.spread = {"step_s": [min(steps), max(steps)]}

    def fail(self, reason: str) -> None:
        """Take in that it did not run; figures of earlier rounds stay."""
        self.reason = reason if not self.runs else f"round {len(self.runs) + 1}: {reason}"
        self.status = "ok" if self.runs else "failed"

    def most(self, key: str) -> int | None:
        """Return the greatest ``key`` of the runs, where they have one."""
        return max((r[key] for r in self.runs if r[key] is not None), default=None)


@dataclass
class Ladder:
    """One ladder, finished or not."""

    config: str
    layers: int | None
    experts: int | None
    options: list[str]
    ranks: int
    steps: int
    warmup: int
    rounds: int
    machine: dict[str, str | int]
    torch: str
    torchtitan: str
    patches: dict[str, str]
    # Of patches whose words changed since ([Note: Only words] in evidence/reword.py).
    measured_patches: dict[str, str] = field(default_factory=dict, kw_only=True)
    command: str
    date: str
    tokens_a_step: int = 0
    whole_documents: bool = False
    label: str = ""
    rungs: list[Row] = field(default_factory=list)

    def row(self, rung: Rung) -> Row:
        """Return the row of ``rung``, made where there is none."""
        for row in self.rungs:
            if row.label == rung.label and tuple(row.set) == rung.names:
                return row
        self.rungs.append(Row.of(rung))
        return self.rungs[-1]

    def arrange(self, wanted: Sequence[Rung]) -> None:
        """Put the rows in the order of ``wanted``, making those that are new; others come last."""
        rows = [self.row(rung) for rung in wanted]
        self.rungs = rows + [row for row in self.rungs if row not in rows]

    def compare(
        self, wanted: Sequence[Rung], contributions: Sequence[Contribution], place: Place
    ) -> None:
        """Fill in ``numbers`` of each row that ran."""
        known = {c.name: c for c in contributions}
        ran = [rung for rung in wanted if self.row(rung).status == "ok"]
        for rung in ran:
            row = self.row(rung)
            unlike = [d for r in row.runs[1:] if (d := differing(r, row.runs[0]))]
            other = rungs.reference(wanted, rung, ran)
            row.compared_with, row.difference = other.label if other else None, ""
            if not self.deterministic:
                row.numbers = NOT_COMPARED
            elif unlike:
                row.numbers, row.difference = DIFFER, f"between its own runs: {unlike[0]}"
            elif other is None:
                row.numbers = NOT_COMPARED
            else:
                between = set(rung.names) ^ set(other.names)
                reasons = [rung.changes] if rung.changes else []
                reasons += [
                    f"{name}: {reason}"
                    for name in known
                    if name in between and (reason := changes(known[name], place))
                ]
                row.difference = differing(row.runs[0], self.row(other).runs[0])
                declared = f"{DECLARED}: {'; '.join(reasons)}" if reasons else DIFFER
                row.numbers = declared if row.difference else EQUAL

    def utilise(self, job: JobSpec) -> None:
        """Fill in each row's model FLOP utilisation."""
        for row in self.rungs:
            if row.runs:
                seconds = median(s for run in row.runs for s in run["step_s"])
                row.median["mfu"] = mfu(job, self.machine, self.tokens_a_step / self.ranks, seconds)

    @property
    def deterministic(self) -> bool:
        """Whether runs of one set must be equal: not where the user's options give that up."""
        return not any("no-deterministic" in option for option in self.options)

    @property
    def complete(self) -> bool:
        """Whether each rung has its runs or a reason."""
        return all(r.status == "failed" or len(r.runs) >= self.rounds for r in self.rungs)

    def packed(self) -> bytes:
        """Return the JSON file's bytes."""
        record = {
            "kind": KIND,
            **asdict(self),
            "published": [
                {"label": label, "tokens_s_gpu": list(pair)} for label, pair in PUBLISHED.items()
            ],
            "rungs": [asdict(row) for row in self.rungs if row.status != "open"],
        }
        if not self.measured_patches:
            del record["measured_patches"]
        return (json.dumps(record, indent=1) + "\n").encode()

    def save(self, path: Path) -> None:
        """Write beside and rename: a killed session keeps all rows before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, self.packed())

    @classmethod
    def load(cls, path: Path) -> "Ladder":
        """Read a saved ladder.

        Raises:
            UserError: not one, or not readable.
        """
        try:
            record = json.loads(path.read_text())
            if record.pop("kind") != KIND:
                raise ValueError("its kind is another")
            record.pop("published")
            rows = [Row(**row) for row in record.pop("rungs")]
            return cls(**record, rungs=rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--resume expects the JSON file of a ladder, and {path} cannot be read as one "
                f"({error}); start anew without --resume"
            ) from None

    def go_on_from(self, path: Path, *, retry: bool) -> None:
        """Take over the rows saved at ``path``; with ``retry`` without those that could not run.

        Raises:
            UserError: the file is of another job, version or machine, and runs of two do not mix.
        """
        before = Ladder.load(path)
        free = {"command", "date", "measured_patches", "rounds", "rungs", "tokens_a_step"}
        for each in fields(self):
            then, now = getattr(before, each.name), getattr(self, each.name)
            if each.name not in free and then != now:
                raise UserError(
                    f"--resume goes on with a ladder of {each.name} {_short(then, now)}, and now "
                    f"{each.name} is {_short(now, then)}; nothing was run: ask for the same as "
                    f"{path} does, or start anew without --resume"
                )
        self.rungs = [row for row in before.rungs if not (retry and row.status == "failed")]
        self.tokens_a_step = before.tokens_a_step
        self.measured_patches = before.measured_patches


def _short(value: Any, other: Any) -> str:
    """Return ``value``, of a dict only what differs."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {k: v for k, v in value.items() if other.get(k) != v}
    return str(value)


def peak_flops(machine: dict[str, str | int]) -> float | None:
    """Return the GPU's dense bf16 peak in FLOP/s, by its data sheet; None if no cluster has it."""
    gpu = str(machine.get("gpu", ""))
    for file in sorted(cluster.FOLDER.glob("*.toml")):
        known = cluster.load(file.stem).gpu
        if known.name in gpu:
            return known.peak_tflops * step_time.TERA
    return None


def mfu(
    job: JobSpec, machine: dict[str, str | int], tokens_a_gpu: float, seconds: float
) -> float | None:
    """Return the useful FLOP of a step over what the peak allows in ``seconds``.

    Recomputation does not count. Attention counts as causal over the whole sequence, so sequences
    of several documents, which attend to themselves alone, have none (TorchTitan's own figure
    counts attention uncausal).
    """
    peak = peak_flops(machine)
    if peak is None:
        return None
    return step_time.token_flops(job) * tokens_a_gpu / seconds / peak
