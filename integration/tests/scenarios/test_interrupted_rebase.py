"""SIGKILL while git rebases, at each of its steps: patches/ is as it was, --continue ends it."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from integration.patchset import pins
from integration.tests.patchset.conftest import House, line, tree
from integration.tests.scenarios.conftest import snapshot
from integration.tests.upstream.conftest import wheel
from integration.upstream import newer, rebase

# What a git that is killed leaves: a lock, half of a file, a file that is in no commit.
HALF = "touch .git/index.lock fakebase/half.py && echo half >> fakebase/core.py"


@pytest.mark.parametrize("place", ["1i", "2i", "3i", "4i"])
def test_interrupted_rebase(trio: House, tmp_path: Path, place: str) -> None:
    core = line(15, "newer")
    path = wheel(tmp_path / "newer", "fakebase", "2.0", core=core)
    others = newer.parse([f"fakebase=={path}"], pins.load(), "--onto")
    before = tree(trio.root)
    # A git that stays, once it has made so many of the commits.
    slow = tmp_path / "slow" / "git"
    slow.parent.mkdir()
    stay = f"exec {HALF} && touch {tmp_path}/begun && sleep 600"
    slow.write_text(
        f"#!/bin/sh\nexport GIT_SEQUENCE_EDITOR='sed -i \"{place} {stay}\"'\n"
        f'case " $* " in *" rebase "*) set -- "$@" --interactive;; esac\n'
        f'exec {shutil.which("git")} "$@"\n'
    )
    slow.chmod(0o755)
    child = os.fork()
    if not child:
        os.setsid()
        os.environ["PATH"] = f"{slow.parent}:{os.environ['PATH']}"
        rebase.start(others, {"pytorch": "c" * 40})
        os._exit(0)
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (rebase.folder() / "pytorch/fakebase/half.py").exists()
    assert tree(trio.root) == before
    assert isinstance(rebase.go_on(), rebase.Done)
    assert not rebase.folder().exists()
    trio.install("fakebase", "2.0")
    (trio.site / "fakebase/core.py").write_text(core)
    assert trio.check() == []
    assert_expected_inline(
        snapshot(trio),
        """\
tree 57ecd607f4dc72a3
fakebase 2.0: one two three; touches fakebase/core.py
fakeapp 1.0: -; touches nothing
one: [fake] Change one; requires -
  fakebase/core.py -1,6 (+1 -1)
two: [fake] Change two; requires -
  fakebase/core.py -27,7 (+1 -1)
three: [fake] Change three; requires one
  fakebase/core.py -1,7 (+1 -1)
""",
    )
