"""The ``Drop-when`` test of a contribution, on an upstream without the patch."""

import importlib.metadata
import sys
import tempfile
import venv
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset import overlay, scratch
from integration.patchset import pins as pins_module
from integration.patchset.patch import Contribution
from integration.patchset.pins import Pin
from integration.testing.suite import Outcome, run_pytest
from integration.upstream import branch, index
from integration.upstream.newer import Newer

_NOT_COMPILED = "a checkout of torch has no compiled code: give a wheel or a version"
# What the contributions' tests need beside the upstreams, at the versions that they have here.
_TOOLS = ("expecttest", "pytest", "pytest-timeout")


def test_of(contribution: Contribution) -> str:
    """Return what pytest is to run: the file here, then ``::Class::test`` of ``Drop-when``."""
    value = " ".join(contribution.values("Drop-when"))
    target, mark, rest = value.partition("::")
    for file, path in contribution.tests:
        if path == target:
            return f"{contribution.folder / file}{mark}{rest}"
    known = ", ".join(path for _, path in contribution.tests)
    raise UserError(
        f"expected Drop-when: of {contribution.name} to name one of its tests ({known}), got "
        f"{value!r}; nothing was run: mend the line (integration patches import, amend, export)"
    )


def run(contribution: Contribution, python: str = sys.executable) -> Outcome:
    """Run it on what ``python`` has installed, without any patch."""
    name = f"{contribution.name}.drop-when"
    reports = paths.REPO / "reports"
    return run_pytest(
        [test_of(contribution)],
        patched=overlay.build([]),
        report=reports / f"{name}.xml",
        log=reports / f"{name}.log",
        python=python,
    )


def words(outcome: Outcome) -> str:
    """Return the outcome in a word or two; a test that was skipped has shown nothing."""
    if outcome.failed:
        return "fails" if outcome.ran else "does not run"
    return "passes" if outcome.passed else "skipped"


def on_commit(contribution: Contribution, clone: Path, commit: str) -> str:
    """Run it on ``commit`` of an upstream's clone, in a throwaway environment; return the verdict.

    Where it cannot run, the verdict is ``not run: `` and the reason.
    """
    pins = pins_module.load()
    pin = pins[contribution.upstream]
    if pin.upstream == "pytorch":
        return f"not run: {_NOT_COMPILED} to `integration patches drift --run-drop-when`"
    try:
        with branch.worktree(clone, commit) as tree:
            newer = {pin.upstream: Newer(pin, commit[:12], folder=tree)}
            with environment(newer, pins) as python:
                outcome = run(contribution, str(python))
    except UserError as error:
        return f"not run: {error}"
    return ": ".join((words(outcome), *outcome.failures[:1]))


@contextmanager
def environment(newer: Mapping[str, Newer], pins: Mapping[str, Pin]) -> Generator[Path, None, None]:
    """Yield the Python of a throwaway environment with ``newer``, and the pins for the others."""
    parent = paths.cache_dir()
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="drift-", dir=parent) as temporary:
        folder = Path(temporary)
        venv.create(folder / "venv", symlinks=True)
        python = folder / "venv" / "bin" / "python"
        wanted = [f"{pin.package}=={pin.version}" for u, pin in pins.items() if u not in newer]
        wanted += [_installable(item, folder / "source") for item in newer.values()]
        index.install(python, [*wanted, *_tools()])
        yield python


def _tools() -> Sequence[str]:
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return [f"{name}=={installed[name]}" for name in _TOOLS if name in installed]


def _installable(newer: Newer, copy: Path) -> str:
    """Return what pip can install; a checkout as a copy, as a build leaves files behind."""
    if newer.folder is None:
        return newer.requirement
    if not any((newer.folder / name).is_file() for name in ("pyproject.toml", "setup.py")):
        raise UserError(f"no pyproject.toml in {newer.folder}")
    if newer.pin.upstream == "pytorch":
        raise UserError(_NOT_COMPILED)
    files = {
        file.relative_to(newer.folder).as_posix(): file.read_bytes()
        for file in newer.folder.rglob("*")
        if file.is_file() and ".git" not in file.relative_to(newer.folder).parts
    }
    scratch.write(copy / newer.pin.upstream, files)
    return str(copy / newer.pin.upstream)
