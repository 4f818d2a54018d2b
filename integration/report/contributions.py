"""The table of contributions: status, effect, proofs, evidence and the commands that repeat it."""

import json
from collections.abc import Sequence

from integration.evidence import effect
from integration.patchset.patch import Contribution
from integration.report.page import Html, Section, Table

HEADS = ("contribution", "status", "what it changes", "measured effect", "proofs", "evidence")


def section(contributions: Sequence[Contribution]) -> Section:
    """Return one row a contribution."""
    rows = [
        (
            c.name,
            c.status,
            c.subject,
            effect.sentence(c),
            f"{_count(len(c.tests), 'test file')}; {_parity(c)}",
            _evidence(c),
        )
        for c in contributions
    ]
    return Section(
        title="Contributions",
        blocks=[
            f"{len(rows)} patches with {sum(len(c.tests) for c in contributions)} test files and "
            f"{sum(_kept(c) for c in contributions)} files of evidence. How many tests failed "
            "without each patch and passed with it stands in CONTRIBUTING's proof.",
            Table(heads=HEADS, rows=rows, numbers=False, title="Contributions"),
        ],
        command="integration test --prove --full; integration patches check",
    )


def _parity(contribution: Contribution) -> str:
    (numerics,) = contribution.values("Numerics") or ("?",)
    if numerics != "bitwise":
        return f"changes numbers: {numerics.removeprefix('changes ')}"
    verdicts = [
        json.loads(file.read_text(encoding="utf-8"))["verdict"]
        for file in sorted((contribution.folder / "evidence").glob(f"{effect.PARITY}*.json"))
    ]
    return "; ".join(verdicts) or "bitwise by its header"


def _kept(contribution: Contribution) -> int:
    return len(list((contribution.folder / "evidence").glob("*.json")))


def _evidence(contribution: Contribution) -> Html:
    """Return each file's name with the command that made it."""
    from html import escape

    lines = []
    for file in sorted((contribution.folder / "evidence").glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        lines.append(f"{escape(file.name)}: <code>{escape(record.get('command', '?'))}</code>")
    if not lines:
        return Html("")
    words = _count(len(lines), "file")
    return Html(f"<details><summary>{words}</summary>{'<br>'.join(lines)}</details>")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
