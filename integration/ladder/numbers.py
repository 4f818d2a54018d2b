"""Whether two rungs' losses and gradient norms are equal, and whether they may differ. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EQUAL = "equal"
DIFFER = "DIFFER"
NOT_COMPARED = "not compared"
DECLARED = "changes as declared"

CURVES = (("loss", "loss"), ("grad_norm", "gradient norm"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """``words`` as in the JSON; ``difference`` is the first that was found, if it was one."""

    words: str
    difference: str = ""


def judge(run: Mapping, other: Mapping, reasons: Sequence[str]) -> Verdict:
    """Compare two runs bit by bit.

    Args:
        reasons: why the numbers may differ; none where they must be equal.
    """
    found = difference(run, other)
    if not found:
        return Verdict(EQUAL)
    return Verdict(f"{DECLARED}: {'; '.join(reasons)}" if reasons else DIFFER, found)


def difference(run: Mapping, other: Mapping) -> str:
    """Return the first step at which two runs differ, in words, or nothing."""
    for key, what in CURVES:
        if len(run[key]) != len(other[key]):
            return f"{what}: expected {len(other[key])} steps, got {len(run[key])}"
        for step, (got, expected) in enumerate(zip(run[key], other[key], strict=True), start=1):
            if got != expected:
                return f"{what} of step {step}: expected {expected!r}, got {got!r}"
    return ""
