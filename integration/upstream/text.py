"""`pr.md`: the text of a pull request, from the patch's header, its tests and its evidence."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from integration.patchset.patch import Contribution
from integration.patchset.pins import Pin
from integration.testing.suite import Outcome
from integration.upstream.branch import Branch, Linted
from integration.upstream.rules import NOTED, RULES

# What a record says of itself; the rest is what was measured.
_ABOUT = {
    "alloc_conf", "arguments", "command", "config", "contribution", "cuda", "date", "machine",
    "measured_patch_sha256", "nccl", "note", "options", "patch_sha256", "patches", "statistic",
    "torch", "torchtitan", "versions", "what", "with_patches",
}  # fmt: skip
_TO_DO = "**TODO (the person who submits):**"


def write(
    contribution: Contribution,
    pin: Pin,
    branch: Branch,
    linted: Sequence[Linted],
    outcomes: Mapping[str, Outcome],
    upstream: Sequence[str],
) -> str:
    """Return the Markdown.

    Args:
        upstream: what it has done since the pin to the patch's lines, a line each; for the person
            who submits, not for the pull request.
        outcomes: ``pristine`` and ``patched`` to what the tests gave; empty if they were not run.
    """
    parts = [f"# {contribution.subject}", _body(contribution), _links(contribution, branch)]
    parts += ["## Tests", _tests(contribution, pin, outcomes), _lint(linted)]
    parts += ["## Numbers", _numbers(contribution)]
    parts += ["## AI assistance", _ai()]
    parts += ["<!-- Not part of the text: remove from here on before sending. -->"]
    parts += ["## Upstream since the pin", "\n".join(f"- {line}" for line in upstream)]
    parts += [_checklist(contribution, branch, linted, outcomes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _body(contribution: Contribution) -> str:
    """Unwrap the message's paragraphs: Markdown would keep a commit's line ends on GitHub."""
    paragraphs = contribution.body.split("\n\n")
    plain = (p if any(s[:1] in " \t-*|`" for s in p.split("\n")) else " ".join(p.split("\n"))
             for p in paragraphs)  # fmt: skip
    return "\n\n".join(plain)


def _links(contribution: Contribution, branch: Branch) -> str:
    issue = " ".join(contribution.values("Issue"))
    lines = [f"Issue: {issue}"]
    below = [c.name for c in branch.contributions if c.name != contribution.name]
    if below:
        lines.append(f"On top of: {', '.join(below)} (earlier commits of this branch)")
    others = [name for name in contribution.requires if name not in below]
    if others:
        lines.append(f"Needs, elsewhere or already there: {', '.join(others)}")
    return "\n".join(lines)


def _tests(contribution: Contribution, pin: Pin, outcomes: Mapping[str, Outcome]) -> str:
    paths = " ".join(path for _, path in contribution.tests)
    run = "python -m pytest" if pin.upstream == "torchtitan" else "python"
    lines = ["```", *(f"{run} {path}" for path in paths.split()), "```", ""]
    if not outcomes:
        return "\n".join([*lines, f"{_TO_DO} run them, and say what they printed."])
    lines.append(f"On {pin.package} {pin.version}:")
    lines.append("")
    lines.append("| | passed | failed | skipped |")
    lines.append("|---|---|---|---|")
    words = {"pristine": "without the change", "patched": "with it"}
    for key, outcome in outcomes.items():
        failed = str(outcome.failed) if outcome.ran else "cannot be collected"
        lines.append(f"| {words[key]} | {outcome.passed} | {failed} | {outcome.skipped} |")
    return "\n".join(lines)


def _lint(linted: Sequence[Linted]) -> str:
    lines = []
    for item in linted:
        tool, _, rest = item.command.partition(" ")
        if item.clean is None:
            lines.append(f"- `{tool}`: not run: {item.reason}")
        else:
            lines.append(f"- `{tool} {rest}`: {'clean' if item.clean else '**finds something**'}")
            if not item.clean:
                lines += ["", "  ```", *(f"  {s}" for s in item.output.splitlines()[-20:]), "  ```"]
    return "Lint, with the configuration of the branch:\n\n" + "\n".join(lines) if lines else ""


def _numbers(contribution: Contribution) -> str:
    parts = []
    for file in sorted((contribution.folder / "evidence").glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        if record.get("patch_sha256") != contribution.sha256:
            parts.append(f"`{file.name}` was measured on another version of the patch: left out.")
            continue
        machine = ", ".join(f"{k} {v}" for k, v in dict(record.get("machine") or {}).items())
        about = [str(record[key]) for key in ("what", "statistic", "note") if record.get(key)]
        lines = [f"**{file.stem}**" + (f": {'; '.join(about)}" if about else ""), ""]
        lines += ["```", str(record.get("command", "no command recorded")), "```", ""]
        software = [f"{k} {record[k]}" for k in ("torch", "torchtitan", "cuda") if record.get(k)]
        lines += [f"Machine: {machine}. {', '.join(software)}".rstrip(), ""]
        measured = {k: v for k, v in record.items() if k not in _ABOUT}
        parts.append("\n".join(lines + _table(measured.pop("results", {}) | measured)))
    return "\n\n".join(parts) or "None: nothing is claimed."


def _table(measured: Mapping[str, Any]) -> list[str]:
    """Set what has the same keys (pristine, patched) side by side; the rest one a line."""
    leaves = {k: dict(_leaves(v)) for k, v in measured.items() if isinstance(v, dict)}
    columns = [
        k for k in leaves if leaves[k] and leaves[k].keys() == leaves[next(iter(leaves))].keys()
    ]
    rows: list[list[str]] = []
    head = ["", *columns] if len(columns) > 1 else ["", "value"]
    if len(columns) > 1:
        rows = [[key, *(leaves[c][key] for c in columns)] for key in leaves[columns[0]]]
        measured = {k: v for k, v in measured.items() if k not in columns}
    for key, value in _leaves(measured):
        rows.append([key, value, *[""] * (len(head) - 2)])
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]


def _leaves(value: Any, key: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        below = ((f"{key}.{k}" if key else str(k), v) for k, v in value.items())
        return [leaf for name, v in below for leaf in _leaves(v, name)]
    if isinstance(value, list):
        return [(key, f"{len(value)} values")] if len(value) > 4 else [(key, str(value))]
    return [(key, f"{value:.6g}" if isinstance(value, float) else str(value))]


def _ai() -> str:
    return (
        f"{_TO_DO} say here which parts of the change, the tests and this text were made with AI "
        f"assistance, with what, and what you did to check them. The text above was assembled by "
        f"a tool from the patch's header and recorded measurements."
    )


def _checklist(
    contribution: Contribution,
    branch: Branch,
    linted: Sequence[Linted],
    outcomes: Mapping[str, Outcome],
) -> str:
    """What the tool has seen is ticked; all else is a person's to tick. Removed before sending."""
    tests = [path for _, path in contribution.tests]
    seen = [
        (f"the tests are in the branch: {', '.join(tests)}", set(tests) <= set(branch.files)),
        ("they fail without the change", bool(outcomes) and outcomes["pristine"].failed > 0),
        ("they pass with it", bool(outcomes) and outcomes["patched"].green),
        ("upstream's linters are clean", bool(linted) and all(item.clean for item in linted)),
        ("an issue is linked", contribution.values("Issue")[:1] != ()
         and contribution.values("Issue")[0].startswith("https://")),
    ]  # fmt: skip
    lines = [f"- [{'x' if done else ' '}] {text}" for text, done in seen]
    if (contribution.folder / "docs.md").is_file():
        lines.append("- [ ] `docs.md` of the contribution is where its first line says")
    rules = RULES.get(contribution.upstream, ())
    lines += [f"- [ ] {rule.text} ([source]({rule.source}))" for rule in rules]
    return f"## Checklist (upstream's rules as noted on {NOTED}; read them again)\n\n" + "\n".join(
        lines
    )
