"""Storages that change their size, which no dispatch mode gets to see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

__all__ = ["watched_resizes"]


@contextmanager
def watched_resizes(
    seen: Callable[[torch.UntypedStorage], None], *, before: bool = False
) -> Iterator[None]:
    """Tell, in the block, of every storage that Python code resizes.

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
