"""Memory of a dry run: what lives at the peak, and what it is for."""

from __future__ import annotations

import weakref
from array import array
from typing import Literal

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

__all__ = ["CATEGORIES", "Category", "Ledger"]

Category = Literal["parameters", "gradients", "optimizer", "activations", "buffers"]
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "buffers",
)


class Ledger:
    """Bytes of fake storages that are alive, their peak, and its parts.

    What a storage is for may be told at any time, also after it has died: the peak is
    divided when it is asked for.

    Attributes:
        current_bytes: Alive now.
        peak_bytes: Most that was alive at once.
    """

    def __init__(self) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self._peak_event = 0
        self._keys: dict[int, int] = {}
        self._sizes: list[int] = []
        self._categories = bytearray()
        self._known = bytearray()
        # Of every change: which storage, and by how many bytes.
        self._whose, self._change = array("q"), array("q")

    def add(self, tensor: torch.Tensor) -> int | None:
        """Count a fake tensor's storage until it dies, once however often seen.

        Returns:
            Its number; None for tensors that take no memory of the device.
        """
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "meta":
            return None
        return self._add(tensor.untyped_storage())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew if it is one of those counted."""
        if storage._cdata in self._keys:
            self._add(storage)

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        """Say what a tensor's storage is for; the first word holds."""
        number = self.add(tensor)
        if number is not None and not self._known[number]:
            self._known[number] = 1
            self._categories[number] = CATEGORIES.index(category)

    def restart(self) -> None:
        """Begin a new peak, from what lives now."""
        self.peak_bytes, self._peak_event = self.current_bytes, len(self._whose)

    def peak(self) -> dict[Category, int]:
        """Bytes of each category at the peak; activations where nothing was said."""
        whose = np.frombuffer(self._whose, dtype=np.int64)[: self._peak_event]
        change = np.frombuffer(self._change, dtype=np.int64)[: self._peak_event]
        kinds = np.frombuffer(self._categories, dtype=np.uint8)[whose]
        return {
            category: int(change[kinds == index].sum())
            for index, category in enumerate(CATEGORIES)
        }

    def _add(self, storage: torch.UntypedStorage) -> int:
        key, size = storage._cdata, storage.nbytes()
        number = self._keys.get(key)
        if number is None:
            number = self._keys[key] = len(self._sizes)
            self._sizes.append(0)
            self._categories.append(CATEGORIES.index("activations"))
            self._known.append(0)
            weakref.finalize(storage, self._free, key).atexit = False
        if self._sizes[number] != size:
            self._grow(number, size)
        return number

    def _free(self, key: int) -> None:
        number = self._keys.pop(key)
        if self._sizes[number]:
            self._grow(number, 0)

    def _grow(self, number: int, size: int) -> None:
        change = size - self._sizes[number]
        self._sizes[number] = size
        self._whose.append(number)
        self._change.append(change)
        self.current_bytes += change
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = self.current_bytes
            self._peak_event = len(self._whose)
