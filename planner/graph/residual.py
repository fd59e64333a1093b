"""Equal residual blocks of a model, of which copies may skip some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph.fusion import OpFusions
from planner.graph.memo import once_per_graph
from planner.graph.model import ModelGraph
from planner.schema.methods.method import equal_blocks

__all__ = ["ResidualBlocks", "adds_input", "find_residual_blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualBlocks:
    """Equal residual blocks of a model.

    Attributes:
        units: FQNs of the blocks, pipeline units, in order; none if there are none.
        reason: Reason why there are none, which may follow "but"; empty if there are.
    """

    units: tuple[str, ...] = ()
    reason: str = "the model has no equal residual blocks in a row"


@once_per_graph
def find_residual_blocks(graph: ModelGraph) -> ResidualBlocks:
    """Find the longest run of equal units that each add to a stream, and hand it on.

    A unit hands on one tensor, of the shape of one that it was given, and adds what it
    was given to something of its own. That is read off the ops of the first unit of the
    run; where ops are not known, units of equal shapes are taken for residual blocks.
    """
    shapes = {parameter.name: parameter.shape for parameter in graph.parameters}
    tied = {parameter.name for parameter in graph.parameters if parameter.aliases}
    units = equal_blocks(graph.unit_names, shapes, tied)
    if not units:
        return ResidualBlocks()
    shown = f"units {units[0]} to {units[-1]}"
    # Ops between modules behind the last belong to it, such as a pooling of the stage.
    if not _hand_on_one(graph, units[:-1]):
        return ResidualBlocks(
            reason=f"{shown} hand on more than one tensor, or one of another shape "
            f"than they are given"
        )
    if not adds_input(graph, units[0], unknown=True):
        return ResidualBlocks(
            reason=f"{shown} do not add what they are given to what they compute"
        )
    return ResidualBlocks(units=units, reason="")


def _hand_on_one(graph: ModelGraph, units: Sequence[str]) -> bool:
    unit_of = graph.unit_of_block.tolist()
    given: list[set[object]] = [set() for _ in graph.units]
    handed: list[set[tuple[object, object]]] = [set() for _ in graph.units]
    for edge in graph.edges:
        source, target = unit_of[edge.source], unit_of[edge.target]
        if source != target:
            given[target] |= set(edge.tensors)
            names = edge.identities or tuple(range(len(edge.tensors)))
            handed[source] |= set(zip(names, edge.tensors, strict=True))
    return all(
        len(handed[one]) == 1 and {tensor for _, tensor in handed[one]} <= given[one]
        for one in map(graph.unit_names.index, units)
    )


def adds_input(graph: ModelGraph, unit: str, *, unknown: bool) -> bool:
    """True if a unit adds what it is given to something of its own.

    Args:
        graph: The model.
        unit: FQN of one of its units.
        unknown: Answer where ops are not known.
    """
    known = graph.fusions
    if not isinstance(known, OpFusions):
        return unknown
    ops = known.graph
    made: set[int] = set()
    for row, name in enumerate(known.structure.units):
        if name != unit:
            continue
        reads = [storage for storage in ops.inputs[row] if storage >= 0]
        if ops.names[row] in {"aten::add", "aten::add_"} and len(reads) > 1:
            shape = ops.storage_tensor[ops.outputs[row][0]]
            given = [one for one in reads if one not in made]
            if any(ops.storage_tensor[one] == shape for one in given):
                return True
        made.update(ops.outputs[row])
    return False
