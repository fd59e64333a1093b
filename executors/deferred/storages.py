"""Tensors by the storages that they lie in, so that views share what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Memory", "Place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor lies.

    Attributes:
        storage: Number of its storage on the tape.
        dtype: Of its elements.
        size: Its shape.
        stride: In elements, by dimension.
        offset: Of its first element, in elements.
        conjugate: Whether what lies there is to be conjugated when it is read.
        negative: Whether it is to be negated.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool


class Memory:
    """Storages with values, by number.

    Args:
        sizes: Bytes of every storage that there may be.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._storages

    def at(self, place: Place, *, empty: bool = False) -> torch.Tensor:
        """The tensor at a place; zeros, or whatever, if nothing was written there."""
        storage = self._storages.get(place.storage)
        if storage is None:
            size = self._sizes[place.storage]
            make = torch.empty if empty else torch.zeros
            storage = make(size, dtype=torch.uint8).untyped_storage()
            self._storages[place.storage] = storage
        tensor = torch.empty(0, dtype=place.dtype)
        tensor.set_(storage, place.offset, place.size, place.stride)
        if place.conjugate:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if place.negative else tensor

    def put(self, place: Place, result: torch.Tensor) -> None:
        """Keep the storage that an operation has made."""
        storage = result.untyped_storage()
        plain = result.is_conj() == place.conjugate and (
            result.is_neg() == place.negative
        )
        if (
            plain
            and tuple(result.stride()) == place.stride
            and result.storage_offset() == place.offset
            and storage.nbytes() == self._sizes[place.storage]
        ):
            self._storages[place.storage] = storage
        else:
            # A kernel may lay its result out otherwise than was foretold.
            self.at(place, empty=True).copy_(result)

    def drop(self, number: int) -> None:
        """Free a storage."""
        self._storages.pop(number, None)
