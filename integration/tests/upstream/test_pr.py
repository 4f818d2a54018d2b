"""A pull request is prepared in a user's clone, of which nothing but a new branch changes."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

from integration.ground.errors import UserError
from integration.patchset import git, pins
from integration.testing.suite import Outcome
from integration.tests.patchset.conftest import LINES, House, line, tree, user_git
from integration.upstream import branch, pr, text
from integration.upstream.branch import Branch, Linted
from integration.upstream.rules import RULES

CORE = "fakebase/core.py"


@pytest.fixture
def full(house: House) -> House:
    house.add("one", {CORE: line(3, "one = 1")})
    house.add("two", {CORE: line(4, "two = 2", line(3, "one = 1"))}, requires=["one"])
    house.add("app", {"fakeapp/train.py": "app = 1\n"}, upstream="torchtitan", requires=["one"])
    for name in ("one", "two"):
        test = house.root / f"pytorch_contrib/{name}/test_{name}.py"
        test.write_text(f"import fakebase.core\n\n# tests {name}\n")
    return house


@pytest.fixture
def clone(full: House, tmp_path: Path) -> Path:
    """An upstream with history on top of the pin, and a user's unfinished work in it."""
    folder = full.checkout(tmp_path / "clone")
    user_git(folder, "branch", "-m", "main")
    (folder / CORE).write_text(LINES.replace("line 20\n", "line 20\nnewer\n"))
    (folder / "pyproject.toml").write_text('[tool.ruff.lint]\nselect = ["F401"]\n')
    user_git(folder, "add", "-A")
    user_git(folder, "commit", "-qm", "Newer")
    user_git(folder, "switch", "-qc", "work")
    (folder / CORE).write_text("unfinished\n")
    (folder / "mine.txt").write_text("mine\n")
    return folder


def state(clone: Path) -> tuple[dict[str, bytes], str, str, str]:
    refs = user_git(clone, "for-each-ref", "--format=%(refname) %(objectname)")
    status = user_git(clone, "status", "--porcelain", "--branch")
    return tree(clone), refs, status, user_git(clone, "worktree", "list")


def test_a_branch_and_nothing_else(full: House, clone: Path) -> None:
    before = state(clone)
    made = branch.make(clone, "two", None)
    assert [c.name for c in made.contributions] == ["one", "two"]
    assert made.files == (CORE, "test/test_one.py", "test/test_two.py")
    assert_expected_inline(
        user_git(clone, "log", "--reverse", "--stat=60", "--format=%an|%B", "main..two"),
        """\
Patch-set maintainers|[fake] Change one

What it does, in one paragraph.

Root cause: it was so.

Behaviour change: none.

Test plan: run the test.


 fakebase/core.py | 2 +-
 test/test_one.py | 3 +++
 2 files changed, 4 insertions(+), 1 deletion(-)
Patch-set maintainers|[fake] Change two

What it does, in one paragraph.

Root cause: it was so.

Behaviour change: none.

Test plan: run the test.


 fakebase/core.py | 2 +-
 test/test_two.py | 3 +++
 2 files changed, 4 insertions(+), 1 deletion(-)
""",
    )
    newer = LINES.replace("line 20\n", "line 20\nnewer\n")
    assert user_git(clone, "show", f"two:{CORE}") == line(3, "one = 1\ntwo = 2", newer).replace(
        "line 4\n", ""
    )
    user_git(clone, "fsck", "--no-dangling")
    user_git(clone, "branch", "-qD", "two")
    assert state(clone) == before


def test_base(full: House, clone: Path, tmp_path: Path) -> None:
    """A revision, or the clone's main, or its origin's."""
    pin = user_git(clone, "rev-parse", "main~1").strip()
    assert branch.make(clone, "one", pin).base == pin
    second = tmp_path / "second"
    user_git(tmp_path, "clone", "-q", "--depth=1", f"file://{clone}", str(second), "-b", "main")
    user_git(second, "switch", "-qc", "other")
    user_git(second, "branch", "-qD", "main")
    assert branch.make(second, "one", None).base == user_git(clone, "rev-parse", "main").strip()
    user_git(second, "log", "one")


@pytest.mark.parametrize(
    ("prepare", "name", "message"),
    [
        ("git branch one", "one", "expected no branch one"),
        (f"sed -i 's/line 3$/changed/' {CORE}", "one", "CONFLICT .content.: Merge conflict in "),
        ("mkdir test; echo mine > test/test_one.py", "one", "expected no test/test_one.py in"),
        (f"sed -i 's/line 3$/one = 1/' {CORE}", "one", "there is nothing to submit"),
        ("true", "app", "expected fakeapp/ in refs/heads/main"),
        (
            "git branch -m main trunk",
            "one",
            "expected a git clone with refs/heads/main or",
        ),
    ],
)
def test_refused(full: House, clone: Path, prepare: str, name: str, message: str) -> None:
    user_git(clone, "switch", "-qf", "main")
    os.system(f"cd {clone} && {prepare}")
    user_git(clone, "add", "-A")
    user_git(clone, "commit", "--allow-empty", "-qm", "Newer still")
    before = state(clone)
    with pytest.raises(UserError, match=message):
        branch.make(clone, name, None)
    assert state(clone) == before


def test_lint_with_the_clones_configuration(
    full: House, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    made = branch.make(clone, "one", None)
    before = state(clone)
    (ruff,) = branch.lint(clone, made)
    assert ruff.clean is False
    assert "test/test_one.py:1:8" in ruff.output.replace("-->", "")  # F401: the import is unused
    assert state(clone) == before
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (ruff,) = branch.lint(clone, made)
    assert (ruff.clean, ruff.output) == (None, "ruff is not installed")


def test_the_text(full: House, clone: Path) -> None:
    evidence = full.root / "pytorch_contrib/two/evidence"
    evidence.mkdir()
    record = {
        "patch_sha256": full.get("two").sha256,
        "measured_patch_sha256": "of the same patch in other words",
        "command": "python bench.py",
        "machine": {"gpu": "none", "cores": 2},
        "torch": "1.0",
        "results": {
            "pristine": {"ms": 3.0, "raw": [1] * 9},
            "patched": {"ms": 1.5, "raw": [2] * 9},
        },
        "ranks": 2,
    }
    (evidence / "bench.json").write_text(json.dumps(record))
    (evidence / "old.json").write_text(json.dumps({**record, "patch_sha256": "another"}))
    two, one = full.get("two"), full.get("one")
    made = Branch("two", "b" * 40, "c" * 40, (one, two), (CORE, "test/test_two.py"))
    linted = [Linted("ruff check a.py", True, ""), Linted("flake8 a.py", None, "not installed")]
    outcomes = {
        "pristine": Outcome(1, 2, 0, 0.1, (), True),
        "patched": Outcome(3, 0, 0, 0.1, (), True),
    }
    written = text.write(two, pins.load()["pytorch"], made, linted, outcomes, ["No commit."])
    assert_expected_inline(
        written.partition("- [ ]")[0],
        """\
# [fake] Change two

What it does, in one paragraph.

Root cause: it was so.

Behaviour change: none.

Test plan: run the test.

Issue: none it is a test
On top of: one (earlier commits of this branch)

## Tests

```
python test/test_two.py
```

On fakebase 1.0:

| | passed | failed | skipped |
|---|---|---|---|
| without the change | 1 | 2 | 0 |
| with it | 3 | 0 | 0 |

Lint, with the configuration of the branch:

- `ruff check a.py`: clean
- `flake8`: not run: not installed

## Numbers

**bench**

```
python bench.py
```

Machine: gpu none, cores 2. torch 1.0

|  | pristine | patched |
| --- | --- | --- |
| ms | 3 | 1.5 |
| raw | 9 values | 9 values |
| ranks | 2 |  |

`old.json` was measured on another version of the patch: left out.

## AI assistance

**TODO (the person who submits):** say here which parts of the change, the tests and this text were made with AI assistance, with what, and what you did to check them. The text above was assembled by a tool from the patch's header and recorded measurements.

<!-- Not part of the text: remove from here on before sending. -->

## Upstream since the pin

- No commit.

## Checklist (upstream's rules as noted on 2026-11-30; read them again)

- [x] the tests are in the branch: test/test_two.py
- [x] they fail without the change
- [x] they pass with it
""",  # noqa: E501
    )
    assert "- [ ] upstream's linters are clean\n- [ ] an issue is linked\n" in written
    assert all(
        f"- [ ] {rule.text} ([source]({rule.source}))" in written for rule in RULES["pytorch"]
    )


def test_the_verb(full: House, clone: Path, run) -> None:
    ran = run("patches", "pr", "two", "--checkout", str(clone), "--no-test")
    assert ran.code == 0, ran.err
    assert ran.err == (
        "Reading what upstream has done since the pin to the lines of two\n"
        "Making the branch two\nRunning the linters of the clone on two\n"
    )
    assert "branch    two of " in ran.out
    assert "--reset-author" in ran.out
    file = Path(ran.out.partition("text      ")[2].splitlines()[0])
    assert "run them, and say what they printed" in file.read_text()
    assert "- [ ] they fail without the change" in file.read_text()


@pytest.mark.parametrize("at", ["worktree", "linter", "tests"])
def test_ctrl_c_takes_the_branch_away_again(
    full: House,
    clone: Path,
    run,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    before = state(clone)
    attempt = git.attempt

    def interrupt(*arguments: object, **options: object) -> None:
        assert user_git(clone, "branch", "--list", "two")
        raise KeyboardInterrupt

    def killed_while_adding(arguments: Sequence[str], directory: Path, **options: Any) -> Any:
        done = attempt(arguments, directory, **options)
        if arguments[:2] == ["worktree", "add"]:  # git locks it until it is complete
            attempt(["worktree", "lock", "--reason", "initializing", arguments[-2]], directory)
            (Path(arguments[-2]) / ".git").unlink()
            interrupt()
        return done

    with monkeypatch.context() as patched:
        if at == "worktree":
            patched.setattr(git, "attempt", killed_while_adding)
        elif at == "linter":
            patched.setattr(branch, "_run", interrupt)
        else:
            patched.setattr(pr, "run_pytest", interrupt)
        assert run("patches", "pr", "two", "--checkout", str(clone)).code == 130
    assert state(clone) == before
    assert run("patches", "pr", "two", "--checkout", str(clone), "--no-test").code == 0


def test_a_branch_that_went_on_is_not_taken_away(full: House, clone: Path) -> None:
    made = branch.make(clone, "two", None)
    user_git(clone, "update-ref", "refs/heads/two", "main")
    branch.remove(clone, made)
    assert user_git(clone, "rev-parse", "two") == user_git(clone, "rev-parse", "main")
