"""Effects of a dry run's actions on memory, and their repetition."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from planner.schema.measurement import Traffic

__all__ = [
    "Effect",
    "Event",
    "Origin",
    "Product",
    "Tape",
    "product_of",
    "rebuild",
    "traffic_between",
]

#: Where a storage comes from: which action made it, so many microbatches before, and as
#: which of its storages. (None, 0, its number in the ledger) if none did.
Origin = tuple[Hashable, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A tensor that an action returns.

    Attributes:
        source: Position among the storages that the action makes for its products, or
            among the tensors that it was given.
        given: Whether it is one of those given.
    """

    source: int
    given: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A storage taken, resized or freed."""

    number: int
    origin: Origin
    change: int

    def like(self, other: Event) -> bool:
        """Return True if it was of the same storage, or one with the same place."""
        same = self.number == other.number or self.origin == other.origin
        return same and self.change == other.change


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Effect of one action.

    Attributes:
        events: In order, without those of tensors that are given to the action or that
            it returns.
        made: For each storage of a product, the position in ``events`` at which it is
            made, and its bytes.
        products: What is returned.
        after: State of the part afterwards.
    """

    events: tuple[Event, ...] = field(compare=False)
    made: tuple[tuple[int, int], ...]
    products: tuple[Product | None, ...]
    traffic: Mapping[tuple[str, int], Traffic]
    flops: int
    after: Hashable

    def like(self, other: Effect) -> bool:
        """Return True if two runs did the same."""
        return (
            self == other
            and len(self.events) == len(other.events)
            and all(map(Event.like, self.events, other.events))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """An effect, ready to be counted again: ledger numbers and changes, in pieces.

    Between two pieces a product's storage is made.
    """

    effect: Effect
    whose: tuple[np.ndarray, ...]
    change: tuple[np.ndarray, ...]
    lasting: tuple[tuple[int, int], ...]


def product_of(
    tensor: torch.Tensor, number: int, given: Sequence[int], made: Sequence[int]
) -> Product:
    """Describe a tensor so that it can be made again.

    Args:
        tensor: That an action returns.
        number: Of its storage in the ledger.
        given: Storages of what the action was given.
        made: Storages that it made for its products.
    """
    known = number in given
    return Product(
        source=given.index(number) if known else made.index(number),
        given=known,
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
    )


def rebuild(product: Product, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make a product again, out of its own storage or of a tensor that was given."""
    source = sources[product.source].detach()
    if source.dtype != product.dtype:
        source = source.view(product.dtype)
    view = source.as_strided(product.size, product.stride, product.offset)
    return view.requires_grad_(product.requires_grad)


def traffic_between(
    after: Mapping[tuple[str, int], Traffic], before: Mapping[tuple[str, int], Traffic]
) -> dict[tuple[str, int], Traffic]:
    """Traffic since a point, by kind and group size; unchanged entries are left out."""
    none = Traffic(count=0, bytes=0)
    changes = {
        key: Traffic(
            count=now.count - before.get(key, none).count,
            bytes=now.bytes - before.get(key, none).bytes,
        )
        for key, now in after.items()
    }
    return {key: change for key, change in changes.items() if change.count}
