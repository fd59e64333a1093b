"""How many scalars each unit has: which are trained, split, expert, or held twice."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.graph import ModelGraph

__all__ = ["ParameterCounts", "Ties", "count_parameters"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """Weights that several units read, as links between neighbouring readers.

    A stage holds one copy of a tied weight, whichever of its readers it has: a copy
    more than the model for each link whose ends lie on different stages. Arrays of
    shape [links].

    Attributes:
        first: Unit of the earlier reader.
        second: Unit of the next reader, after ``first``.
        split: 1 if tp divides the weight.
        scalars: Of the weight.
        trained: Of its gradient: ``scalars``, or 0 if it is frozen.
    """

    first: Index
    second: Index
    split: Index
    scalars: Array
    trained: Array

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Scalars of every unit, tied ones in the unit that reads them first.

    Attributes:
        scalars: By [of experts, split along tp, unit]. Shape [2, 2, units].
        trained: Those of them that have a gradient. Shape [2, 2, units].
        tensors: Trained parameter tensors. Shape [units].
        ties: What further units read.
    """

    scalars: Array
    trained: Array
    tensors: Array
    ties: Ties


def count_parameters(graph: ModelGraph) -> ParameterCounts:
    """Count a model's parameters unit by unit."""
    unit_of_block = np.zeros(len(graph.blocks), dtype=np.int64)
    for unit, (start, stop) in enumerate(graph.units):
        unit_of_block[start:stop] = unit
    scalars, trained = np.zeros((2, 2, 2, len(graph.units)))
    tensors = np.zeros(len(graph.units))
    links: list[tuple[int, int, int, float, float]] = []
    for parameter in graph.parameters:
        split, size = int(parameter.style != "none"), float(parameter.numel)
        unit = unit_of_block[parameter.block]
        place = int(parameter.expert), split, unit
        scalars[place] += size
        if parameter.trainable:
            trained[place] += size
            tensors[unit] += 1
        own = size if parameter.trainable else 0.0
        readers = sorted({int(unit_of_block[block]) for block in parameter.readers})
        links += [
            (first, second, split, size, own) for first, second in pairwise(readers)
        ]
    columns = np.array(links, dtype=np.float64).reshape(-1, 5).T
    first, second, divided = columns[:3].astype(np.int64)
    return ParameterCounts(
        scalars=scalars,
        trained=trained,
        tensors=tensors,
        ties=Ties(
            first=first,
            second=second,
            split=divided,
            scalars=columns[3].copy(),
            trained=columns[4].copy(),
        ),
    )
