"""The README's table of contributions, generated from the patch headers and the evidence."""

from collections.abc import Callable, Sequence
from pathlib import Path

from integration.evidence import effect
from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset.finding import Finding
from integration.patchset.patch import Contribution

BEGIN = "<!-- contributions:begin -->"
END = "<!-- contributions:end -->"
PROOF_BEGIN, PROOF_END = "<!-- proof:begin -->", "<!-- proof:end -->"


def table(contributions: Sequence[Contribution]) -> str:
    """Return the Markdown table; a name links to its patch, a test to its file.

    Raises:
        UserError: an effect that the evidence does not hold.
    """
    heads = ("contribution", "upstream", "status", "what it changes", "measured effect")
    heads = (*heads, "requires", "tests")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for c in contributions:
        folder = f"{c.upstream}_contrib/{c.name}"
        cells = (
            f"[{c.name}](patches/{c.upstream}/{c.name}.patch)",
            c.upstream,
            " ".join(c.values("Status")),
            c.subject,
            effect.markdown(c),
            ", ".join(c.requires),
            "<br>".join(f"[{file}]({folder}/{file})" for file, _ in c.tests),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def updated(text: str, contributions: Sequence[Contribution]) -> str | None:
    """Return the README with its table made anew, or None when it has no place for one."""
    return with_body(text, BEGIN, END, lambda: table(contributions))


def with_body(text: str, begin: str, end: str, body: Callable[[], str]) -> str | None:
    """Return ``text`` with ``body`` between two lines of it, or None when it has not both."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    return f"{before}{begin}\n{body()}\n{end}{after}" if found and closed else None


def stale(contributions: Sequence[Contribution], root: Path | None = None) -> list[Finding]:
    """Return a finding when the README's table is not the patches' own."""
    file = (root or paths.REPO) / "README.md"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    try:
        fresh = updated(text, contributions)
    except UserError as error:
        return [_without_effect(error)]
    if fresh is None or fresh == text:
        return []
    pairs = zip(text.split("\n"), fresh.split("\n"), strict=False)
    line, (found, expected) = next((n, p) for n, p in enumerate(pairs, 1) if p[0] != p[1])
    return [
        Finding(
            patch="(table)",
            file="README.md",
            line=line,
            expected=f"`{expected}`",
            found=f"`{found}`",
            verdict="stale table",
            next="integration patches readme --write",
        )
    ]


def write(contributions: Sequence[Contribution], root: Path | None = None) -> bool:
    """Write the table into README.md; return whether anything changed."""
    file = (root or paths.REPO) / "README.md"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    fresh = updated(text, contributions)
    if fresh is None:
        raise UserError(
            f"expected the lines {BEGIN} and {END} in README.md, found "
            f"{'no such lines' if text else 'no README.md'}; the table has no place: add them"
        )
    if fresh != text:
        file.write_text(fresh, encoding="utf-8")
    return fresh != text


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
