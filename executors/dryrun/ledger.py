"""Memory of a dry run: live bytes, their peak, and its parts by category."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from executors.offloading import allocates_on_host, is_on_host

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

    Memory of the host that offloading takes is none of the device's: it counts 0.
    """

    def __init__(self) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self._peak_event = 0
        self._keys: dict[int, int] = {}
        self._host: set[int] = set()
        self._sizes: list[int] = []
        self._categories = bytearray()
        self._known = bytearray()
        self._stands_for: dict[int, int] = {}
        self._muted = False
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
        if storage._cdata in self._keys and not self._muted:
            self._add(storage)

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        """Set the category of a tensor's storage; the first one set stays."""
        number = self.add(tensor)
        if number is not None and not self._known[number]:
            self._known[number] = 1
            self._categories[number] = CATEGORIES.index(category)

    def restart(self) -> None:
        """Begin a new peak, from what lives now."""
        self.peak_bytes, self._peak_event = self.current_bytes, len(self._whose)

    @property
    def position(self) -> int:
        """Number of changes so far."""
        return len(self._whose)

    @property
    def count(self) -> int:
        """Number of storages so far; the next has this number."""
        return len(self._sizes)

    def events(self, start: int) -> list[tuple[int, int]]:
        """Changes from a position on: number of the storage, and by how many bytes."""
        return list(zip(self._whose[start:], self._change[start:], strict=True))

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Count nothing that happens in the block."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def ghost(self, number: int) -> int:
        """Number of a counted storage that does not exist, of another's category."""
        made = self._new()
        self._stands_for[made] = number
        return made

    def repeat(self, whose: NDArray[np.int64], change: NDArray[np.int64]) -> None:
        """Count changes as if they happened now.

        Args:
            whose: Numbers of storages. Shape [n].
            change: In bytes. Shape [n].
        """
        if not len(whose):
            return
        running = self.current_bytes + np.cumsum(change)
        top = int(running.argmax())
        if running[top] > self.peak_bytes:
            self.peak_bytes = int(running[top])
            self._peak_event = len(self._whose) + top + 1
        self._whose.frombytes(whose.tobytes())
        self._change.frombytes(change.tobytes())
        self.current_bytes = int(running[-1])

    def hold(self, changes: Iterable[tuple[int, int]]) -> None:
        """Add to the sizes of existing storages bytes that are counted elsewhere."""
        for number, change in changes:
            self._sizes[number] += change

    def peak(self) -> dict[Category, int]:
        """Bytes of each category at the peak; untagged storages are activations."""
        for ghost, number in self._stands_for.items():
            self._categories[ghost] = self._categories[number]
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
        if number is None and allocates_on_host():
            self._host.add(key)
        if is_on_host(storage) or key in self._host:
            size = 0
        if number is None:
            number = self._keys[key] = self._new()
            weakref.finalize(storage, self._free, key).atexit = False
        if self._sizes[number] != size:
            self._grow(number, size)
        return number

    def _new(self) -> int:
        self._sizes.append(0)
        self._categories.append(CATEGORIES.index("activations"))
        self._known.append(0)
        return len(self._sizes) - 1

    def _free(self, key: int) -> None:
        self._host.discard(key)
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
