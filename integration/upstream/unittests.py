"""``integration test --upstream DIR``: an upstream's own tests, with the set and without it.

The tests come from a checkout of the user's (TorchTitan's are not in its wheel), and run against
the installed pin, never against the checkout's own package: they are copied away from it. What
fails alike on both sides is upstream's; only the differences are told.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from integration.ground import paths, terminal
from integration.ground.errors import UserError
from integration.ground.machine import cores
from integration.patchset import git, overlay, repository, scratch
from integration.patchset import pins as pins_module
from integration.patchset.overlay import Overlay
from integration.patchset.pins import Pin
from integration.testing.suite import outcomes, run_pytest
from integration.upstream.imports import Imports

FOLDERS = {"pytorch": "test", "torchtitan": "tests/unit_tests"}
MISSING = "missing"  # not collected, or its process died before it
_GOOD = ("passed", "skipped")
_OPTIONS = ("-o", "addopts=", "--timeout", "300")


@dataclass(frozen=True, slots=True)
class Difference:
    """One test that ends otherwise with the patches than without."""

    test: str
    pristine: str
    patched: str

    @property
    def worse(self) -> bool:
        """Newly skipped or newly passing is told, and no error."""
        return self.patched not in _GOOD


def run(names: Sequence[str], checkout: Path) -> bool:
    """Compare the tests that touch what ``names`` (all for none) touch; return whether none broke.

    Raises:
        UserError: no upstream's tests at ``checkout``.
    """
    pin, folder = _upstream_of(checkout)
    patched = overlay.build(names or None)
    touched = scratch.touched(repository.select(repository.load(), names or None))
    packages = {p.package for p in pins_module.load().values()}
    imports = Imports(pin.site(), packages)
    console = terminal.console(160)
    with tempfile.TemporaryDirectory(prefix="integration-") as temporary:
        copy = Path(temporary).resolve()
        _copy(checkout, folder.partition("/")[0], copy)
        files = sorted((copy / folder).rglob("test_*.py"))
        chosen = [f for f in files if imports.touches(f, touched)]
        console.print(f"{len(chosen)} of {len(files)} test files touch what the set touches")
        before, after = _both(chosen, copy, pin, patched, console, at_once=cores())
        worse = {item.test for item in differences(before, after) if item.worse}
        if again := [f for f in chosen if any(_is_in(test, f, copy) for test in worse)]:
            # Tests that share a port, or whose time was short, fail beside others: what is worse
            # must be so alone.
            console.print(f"worse in {len(again)} test file(s); once more, one after the other")
            alone = _both(again, copy, pin, patched, console, at_once=1)
            before, after = (
                {t: o for t, o in first.items() if not any(_is_in(t, f, copy) for f in again)}
                | second
                for first, second in zip((before, after), alone, strict=True)
            )
    found = differences(before, after)
    for item in found:
        mark = "[red]worse[/]" if item.worse else "[yellow]other[/]"
        console.print(f"{mark}  {item.test}: {item.pristine} -> {item.patched}", highlight=False)
    alike = Counter(before[test] for test in before if before[test] == after.get(test))
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(alike.items()))
    console.print(f"alike on {pin.package} {pin.version} and with the set: {told or 'none'}")
    worse = sum(item.worse for item in found)
    print(f"{sum(after.get(t) == 'passed' for t in after)} passed, {worse} failed")
    return worse == 0


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[Difference]:
    """Return every test whose outcome differs, the worse ones first."""
    tests = sorted({*before, *after})
    pairs = (Difference(t, before.get(t, MISSING), after.get(t, MISSING)) for t in tests)
    return sorted((d for d in pairs if d.pristine != d.patched), key=lambda d: not d.worse)


def _upstream_of(checkout: Path) -> tuple[Pin, str]:
    for upstream, pin in pins_module.load().items():
        folder = FOLDERS.get(upstream)
        if folder and (checkout / pin.package).is_dir() and (checkout / folder).is_dir():
            return pin, folder
    wanted = " or ".join(f"{p.package}/ and {FOLDERS[u]}/" for u, p in pins_module.load().items())
    raise UserError(
        f"expected {wanted} in {checkout}, found neither; no upstream test was run: clone an "
        f"upstream, check out what is nearest to the pin, and give its root"
    )


def _copy(checkout: Path, folder: str, target: Path) -> None:
    listed = git.attempt(["ls-files", "-z", "--", folder], checkout)
    tracked = [name for name in listed.out.decode().split("\0") if name]
    if listed.code or not tracked:  # not a git checkout: an unpacked archive, say
        below = (f for f in (checkout / folder).rglob("*") if "__pycache__" not in f.parts)
        tracked = [f.relative_to(checkout).as_posix() for f in below if f.is_file()]
    for name in tracked:
        if (checkout / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkout / name, target / name)
    (target / "pytest.ini").write_text("[pytest]\n")  # no configuration from further up


def _is_in(test: str, file: Path, copy: Path) -> bool:
    module = ".".join(file.relative_to(copy).with_suffix("").parts)
    return f"{test}.".replace("::", ".").startswith(f"{module}.")


def _both(
    files: Sequence[Path],
    copy: Path,
    pin: Pin,
    patched: Overlay,
    console: Console,
    *,
    at_once: int,
) -> tuple[dict[str, str], dict[str, str]]:
    """Run each file in two processes of its own, on the pin and with the set."""
    reports = paths.REPO / "reports" / "upstream" / pin.upstream

    def one(file: Path, stage: str, built: Overlay) -> dict[str, str]:
        name = file.relative_to(copy).as_posix().replace("/", ".")
        report = reports / f"{name}.{stage}.xml"
        log = report.with_suffix(".log")
        report.parent.mkdir(parents=True, exist_ok=True)
        run_pytest([file], patched=built, report=report, log=log, extra=_OPTIONS, folder=copy)
        return outcomes(report) or {name: "no report"}

    columns = (TextColumn("tests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    stages = (("pristine", overlay.build([])), ("patched", patched))
    results: dict[str, dict[str, str]] = {stage: {} for stage, _ in stages}
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(at_once) as pool:
        bar = progress.add_task("tests", total=2 * len(files))
        jobs = [
            (stage, pool.submit(one, file, stage, built))
            for file in files
            for stage, built in stages
        ]
        for stage, job in jobs:
            results[stage].update(job.result())
            progress.advance(bar)
    return results["pristine"], results["patched"]
