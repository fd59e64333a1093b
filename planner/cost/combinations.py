"""What the cost of a unit depends on: how it is divided, and the microbatch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.numbering import number_rows

__all__ = ["Combinations"]

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combinations:
    """Distinct (tp, cp, ep, microbatch, sequence_parallel). Shapes [combinations].

    Attributes:
        order: Which of several orders of devices the groups lie in, see
            :class:`planner.cost.orders.Orders`; None for the only one.
    """

    tp: Index
    cp: Index
    ep: Index
    microbatch: Index
    sequence_parallel: Index
    order: Index | None = None

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def orders(self) -> Index:
        """Order of each, 0 where there is one. Shape [combinations]."""
        return np.zeros_like(self.tp) if self.order is None else self.order

    def without_order(self) -> tuple[Combinations, Index]:
        """Those that differ in more than the order; and which of them each is. [n]."""
        if self.order is None:
            return self, np.arange(len(self))
        columns = (self.tp, self.cp, self.ep, self.microbatch, self.sequence_parallel)
        first, which = number_rows(*columns)
        names = ("tp", "cp", "ep", "microbatch", "sequence_parallel")
        kept = {n: c[first] for n, c in zip(names, columns, strict=True)}
        return Combinations(**kept), which
