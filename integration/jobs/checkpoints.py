"""A run's checkpoints on disk: complete, cut off while written, damaged since. No torch here."""

import pickle
import re
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

from integration.ground.errors import UserError

METADATA = ".metadata"  # DCP writes it last
# Written last where the last checkpoint is exported in Hugging Face's format.
HF_INDEX = "model.safetensors.index.json"


def complete(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in ``folder`` that were written to the end, ascending."""
    return sorted(step for step, path in _steps(folder) if (path / METADATA).exists())


def remove_cut_off(folder: Path) -> list[str]:
    """Delete checkpoints that were cut off while written; return their names.

    They cannot be loaded, and on a full disk they stand in the way of the next one.
    """
    ends = (METADATA, HF_INDEX)
    cut_off = [p for _, p in _steps(folder) if not any((p / end).exists() for end in ends)]
    for path in cut_off:
        shutil.rmtree(path, ignore_errors=True)
    return sorted(path.name for path in cut_off)


def newest_whole(folder: Path) -> int | None:
    """Return the step of the newest checkpoint in ``folder`` that is not damaged."""
    steps = reversed(complete(folder))
    return next((s for s in steps if damage(folder / f"step-{s}") is None), None)


def set_damaged_aside(folder: Path) -> list[str]:
    """Rename damaged checkpoints newer than the newest whole one; return a sentence for each.

    Out of the way: TorchTitan would load the newest, and a checkpoint written over a damaged one
    would, cut off, be a mixture of both.

    Raises:
        UserError: no whole one is left. Nothing was renamed.
    """
    whole = newest_whole(folder)
    damaged = [s for s in complete(folder) if whole is None or s > whole]
    reasons = {s: damage(folder / f"step-{s}") for s in reversed(damaged)}
    if damaged and whole is None:
        told = "; ".join(f"step-{step}: {reason}" for step, reason in reasons.items())
        raise UserError(
            f"no checkpoint in {folder} is whole ({told}), so there is nothing to go on with; "
            f"restore one from a copy, or start anew without --resume",
            exit_code=1,
        )
    sentences = []
    for step, reason in reasons.items():
        aside = folder / f"damaged-{step}"
        shutil.rmtree(aside, ignore_errors=True)
        (folder / f"step-{step}").rename(aside)
        sentences.append(
            f"the checkpoint of step {step} is damaged ({reason}) and is now {aside}; the newest "
            f"whole one is of step {whole}"
        )
    return sentences


def damage(checkpoint: Path) -> str | None:
    """Return why a complete checkpoint cannot be loaded, as far as names and sizes of files tell.

    Every file that ``.metadata`` names must be there and reach to the last byte that it is said to
    hold.
    """
    ends: dict[str, int] = {}
    try:
        with open(checkpoint / METADATA, "rb") as file:
            for stored in _Plain(file).load().storage_data.values():
                end = stored.offset + stored.length
                ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
    except Exception as error:  # what a pickle of arbitrary bytes may raise
        return f"its {METADATA} cannot be read: {type(error).__name__}"
    for name, end in sorted(ends.items()):
        file = checkpoint / name
        if not file.exists():
            return f"{name} is missing"
        if (size := file.stat().st_size) < end:
            return f"{name} has {size} bytes of {end}"
    return None


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.glob("step-*"))
    return [(int(match[1]), path) for match, path in found if match]


class _Any:
    """Stands for every class that a ``.metadata`` names: keeps attributes, and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Any":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


class _Plain(pickle.Unpickler):
    """Reads a pickle without torch, and without running what it names."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if name == "OrderedDict" else _Any
