"""What counts as proved: the rules on outcomes, without running anything long."""

import textwrap
from pathlib import Path

import pytest

from integration.patchset import overlay
from integration.proof import parity
from integration.proof.parity import Curve, Parity
from integration.proof.stages import Stage, Suite, Verdict, closing_line
from integration.testing.suite import Outcome, merge_reports, read_report, run_pytest


def _outcome(passed: int = 0, failed: int = 0, *, ran: bool = True) -> Outcome:
    return Outcome(passed, failed, 0, 1.0, ("test: message",) * failed, ran)


def _verdict(stage: Stage, outcome: Outcome) -> Verdict:
    return Verdict(Suite("name", stage, (Path("test_x.py"),)), outcome)


@pytest.mark.parametrize(
    ("stage", "outcome", "good"),
    [
        (Stage.ALONE, _outcome(3), True),
        (Stage.ALONE, _outcome(3, 1), False),
        (Stage.ALONE, _outcome(0, 1, ran=False), False),
        # Tests that pass without the patch prove nothing about it.
        (Stage.PRISTINE, _outcome(3), False),
        (Stage.PRISTINE, _outcome(2, 1), True),
        # A pytest that died has not shown that the patch is needed.
        (Stage.PRISTINE, _outcome(0, 1, ran=False), False),
    ],
)
def test_each_stage_has_its_own_demand(stage, outcome, good):
    assert _verdict(stage, outcome).good is good


def test_the_closing_line_counts_a_pristine_suite_as_one_proof():
    verdicts = [
        _verdict(Stage.ALONE, _outcome(5)),
        _verdict(Stage.FULL, _outcome(4, 1)),
        _verdict(Stage.PRISTINE, _outcome(2, 3)),
        _verdict(Stage.PRISTINE, _outcome(5)),
    ]
    parities = [Parity("a", True, ""), Parity("b", False, ""), Parity("c", None, "")]
    assert closing_line(verdicts, parities) == "11 passed, 3 failed"


def _curve(**changes: float) -> Curve:
    losses, norms = [8.0] * parity.STEPS, [1.0] * parity.STEPS
    if "loss" in changes:
        losses[6] = changes["loss"]
    if "norm" in changes:
        norms[9] = changes["norm"]
    return Curve(tuple(losses), tuple(norms))


def test_parity_sees_one_bit():
    one_ulp = 8.0 + 2**-20  # of a float32
    assert parity._judge("x", _curve(), _curve()).equal is True
    loss = parity._judge("x", _curve(), _curve(loss=one_ulp))
    assert loss.equal is False
    assert loss.words == f"loss of step 7: expected 8.0, got {one_ulp!r}"
    norm = parity._judge("x", _curve(), _curve(norm=2.0))
    assert norm.words == "gradient norm of step 10: expected 1.0, got 2.0"


def test_parity_refuses_a_curve_that_is_too_short():
    short = Curve((8.0,), (1.0,))
    assert parity._judge("x", short, short).equal is False


@pytest.fixture
def suite(tmp_path):
    """Write a test module and run it on the pristine pins."""

    def run(text: str) -> tuple[Outcome, Path]:
        test = tmp_path / "test_sample.py"
        test.write_text(textwrap.dedent(text))
        report = tmp_path / "report.xml"
        outcome = run_pytest(
            [test], patched=overlay.build([]), report=report, log=tmp_path / "log.txt"
        )
        return outcome, report

    return run


def test_outcomes_are_read_from_pytest_itself(suite, tmp_path):
    outcome, report = suite(
        """
        import pytest
        def test_passes(): pass
        def test_fails(): assert 1 == 2, "one is not two"
        def test_errors(missing_fixture): pass
        @pytest.mark.skip(reason="no GPU")
        def test_skips(): pass
        """
    )
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 2, 1)
    assert any("test_fails: AssertionError: one is not two" in f for f in outcome.failures)
    merge_reports([("name.alone", report)], tmp_path / "junit.xml")
    assert '<testsuite name="name.alone"' in (tmp_path / "junit.xml").read_text()


def test_nothing_collected_is_a_failure(suite):
    outcome, _ = suite("x = 1\n")
    assert not outcome.green


def test_a_pytest_that_dies_is_a_failure(suite):
    outcome, _ = suite("import os\nos._exit(0)\n")
    assert (outcome.green, outcome.ran) == (False, False)


def test_a_module_that_cannot_be_imported_counts_as_failed_tests(suite):
    """So a test of a new API proves itself on the pristine pins, where the name is missing."""
    outcome, _ = suite("from torch import no_such_name\n")
    assert (outcome.ran, outcome.failed) == (True, 1)


def test_a_missing_report_is_said(tmp_path):
    outcome = read_report(tmp_path / "none.xml", tmp_path / "log.txt")
    assert outcome.failures == (f"pytest ended without a report: {tmp_path / 'log.txt'}",)
