"""Blocks of equal cost, so that a hundred equal layers are priced once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.compute import KernelTable
from planner.graph import Block, ModelGraph

__all__ = ["BlockClasses", "group_blocks"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockClasses:
    """Distinct blocks and where they are.

    Attributes:
        blocks: One of each class.
        count: How many blocks of a class a unit has. Shape [classes, units].
        kernels: Of all classes; ``owner`` is the class.
        has_attention: Per class.
    """

    blocks: tuple[Block, ...]
    count: Array
    kernels: KernelTable
    has_attention: NDArray[np.bool_]

    def column(self, name: str) -> Array:
        """A number of every class's block. Shape [classes]."""
        return np.array([float(getattr(block, name)) for block in self.blocks])


def group_blocks(graph: ModelGraph) -> BlockClasses:
    """Find the classes of a graph."""
    seen: dict[object, int] = {}
    blocks: list[Block] = []
    count = np.zeros((len(graph.blocks), len(graph.units)))
    for unit, (start, stop) in enumerate(graph.units):
        for block in graph.blocks[start:stop]:
            # Equal structure is not enough: the first block of a run carries the
            # unit's boundary, and only one of several tied users owns the weight.
            key = (
                block.repeat or block.index,
                block.boundary_bytes,
                block.parameter_count,
                block.saved_bytes,
            )
            if key not in seen:
                seen[key] = len(blocks)
                blocks.append(block)
            count[seen[key], unit] += 1
    attention = [any(k.kind == "attention" for k in block.kernels) for block in blocks]
    return BlockClasses(
        blocks=tuple(blocks),
        count=count[: len(blocks)],
        kernels=KernelTable.build(
            [
                (owner, block.expert_parameter_count / max(block.parameter_count, 1), k)
                for owner, block in enumerate(blocks)
                for k in block.kernels
            ]
        ),
        has_attention=np.array(attention, dtype=bool),
    )
