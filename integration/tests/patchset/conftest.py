"""A house of its own for each test: a small upstream, pins, patches, and a cache folder.

The fake pins are found as the real ones are, by their metadata on ``sys.path``. Nothing of the
user's git configuration, and no git environment of a calling hook, reaches a test.
"""

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from integration.cli.main import main
from integration.evidence.check import check
from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset import git, repository, scratch
from integration.patchset.finding import Finding
from integration.patchset.overlay import Overlay
from integration.patchset.patch import Contribution
from integration.patchset.pins import sha256

LINES = "".join(f"line {number}\n" for number in range(1, 41))  # room for hunks that stand apart
BLOCK = "".join(f"block {number}\n" for number in range(10))
PRISTINE = {
    "fakebase/__init__.py": "VALUE = 'pristine'\n",
    "fakebase/core.py": LINES,
    "fakebase/deep/__init__.py": "",
    "fakebase/deep/inner/__init__.py": "",
    "fakebase/deep/inner/leaf.py": "LEAF = 'pristine'\n",
    "fakebase/other/__init__.py": "OTHER = 1\n",
    "fakebase/block.py": LINES + BLOCK,
    "fakeapp/__init__.py": "APP = 'pristine'\n",
    "fakeapp/train.py": LINES,
}
PACKAGES = {"pytorch": "fakebase", "torchtitan": "fakeapp"}

MESSAGE = """\
{subject}

What it does, in one paragraph.

Root cause: it was so.

Behaviour change: none.

Test plan: run the test.

Status: {status}
Issue: none it is a test
Requires:{requires}
Test: test_{name}.py -> test/test_{name}.py
Numerics: bitwise
Drop-when: test/test_{name}.py::Test::test_{name}
"""


class House:
    """A repository of contributions on two fake upstreams; ``add`` makes a contribution."""

    def __init__(self, root: Path, site: Path) -> None:
        self.root = root
        self.site = site
        self.hashes: dict[str, dict[str, str]] = {upstream: {} for upstream in PACKAGES}
        for path, text in PRISTINE.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(text)
        for package in PACKAGES.values():
            self.install(package, "1.0")
        for upstream in PACKAGES:
            (root / "patches" / upstream).mkdir(parents=True)
            self.series(upstream).write_text("")
        self.write_pins()

    def install(self, package: str, version: str) -> None:
        info = self.site / f"{package}-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )

    def series(self, upstream: str = "pytorch") -> Path:
        return self.root / "patches" / upstream / "series"

    def patch(self, name: str, upstream: str = "pytorch") -> Path:
        return self.root / "patches" / upstream / f"{name}.patch"

    def write_pins(self) -> None:
        text = "# kept comment\n"
        for upstream, package in PACKAGES.items():
            text += f'\n[{upstream}]\npackage = "{package}"\nversion = "1.0"\n'
            text += f'repository = "https://example.org/{package}"\ntag = "v1.0"\n'
            text += f'commit = "{"0" * 40}"\n\n[{upstream}.files]\n'
            for path, digest in sorted(self.hashes[upstream].items()):
                text += f'"{path}" = "{digest}"\n'
        (self.root / "patches" / "pins.toml").write_text(text)

    def add(
        self,
        name: str,
        edits: Mapping[str, str | None],
        *,
        upstream: str = "pytorch",
        requires: Sequence[str] = (),
        status: str = "pending",
        subject: str | None = None,
        message: str | None = None,
    ) -> bytes:
        """Store the contribution that gives the files of ``edits`` new texts (None removes)."""
        base = {path: text.encode() for path, text in PRISTINE.items()}
        with contextlib.suppress(UserError):  # some tests require what is not there
            base, _ = scratch.apply(base, repository.select(repository.load(), requires))
        with scratch.folder_with(base) as folder:
            git.run(["init", "-q"], folder)
            git.run(["add", "-A"], folder)
            git.run(["commit", "-qm", "base"], folder)
            for path, text in edits.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                if text is None:
                    (folder / path).unlink()
                else:
                    (folder / path).write_text(text)
            git.run(["add", "-A"], folder)
            text = message or MESSAGE.format(
                name=name,
                subject=subject or f"[fake] Change {name}",
                status=status,
                requires="".join(f" {', '.join(requires)}" if requires else ""),
            )
            git.run(["commit", "-q", "-F", "-"], folder, stdin=text.encode())
            data = git.run([*git.FORMAT_PATCH, "-1"], folder).out
        self.patch(name, upstream).write_bytes(data)
        with self.series(upstream).open("a") as series:
            series.write(f"{name}\n")
        contrib = self.root / f"{upstream}_contrib" / name
        contrib.mkdir(parents=True, exist_ok=True)
        (contrib / f"test_{name}.py").write_text("")
        for path in edits:
            if path in PRISTINE:
                self.hashes[upstream][path] = sha256(PRISTINE[path].encode())
        self.write_pins()
        return data

    def check(self) -> list[Finding]:
        return check()

    def get(self, name: str) -> Contribution:
        return next(c for c in repository.load() if c.name == name)

    def environment(self, **extra: str) -> dict[str, str]:
        """For a Python of its own that finds the fake pins."""
        here = str(Path(paths.__file__).parents[1])
        return {**os.environ, "PYTHONPATH": os.pathsep.join((str(self.site), here)), **extra}

    def checkout(self, folder: Path, upstream: str = "pytorch", **edits: str) -> Path:
        """Make an upstream's git checkout as a user has it; ``core="…"`` replaces core.py."""
        package = PACKAGES[upstream]
        files = {p: t for p, t in PRISTINE.items() if p.startswith(f"{package}/")}
        files |= {f"{package}/{stem}.py": text for stem, text in edits.items()}
        files["README.md"] = "upstream\n"
        scratch.write(folder, {path: text.encode() for path, text in files.items()})
        user_git(folder, "init", "-q")
        user_git(folder, "add", "-A")
        user_git(folder, "commit", "-qm", "upstream")
        return folder


def user_git(folder: Path, *arguments: str, stdin: str = "") -> str:
    """Run git as a user would, not through the module under test."""
    identity = ["-c", "user.name=user", "-c", "user.email=user@example.org"]
    done = subprocess.run(
        ["git", *identity, *arguments],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def folder(built: Overlay) -> Path:
    """Return where an overlay is that is not the pristine one's nothing."""
    assert built.path is not None
    return built.path


def line(number: int, text: str, lines: str = LINES) -> str:
    """Return ``lines`` with the line ``number`` replaced."""
    split = lines.split("\n")
    split[number - 1] = text
    return "\n".join(split)


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below ``folder`` but git's own: the whole state, to compare."""
    files = (file for file in sorted(folder.rglob("*")) if ".git" not in file.parts)
    return {str(f.relative_to(folder)): f.read_bytes() for f in files if f.is_file()}


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith("GIT_")]:
        monkeypatch.delenv(key)
    home = tmp_path / "home"
    home.mkdir()
    # A user's configuration that would change the bytes of every patch, were it read.
    (home / ".gitconfig").write_text(
        "[diff]\n\talgorithm = patience\n\tnoprefix = true\n\tcontext = 7\n"
        "[core]\n\tautocrlf = true\n[format]\n\tsignature = mine\n"
        '\theaders = "X-Mine: yes\\n"\n'
        "[commit]\n\tgpgSign = true\n[apply]\n\twhitespace = fix\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setenv("INTEGRATION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("INTEGRATION_PINS", "")  # put back whatever a test sets
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture
def plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test's own git calls be without the user's configuration, too."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_git: None) -> House:
    site = tmp_path / "site"
    site.mkdir()
    root = tmp_path / "house"
    root.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(paths, "REPO", root)
    monkeypatch.setattr(paths, "PATCHES", root / "patches")
    return House(root, site)


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> Ran:
        code = 0
        try:
            main(list(arguments))
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return run
