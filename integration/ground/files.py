"""Write files so that each is the old one or the new one, never a part of it."""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration.ground.errors import UserError


def write(path: Path, data: str | bytes) -> None:
    """Write ``data`` beside ``path`` and rename it into place; the folder must be there.

    Raises:
        OSError: it cannot be written. ``path`` is as it was then, and nothing lies beside it.
    """
    beside = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open(beside, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        if path.exists():
            shutil.copymode(path, beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, value: Any, *, indent: int | None = None) -> None:
    """``write`` a value as JSON with a line end.

    Raises:
        OSError: as ``write``.
    """
    write(path, json.dumps(value, indent=indent) + "\n")


def replace_all(folder: Path, new: Mapping[str, bytes | None]) -> None:
    """Give the files of ``folder`` new contents; None removes one.

    Everything is written beside first, where a full disk or a missing permission shows. Then each
    is renamed into place; should one fail, or Ctrl-C come between, those before it are put back.

    Raises:
        UserError: the disk is full, or a file cannot be written. Nothing was changed then.
    """
    try:
        _replace_all(folder, new)
    except OSError as error:
        raise UserError(
            f"expected to write the files of {folder}, found: {error}; nothing was changed: make "
            f"room, or the files writable, and repeat"
        ) from error


def _replace_all(folder: Path, new: Mapping[str, bytes | None]) -> None:
    current = {path: folder / path for path in new}
    with contextlib.ExitStack() as undo:
        staged: dict[str, Path] = {}
        saved: dict[str, Path] = {}
        for path, data in new.items():
            _make_parents(current[path].parent, folder, undo)
            if current[path].exists():
                saved[path] = _beside(current[path], undo)
                shutil.copy2(current[path], saved[path])
            if data is not None:
                staged[path] = _beside(current[path], undo)
                staged[path].write_bytes(data)
                mode = current[path].stat().st_mode if path in saved else 0o644
                staged[path].chmod(mode & 0o7777)
        with contextlib.ExitStack() as put_back:
            for path in new:
                if path in saved:
                    put_back.callback(os.replace, saved[path], current[path])
                else:
                    put_back.callback(current[path].unlink, missing_ok=True)
                if path in staged:
                    os.replace(staged[path], current[path])
                else:
                    current[path].unlink(missing_ok=True)
            put_back.pop_all()
    for path, data in new.items():
        if data is None:
            _remove_empty(current[path].parent, folder)


def _beside(path: Path, undo: contextlib.ExitStack) -> Path:
    handle, name = tempfile.mkstemp(prefix=".integration-", dir=path.parent)
    os.close(handle)
    undo.callback(Path(name).unlink, missing_ok=True)
    return Path(name)


def _make_parents(parent: Path, root: Path, undo: contextlib.ExitStack) -> None:
    if not parent.is_dir():
        _make_parents(parent.parent, root, undo)
        parent.mkdir()
        undo.callback(_remove_empty, parent, root)  # it stays when a file was put in


def _remove_empty(folder: Path, root: Path) -> None:
    while folder != root:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent
