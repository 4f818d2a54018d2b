"""Run one contribution's tests in a process of its own, under one overlay."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
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


def read_report(report: Path, log: Path) -> Outcome:
    """Read pytest's JUnit XML; a missing or empty one is a failure that points to the log."""
    if not report.exists():
        return Outcome(0, 1, 0, 0.0, (f"pytest ended without a report: {log}",), False)
    passed = skipped = 0
    failures = []
    seconds = 0.0
    for case in ET.parse(report).getroot().iter("testcase"):
        seconds += float(case.get("time", "0"))
        bad = case.find("failure")
        bad = case.find("error") if bad is None else bad
        if bad is not None:
            message = (bad.get("message") or "").strip().splitlines()
            name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
            failures.append(f"{name}: {message[0] if message else 'failed'}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    if not passed and not failures and not skipped:
        return Outcome(0, 1, 0, seconds, (f"no test was collected: {log}",), False)
    return Outcome(passed, len(failures), skipped, seconds, tuple(failures), True)


def outcomes(report: Path) -> dict[str, str]:
    """Return ``test id: passed, failed, error or skipped`` of a JUnit report, if it exists."""
    if not report.exists():
        return {}
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        tags = {child.tag for child in case}
        worst = next((t for t in ("error", "failure", "skipped") if t in tags), "passed")
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        found[name] = "failed" if worst == "failure" else worst
    return found


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
