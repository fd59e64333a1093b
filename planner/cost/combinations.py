"""What the cost of a unit depends on: how it is divided, and the microbatch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Combinations"]

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combinations:
    """Distinct (tp, cp, ep, microbatch, sequence_parallel). Shapes [combinations]."""

    tp: Index
    cp: Index
    ep: Index
    microbatch: Index
    sequence_parallel: Index

    def __len__(self) -> int:
        return len(self.tp)
