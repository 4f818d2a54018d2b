"""The verbs, as a user types them: what is printed, and the exit code."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from integration.patchset import overlay, repository
from integration.tests.patchset.conftest import House, line, user_git


@pytest.fixture
def one(house: House) -> House:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.add("two", {"fakebase/core.py": line(4, "two", line(3, "one"))}, requires=["one"])
    return house


def test_every_verb_works_on_an_empty_repository(house: House, run, tmp_path: Path) -> None:
    checkout = house.checkout(tmp_path / "base")
    for arguments in (
        ["patches", "list"],
        ["patches", "check"],
        ["patches", "readme"],
        ["patches", "apply", "--to", str(checkout)],
        ["patches", "apply", "--to", str(checkout), "--reverse"],
        ["patches", "import"],
        ["patches", "export"],
        ["env"],
    ):
        ran = run(*arguments)
        assert (ran.code, ran.err.startswith("error")) == (0, False), (arguments, ran.err)


def test_list(one: House, run) -> None:
    evidence = one.root / "pytorch_contrib/one/evidence"
    evidence.mkdir()
    sha = one.get("one").sha256
    (evidence / "a.json").write_text(f'{{"patch_sha256": "{sha}"}}')
    (evidence / "b.json").write_text(
        f'{{"patch_sha256": "another", "measured_patch_sha256": "{sha}"}}'
    )
    rows = [row.split() for row in run("patches", "list").out.splitlines()]
    assert [" ".join(row) for row in rows] == [
        "name upstream status files lines requires tests evidence",
        "one pytorch pending 1 +1 -1 - test_one.py 2, 1 stale",
        "two pytorch pending 1 +1 -1 one test_two.py -",
    ]


def test_check_exit_codes(one: House, run) -> None:
    ran = run("patches", "check")
    assert (ran.code, ran.out.split(":")[0]) == (0, "2 patches")
    one.series().write_text("one\n")
    ran = run("patches", "check")
    assert ran.code == 1
    assert "two: unlisted" in ran.out
    assert "1 problem found" in ran.out


@pytest.mark.parametrize("verb", ["list", "check"])
def test_json(one: House, run, tmp_path: Path, verb: str) -> None:
    if verb == "check":
        one.series().write_text("one\n")
    alone = run("patches", verb, "--json")
    found = json.loads(alone.out)
    expected = {"list": ("name", ["one", "two"]), "check": ("verdict", ["unlisted"])}
    key, values = expected[verb]
    assert [row[key] for row in found] == values
    assert alone.code == (verb == "check")
    file = tmp_path / "a.json"
    both = run("patches", verb, "--json", str(file))
    assert both.out == run("patches", verb).out + f"json: {file}\n" or verb == "check"
    assert json.loads(file.read_text()) == found


@pytest.mark.parametrize("verb", ["list", "check"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    one: House, run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    monkeypatch.setattr(repository, "scan", None)  # the work
    for target in (tmp_path, tmp_path / "missing/a.json"):
        ran = run("patches", verb, "--json", str(target))
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(
            f"error: expected a file that can be written for --json, got {target}"
        )


def test_env_and_overlay(one: House, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/my folder")
    path = overlay.build(["two"]).path
    assert path is not None
    assert (path / "overlay.json").is_file()
    assert run("env", "two").out == f"export PYTHONPATH='{path}:/my folder'\n"


def test_errors_are_one_line(one: House, run) -> None:
    ran = run("env", "tow")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "error: unknown contribution tow; did you mean two? (`integration patches list` shows "
        "all)\n"
    )


def test_apply_and_reverse(one: House, run, tmp_path: Path) -> None:
    checkout = one.checkout(tmp_path / "base")
    to = ["patches", "apply", "--to", str(checkout)]
    assert run(*to, "two").out == "one: applied\ntwo: applied\n"
    assert run(*to).out == "one: already applied\ntwo: already applied\n"
    assert run(*to, "--reverse").out == "one: taken off\ntwo: taken off\n"
    ran = run(*to, "--reverse", "--commits")
    assert (ran.code, "got both" in ran.err) == (2, True)
    run(*to, "--commits")
    assert user_git(checkout, "log", "--format=%s").split("\n")[0] == "[fake] Change two"


def test_new_import_export_as_told(house: House, run) -> None:
    """The steps that `new` prints are enough."""
    told = run("patches", "new", "leaf", "--upstream", "pytorch").out
    assert "integration patches import" in told
    run("patches", "import")
    repo = Path(told.split("git -C ")[1].split()[0])
    (repo / "fakebase/deep/inner/leaf.py").write_text("LEAF = 'mine'\n")
    message = told.split("-e -F ")[1].split()[0]
    user_git(repo, "add", "-A")
    user_git(repo, "commit", "-q", "-F", message)
    assert "pytorch/leaf: new" in run("patches", "export").out
    assert run("patches", "check").code == 0


def test_readme(one: House, run) -> None:
    assert "| [one](patches/pytorch/one.patch) |" in run("patches", "readme").out
    assert (
        "expected the lines <!-- contributions:begin -->" in run("patches", "readme", "--write").err
    )


def test_help_is_quick_and_light() -> None:
    """No torch, and no git or diff library, before a verb runs."""
    code = (
        "import sys\nfrom integration.cli.main import main\n"
        "try: main(['patches', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'unidiff', 'tomlkit', 'integration.patchset.git'} & set(sys.modules)\n"
        "sys.exit(bool(heavy))"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0
    assert time.perf_counter() - start < 2.0  # 0.2 s alone; a busy machine gets room
