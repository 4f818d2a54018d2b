"""``integration test``: run the planned suites side by side, then one table and one line."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from integration.evidence.check import check
from integration.ground import terminal
from integration.ground.machine import cores
from integration.ground.paths import REPO
from integration.patchset import overlay, repository
from integration.proof import parity
from integration.proof import table as table_module
from integration.proof.parity import Parity
from integration.proof.stages import Stage, Suite, Verdict, closing_line, plan
from integration.testing.suite import merge_reports, run_pytest

REPORTS = REPO / "reports"


def run(names: Sequence[str], *, prove: bool, full: bool, project: bool, record: bool) -> bool:
    """Run and report; return whether all is as it must be."""
    everything = repository.load()
    chosen = [c for c in everything if not names or c.name in names]
    suites = plan(everything, names, prove=prove, full=full, project=project)
    console = terminal.console(160)
    verdicts: list[Verdict] = []
    columns = (TextColumn("tests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(suites))
        # A suite is mostly imports and waiting for ranks: two at once gain on two cores.
        with ThreadPoolExecutor(max_workers=max(1, cores())) as pool:
            # The project's trainings take longest: started last, they would run alone.
            first = sorted(suites, key=lambda suite: suite.name != "project/training")
            for future in as_completed([pool.submit(_run_suite, suite) for suite in first]):
                verdict = future.result()
                verdicts.append(verdict)
                progress.advance(task)
                outcome, color = verdict.outcome, "green" if verdict.good else "red"
                progress.console.print(
                    f"[{color}]{verdict.suite.title}: {verdict.words}[/] ({outcome.passed} passed, "
                    f"{outcome.failed} failed, {outcome.skipped} skipped)"
                )
    verdicts.sort(key=lambda verdict: suites.index(verdict.suite))
    parities: list[Parity] = []
    if prove:
        parities = parity.compare(chosen, REPORTS / "parity")
        for contribution, result in zip(chosen, parities, strict=True):
            if record and (file := parity.record(contribution, result)):
                console.print(f"evidence: {file}")
    good = all(v.good for v in verdicts) and all(p.equal is not False for p in parities)
    if prove and full:
        proof = table_module.rows(chosen, verdicts, parities, check(), everything)
        good = good and all(row.good for row in proof)
        shown = Table("contribution", *table_module.COLUMNS)
        for row in proof:
            shown.add_row(row.name, *row.cells, style=None if row.good else "red")
        console.print(shown, table_module.legend(parities))
        if record and good and not names:
            table_module.write(proof, parities)
            console.print("CONTRIBUTING.md: proof written")
        elif record:
            console.print(
                "CONTRIBUTING.md: no proof written: it is of the whole set, when all holds"
            )
    _report(console, verdicts, parities, brief=prove and full)
    return good


def _run_suite(suite: Suite) -> Verdict:
    patched = overlay.build(suite.contributions)
    report, log = _files(suite)
    # A pristine suite has made its point with the first failure.
    extra = ["-x"] if suite.stage is Stage.PRISTINE else []
    return Verdict(
        suite, run_pytest(suite.tests, patched=patched, report=report, log=log, extra=extra)
    )


def _files(suite: Suite) -> tuple[Path, Path]:
    base = REPORTS / suite.file_name
    base.parent.mkdir(parents=True, exist_ok=True)
    return base.with_name(base.name + ".xml"), base.with_name(base.name + ".log")


def _report(
    console: Console, verdicts: list[Verdict], parities: list[Parity], *, brief: bool
) -> None:
    table = Table("tests of", "with", "passed", "failed", "skipped", "seconds", "verdict")
    for verdict in verdicts:
        outcome = verdict.outcome
        table.add_row(
            verdict.suite.name,
            verdict.suite.stage.value,
            str(outcome.passed),
            str(outcome.failed),
            str(outcome.skipped),
            f"{outcome.seconds:.1f}",
            verdict.words,
            style=None if verdict.good else "red",
        )
    for result in parities:
        mark = {True: "passes", False: "FAILS", None: "not compared"}[result.equal]
        table.add_row(result.name, "parity", "", "", "", "", f"{mark}: {result.words}")
    if not brief:  # the proof's table has said it all
        console.print(table)
    for verdict in verdicts:
        if not verdict.good:
            console.print(f"[red]{verdict.suite.title}[/] log: {_files(verdict.suite)[1]}")
            for failure in verdict.outcome.failures:
                console.print(f"  {failure}", markup=False)
    merge_reports(
        [(v.suite.file_name, _files(v.suite)[0]) for v in verdicts], REPORTS / "junit.xml"
    )
    console.print(f"JUnit: {REPORTS / 'junit.xml'}")
    print(closing_line(verdicts, parities))
