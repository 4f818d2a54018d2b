"""Bytes of fake tensors that are alive, by item, and the peak of each phase."""

import weakref
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from unittest.mock import patch

import torch


class LiveBytes:
    """Counts storages from when an operator returns them until they are freed or emptied.

    Sizes are as asked for: an allocator's rounding and fragments are not in them. ``peaks`` has
    for each phase the items at the moment when their sum was largest.
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peaks: dict[str, dict[str, int]] = {}
        # Storage's address -> (item, bytes). Left when the storage dies.
        self._known: dict[int, tuple[str, int]] = {}

    def add(self, tensor: torch.Tensor, item: str, phase: str) -> None:
        """Count the storage of ``tensor`` under ``item``, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = (item, 0)
        weakref.finalize(storage, self._forget, key)
        self._set(key, item, storage.nbytes())
        self._note_peak(phase)

    def move(self, tensor: torch.Tensor, item: str) -> None:
        """Count the storage of ``tensor`` under another item from now on."""
        key = tensor.untyped_storage()._cdata
        if key in self._known:
            self._set(key, item, self._known[key][1])

    def release(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` no longer: it stays between steps."""
        key = tensor.untyped_storage()._cdata
        if key in self._known:
            self._set(key, self._known[key][0], 0)

    def rename(self, old: str, new: str) -> None:
        """Move all that is alive of item ``old`` to ``new``."""
        for key, (item, size) in list(self._known.items()):
            if item == old:
                self._set(key, new, size)

    @contextmanager
    def follow_resizes(self, phase: Callable[[], str]) -> Generator[None]:
        """FSDP empties and refills storages in place, past all operators."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int):
            answer = resize(storage, size)
            key = storage._cdata
            if key in self._known:
                self._set(key, self._known[key][0], size)
                self._note_peak(phase())
            return answer

        with patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def _set(self, key: int, item: str, size: int) -> None:
        old_item, old_size = self._known[key]
        self.now[old_item] -= old_size
        self.now[item] += size
        self._known[key] = (item, size)

    def _forget(self, key: int) -> None:
        item, size = self._known.pop(key)
        self.now[item] -= size

    def _note_peak(self, phase: str) -> None:
        if sum(self.now.values()) > sum(self.peaks.get(phase, {}).values()):
            self.peaks[phase] = {item: size for item, size in self.now.items() if size}
