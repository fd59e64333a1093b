"""Live tensor memory on the CPU, storage by storage, under a dispatch mode."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveMemory", "StorageWatch", "watched_resizes"]


@contextmanager
def watched_resizes(
    seen: Callable[[torch.UntypedStorage], None], *, before: bool = False
) -> Iterator[None]:
    """Report, in the block, every storage that Python code resizes.

    ``fully_shard`` frees and takes memory by resizing storages, past the dispatcher.

    Args:
        seen: Told of a storage when it has its new size.
        before: Whether it is also told while the storage has its old one.
    """
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        if before:
            seen(storage)
        result = original(storage, size)
        seen(storage)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that is also told of storages that Python code resizes.

    Args:
        seen: Told of a storage when it has its new size.
        before: Tell it also while the storage has its old one.
    """

    def __init__(
        self, seen: Callable[[torch.UntypedStorage], None], *, before: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._resizes = watched_resizes(seen, before=before)

    def __enter__(self) -> Self:
        self._resizes.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resizes.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]


class LiveMemory(StorageWatch):  # type: ignore[no-untyped-call]
    """Counts bytes of storages that are alive, and their peak.

    What is alive on entry counts, too: parameters, optimizer states, buffers. Counts
    tensors as the program sees them, not what an allocator keeps, nor what C++ holds
    without a Python object. Equal to torch's MemTracker on modules that run once;
    unlike it, any number of microbatches may be in flight.

    Attributes:
        current_bytes: Alive now.
        peak_bytes: Most that was alive at once since entry.
    """

    def __init__(self) -> None:
        # A storage that was not seen yet had its old size, too.
        super().__init__(self._add, before=True)
        self.current_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def track(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor until it dies; once, however often seen."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        # What a vmap made has no storage of its own.
        mapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if tensor.layout is torch.strided and not mapped:
            storage = tensor.untyped_storage()
            # Of the storage: a fake tensor says "cpu" and takes no memory.
            if storage.device.type == "cpu":
                self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            weakref.finalize(storage, self._free, key)
        if known != size:
            self._sizes[key] = size
            self._grow(size - (known or 0))

    def _free(self, key: int) -> None:
        self._grow(-self._sizes.pop(key, 0))

    def _grow(self, size: int) -> None:
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def __enter__(self) -> Self:
        for thing in gc.get_objects():
            # Not isinstance: it asks objects for __class__, and some lazy ones answer
            # with an import.
            if issubclass(type(thing), torch.Tensor):
                self.track(thing)
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # Its local op comes by here in a moment.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.track(leaf)
        return result
