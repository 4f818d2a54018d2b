"""What each upstream asks of a pull request, dated and cited; CONTRIBUTING.md tells the same."""

from dataclasses import dataclass

NOTED = "2026-11-30"
_PYTORCH = "https://github.com/pytorch/pytorch/blob/main"
_TEMPLATE = f"{_PYTORCH}/.github/PULL_REQUEST_TEMPLATE/fix_issue.md"
_TITAN = "https://github.com/pytorch/torchtitan/blob/main"


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing asked for, and the file that asks."""

    text: str
    source: str


RULES = {
    "pytorch": (
        Rule(
            "a person has read every line, understands it, is responsible for it, and has added "
            "comment of their own; contributions of fully autonomous agents are not accepted",
            f"{_PYTORCH}/AI_POLICY.md",
        ),
        Rule(
            "what AI wrote stands under its heading, and nowhere else", f"{_PYTORCH}/AI_POLICY.md"
        ),
        Rule(
            "`Fixes #ISSUE`, or the maintainer who has agreed; a summary of one paragraph at most "
            "beyond the issue; `BC-breaking?` answered",
            _TEMPLATE,
        ),
        Rule("`spin fixlint` (lintrunner) is clean", _TEMPLATE),
        Rule("tests are added or updated, beside related ones, and can fail", _TEMPLATE),
        Rule("benchmark results where performance changes", _TEMPLATE),
        Rule(
            "the author of each commit has signed the CLA (EasyCLA)",
            f"{_PYTORCH}/.github/merge_rules.yaml",
        ),
    ),
    "torchtitan": (
        Rule(
            "of general interest, PyTorch-native, minimal change to the model; a technique of "
            "moderate or large complexity belongs in pytorch/pytorch",
            f"{_TITAN}/CONTRIBUTING.md",
        ),
        Rule(
            "no new command-line option: each new field carries `tyro.conf.Suppress`",
            f"{_TITAN}/CONTRIBUTING.md",
        ),
        Rule(
            "identical loss with a fixed seed and deterministic algorithms where results must not "
            "change (`scripts/loss_compare.py main BRANCH --assert-equal`), else convergence on "
            "representative data",
            f"{_TITAN}/CONTRIBUTING.md",
        ),
        Rule("memory and TPS or MFU where performance is claimed", f"{_TITAN}/CONTRIBUTING.md"),
        Rule("`pre-commit run --all-files` is clean", f"{_TITAN}/CONTRIBUTING.md"),
        Rule(
            "the author has signed the CLA: https://code.facebook.com/cla",
            f"{_TITAN}/CONTRIBUTING.md",
        ),
        Rule(
            "a person has read every line, understands it and is responsible for it; what AI wrote "
            "stands under its heading (PyTorch's rule; TorchTitan has none of its own)",
            f"{_PYTORCH}/AI_POLICY.md",
        ),
    ),
}
