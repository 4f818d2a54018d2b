"""What each upstream asks of a pull request, dated and cited; CONTRIBUTING.md tells the same."""

from dataclasses import dataclass

NOTED = "2026-11-29"
_PYTORCH = "https://github.com/pytorch/pytorch/blob/main"
_TITAN = "https://github.com/pytorch/torchtitan/blob/main"


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing asked for, and the file that asks."""

    text: str
    source: str


RULES = {
    "pytorch": (
        Rule(
            "a person has read every line, understands it, answers for it, and has added comment "
            "of their own; contributions of fully autonomous agents are not accepted",
            f"{_PYTORCH}/AI_POLICY.md",
        ),
        Rule(
            "the AI section below says what AI did",
            f"{_PYTORCH}/AI_POLICY.md",
        ),
        Rule(
            "an issue is linked, or a maintainer's approval; a summary of one paragraph",
            f"{_PYTORCH}/.github/PULL_REQUEST_TEMPLATE",
        ),
        Rule(
            "the author of each commit has signed the CLA (EasyCLA)", f"{_PYTORCH}/CONTRIBUTING.md"
        ),
        Rule("`lintrunner` (`spin lint`) is clean", f"{_PYTORCH}/CONTRIBUTING.md"),
        Rule("tests stand beside related ones, and can fail", f"{_PYTORCH}/CONTRIBUTING.md"),
        Rule("labels: release notes and topic", f"{_PYTORCH}/CONTRIBUTING.md"),
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
            "a person has read every line, understands it and answers for it; what AI did is said "
            "below (PyTorch's rule; TorchTitan has none of its own)",
            f"{_PYTORCH}/AI_POLICY.md",
        ),
    ),
}
