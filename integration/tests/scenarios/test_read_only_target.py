"""A target that cannot be written: one sentence, and everything as it was."""

import os
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from integration.cli.main import main
from integration.ground import files as atomic
from integration.tests.patchset.conftest import House, tree
from integration.tests.scenarios.conftest import snapshot


def test_read_only_target(
    trio: House,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clone = trio.checkout(tmp_path / "clone")
    before = tree(clone)

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        return capsys.readouterr().err.replace(str(tmp_path), "TMP")

    if os.geteuid():
        (clone / "fakebase").chmod(0o555)
    else:  # root may write anywhere: let the system call say what a user's would

        def read_only(*arguments: object, **options: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(atomic.tempfile, "mkstemp", read_only)
    assert "Permission denied" in refused("patches", "apply", "--to", str(clone))
    assert tree(clone) == before
    monkeypatch.setenv("INTEGRATION_CACHE", "/proc/integration")
    told = refused("env")
    assert told.startswith("error: expected to write the overlay below /proc/integration/overlays")
    assert told.endswith("or name another with INTEGRATION_CACHE\n")
    assert_expected_inline(
        snapshot(trio),
        """\
tree 9190fe926b86dab4
fakebase 1.0: one two three; touches fakebase/core.py
fakeapp 1.0: -; touches nothing
one: [fake] Change one; requires -
  fakebase/core.py -1,6 (+1 -1)
two: [fake] Change two; requires -
  fakebase/core.py -27,7 (+1 -1)
three: [fake] Change three; requires one
  fakebase/core.py -1,7 (+1 -1)
""",
    )
