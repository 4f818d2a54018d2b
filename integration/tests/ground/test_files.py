"""A file is the old one or the new one, and nothing is left beside it, whatever goes wrong."""

import errno
import os
import stat

import pytest

from integration.ground import files
from integration.ground.errors import UserError
from integration.report import page


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path):
    file = tmp_path / "a"
    files.write(file, "one")
    file.chmod(0o640)
    files.write(file, b"two")
    assert file.read_bytes() == b"two"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    files.write_json(file, {"a": [1]})
    assert file.read_text() == '{"a": [1]}\n'
    assert os.listdir(tmp_path) == ["a"]


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path):
    mask = os.umask(0o027)
    try:
        files.write(tmp_path / "a", "")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_folder_in_the_way_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        files.write(tmp_path / "folder", "text")
    with pytest.raises(UserError, match=r"expected to write the page to .*folder, found: Is a dir"):
        page.write(tmp_path / "folder", "title", "lead", [])
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize("call", ["replace", "copymode"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    (tmp_path / "a").write_text("old")

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os if call == "replace" else files.shutil, call, full)
    with pytest.raises(OSError, match="No space left"):
        files.write(tmp_path / "a", "new")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.write(tmp_path / "gone" / "a", "text")
    assert os.listdir(tmp_path) == []
