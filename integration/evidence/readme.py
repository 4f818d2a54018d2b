"""The tables of contributions, generated from the patch headers and the evidence."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from integration.evidence import effect
from integration.ground import files, paths
from integration.ground.errors import UserError
from integration.patchset import pins
from integration.patchset.finding import Finding
from integration.patchset.patch import Contribution

BEGIN = "<!-- contributions:begin -->"
END = "<!-- contributions:end -->"
PROOF_BEGIN, PROOF_END = "<!-- proof:begin -->", "<!-- proof:end -->"
PROOF_FILE = "CONTRIBUTING.md"
Rows = Callable[[Sequence[Contribution]], str]


def table(contributions: Sequence[Contribution]) -> str:
    """Return README's Markdown table: what each contribution is for, and what it was measured at.

    Raises:
        UserError: an effect that the evidence does not hold.
    """
    return _table(
        ("contribution", "what it gives", "measured"),
        (
            (f"[{c.name}](patches/{c.upstream}/{c.name}.patch)", _gives(c), effect.markdown(c))
            for c in contributions
        ),
    )


def _gives(contribution: Contribution) -> str:
    """Return the subject, and where upstream's main has the change that the pin lacks."""
    if not contribution.on_main:
        return contribution.subject
    url = pins.load()[contribution.upstream].url(contribution.on_main)
    return f"{contribution.subject} ([on upstream's main]({url}), not in the pin)"


def details(contributions: Sequence[Contribution]) -> str:
    """Return CONTRIBUTING's Markdown table: where each contribution stands and what it needs."""
    folders = {c.name: f"{c.upstream}_contrib/{c.name}" for c in contributions}
    return _table(
        ("contribution", "upstream", "status", "requires", "tests"),
        (
            (
                f"[{c.name}](patches/{c.upstream}/{c.name}.patch)",
                c.upstream,
                " ".join(c.values("Status")),
                ", ".join(c.requires),
                "<br>".join(f"[{file}]({folders[c.name]}/{file})" for file, _ in c.tests),
            )
            for c in contributions
        ),
    )


TABLES: dict[str, Rows] = {"README.md": table, "CONTRIBUTING.md": details}


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def with_body(text: str, begin: str, end: str, body: Callable[[], str]) -> str | None:
    """Return ``text`` with ``body`` between two lines of it, or None when it has not both."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    return f"{before}{begin}\n{body()}\n{end}{after}" if found and closed else None


def stale(contributions: Sequence[Contribution], root: Path | None = None) -> list[Finding]:
    """Return a finding for each table that is not the patches' own."""
    findings = []
    for name, rows in TABLES.items():
        text = _read(root, name)
        try:
            fresh = with_body(text, BEGIN, END, lambda rows=rows: rows(contributions))
        except UserError as error:
            findings.append(_without_effect(error))
            continue
        if fresh is None or fresh == text:
            continue
        pairs = zip(text.split("\n"), fresh.split("\n"), strict=False)
        line, (found, expected) = next((n, p) for n, p in enumerate(pairs, 1) if p[0] != p[1])
        findings.append(
            Finding(
                patch="(table)",
                file=name,
                line=line,
                expected=f"`{expected}`",
                found=f"`{found}`",
                verdict="stale table",
                next="integration patches readme --write",
            )
        )
    return findings


def write(contributions: Sequence[Contribution], root: Path | None = None) -> list[str]:
    """Write the tables into README.md and CONTRIBUTING.md; return the names of what has changed.

    Raises:
        UserError: README.md has no place for its table, or an effect is not in the evidence.
    """
    changed = {}
    for name, rows in TABLES.items():
        text = _read(root, name)
        fresh = with_body(text, BEGIN, END, lambda rows=rows: rows(contributions))
        if fresh is None and name == "README.md":
            raise UserError(
                f"expected the lines {BEGIN} and {END} in {name}, found "
                f"{'no such lines' if text else f'no {name}'}; the table has no place: add them"
            )
        if fresh is not None and fresh != text:
            changed[name] = fresh
    for name, fresh in changed.items():
        files.write((root or paths.REPO) / name, fresh)
    return list(changed)


def _read(root: Path | None, name: str) -> str:
    file = (root or paths.REPO) / name
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _without_effect(error: UserError) -> Finding:
    expected, _, rest = str(error).removeprefix("expected ").partition(", found")
    found, _, then = rest.removeprefix(": ").strip().partition("; ")
    return Finding(
        patch="(table)",
        file="README.md",
        line=None,
        expected=expected,
        found=found,
        verdict="no effect",
        next=then.rpartition(": ")[2],
    )
