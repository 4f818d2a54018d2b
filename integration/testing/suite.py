"""Run one contribution's tests in a process of its own, under one overlay."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.ground import files, processes
from integration.ground.paths import REPO
from integration.patchset.overlay import Overlay

# Longest time for one contribution's tests in one stage, in seconds.
SUITE_SECONDS = 2400


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of pytest gave; ``failures`` are ``test id: first line of the message``.

    ``ran`` is False where pytest collected nothing or died: a failure of its own.
    """

    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: tuple[str, ...]
    ran: bool

    @property
    def green(self) -> bool:
        return self.ran and self.failed == 0


def run_pytest(
    tests: Sequence[Path | str],
    *,
    patched: Overlay,
    report: Path,
    log: Path,
    extra: Sequence[str] = (),
    python: str = sys.executable,
    folder: Path | None = None,
) -> Outcome:
    """Run pytest over ``tests`` with the overlay ``patched`` first on ``PYTHONPATH``.

    Args:
        folder: where it runs, and what follows the overlay there; this repository by default.

    Output goes to ``log``, JUnit XML to ``report``. Nothing compiles, downloads or listens on
    another address than 127.0.0.1.
    """
    env = {
        **processes.environment(),
        "PYTHONPATH": patched.pythonpath(str(folder or REPO)),
        "OMP_NUM_THREADS": "1",  # several suites and ranks share the cores
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    line = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    line += [*extra, *map(str, tests)]
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    with open(log, "w") as output:
        try:
            subprocess.run(
                line,
                cwd=folder or REPO,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=SUITE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return Outcome(
                0, 1, 0, SUITE_SECONDS, (f"no end after {SUITE_SECONDS} s: {log}",), False
            )
    return read_report(report, log)


def _cases(report: Path) -> Iterator[tuple[str, str, str, float]]:
    """Yield test id, outcome, first line of its message and seconds of each test of a report."""
    for case in ET.parse(report).getroot().iter("testcase"):
        tags = {child.tag: child for child in case}
        worst = next((t for t in ("error", "failure", "skipped") if t in tags), "passed")
        message = (tags[worst].get("message") or "").strip() if worst in tags else ""
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        outcome = "failed" if worst == "failure" else worst
        yield name, outcome, message.partition("\n")[0], float(case.get("time", "0"))


def read_report(report: Path, log: Path) -> Outcome:
    """Read pytest's JUnit XML; a missing or empty one is a failure that points to the log."""
    if not report.exists():
        return Outcome(0, 1, 0, 0.0, (f"pytest ended without a report: {log}",), False)
    cases = list(_cases(report))
    seconds = sum(case[3] for case in cases)
    if not cases:
        return Outcome(0, 1, 0, seconds, (f"no test was collected: {log}",), False)
    count = Counter(outcome for _, outcome, _, _ in cases)
    failures = tuple(
        f"{name}: {message or 'failed'}"
        for name, outcome, message, _ in cases
        if outcome in ("error", "failed")
    )
    return Outcome(count["passed"], len(failures), count["skipped"], seconds, failures, True)


def outcomes(report: Path) -> dict[str, str]:
    """Return ``test id: passed, failed, error or skipped`` of a JUnit report, if it exists."""
    return {name: outcome for name, outcome, _, _ in _cases(report)} if report.exists() else {}


def merge_reports(reports: Sequence[tuple[str, Path]], target: Path) -> None:
    """Write one JUnit file of all suites, each named ``contribution.stage``."""
    root = ET.Element("testsuites")
    for name, report in reports:
        if report.exists():
            for suite in ET.parse(report).getroot().iter("testsuite"):
                suite.set("name", name)
                root.append(suite)
    target.parent.mkdir(parents=True, exist_ok=True)
    files.write(target, ET.tostring(root, encoding="utf-8", xml_declaration=True))
