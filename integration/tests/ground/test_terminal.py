"""Messages: in every verb, one that cannot be printed changes nothing."""

import os
import subprocess
import sys

import pytest

SAY = """
import sys
from integration.ground import terminal
terminal.never_fail()
for _ in range(3):
    print("saved … ✓")
    terminal.say("error: …", error=True)
sys.stdout.flush()
open({file!r}, "w").write(f"{{sys.stdout.encoding}}")
"""


def _run(tmp_path, code: str = SAY, **streams) -> int:
    line = [sys.executable, "-c", code.format(file=str(tmp_path / "done"))]
    return subprocess.run(line, timeout=60, **streams).returncode


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_character_that_the_encoding_lacks_is_written_as_its_escape(tmp_path, encoding):
    with open(tmp_path / "out", "wb") as out:
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        assert _run(tmp_path, stdout=out, stderr=out, env=env) == 0
    text = "saved … ✓".encode(encoding, errors="backslashreplace")
    assert (tmp_path / "out").read_bytes().count(text) == 3
    assert (tmp_path / "done").exists()


def test_a_reader_that_is_gone_ends_nothing(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    assert _run(tmp_path, stdout=writer, stderr=writer) == 0
    os.close(writer)
    assert (tmp_path / "done").exists()


def test_a_closed_stream_is_nothing_and_no_file_takes_its_place(tmp_path):
    """Descriptor 1 would be the next file that is opened."""
    line = [sys.executable, "-c", SAY.format(file=str(tmp_path / "done"))]
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *line]
    assert subprocess.run(shell, timeout=60).returncode == 0
    assert (tmp_path / "done").read_text() == "utf-8"


def test_a_full_disk_takes_the_words_and_nothing_else(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    code = SAY.replace('print("saved … ✓")', 'terminal.say("saved")')
    with open("/dev/full", "w") as full:
        assert _run(tmp_path, code, stdout=full, stderr=full) == 0
    assert (tmp_path / "done").exists()


def test_a_verb_without_a_reader_ends_well():
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "integration", "--help"]
    assert subprocess.run(line, stdout=writer, stderr=subprocess.PIPE).returncode == 0
    os.close(writer)
