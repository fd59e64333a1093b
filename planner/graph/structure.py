"""Where units and blocks of a model begin and end."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph.dataflow import Flow, read_flow
from planner.graph.ops import OpGraph
from planner.graph.units import assign_blocks, assign_units, run_bounds

__all__ = ["Structure", "structure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Where units and blocks begin and end.

    Attributes:
        units: FQN of the unit of each op.
        blocks: FQN of the block of each op.
        bounds: Half-open range of ops of each block.
        elements: Units that are elements of a list of modules.
        flow: Data dependences between ops.
    """

    units: list[str]
    blocks: list[str]
    bounds: list[tuple[int, int]]
    elements: frozenset[str]
    flow: Flow


def structure(graph: OpGraph) -> Structure:
    """Divide a model's ops into units, and each unit into blocks."""
    units, elements = assign_units(graph)
    blocks = assign_blocks(graph, units)
    keys = [f"{unit}\0{block}" for unit, block in zip(units, blocks, strict=True)]
    return Structure(
        units=units,
        blocks=blocks,
        bounds=run_bounds(keys),
        elements=elements,
        flow=read_flow(graph),
    )
