"""Units that run in turn, between which no pipeline can be cut."""

from __future__ import annotations

from collections.abc import Container

from planner.graph.ops import OpGraph
from planner.graph.units import Structure, prefixes

__all__ = ["units_in_turn"]


def units_in_turn(graph: OpGraph, structure: Structure) -> str | None:
    """Name two units that run in turn, so that each reads what the other makes.

    Weights that blocks share do that (ALBERT): a stage runs once a microbatch. Units
    that hold others are none to the executors.

    Args:
        graph: Ops of the model.
        structure: Its units.
    """
    order = {unit: k for k, unit in enumerate(dict.fromkeys(structure.units))}
    names, latest = list(order), list[int]()
    for holder in {p for unit in names for p in prefixes(unit)[:-1]}:
        order.pop(holder, None)
    shared = _held_by_several(graph, order)
    for module, reads in zip(graph.modules, structure.flow.reads, strict=True):
        behind = max((latest[row] for row, _ in reads), default=0)
        within = prefixes(module)
        own = next((order[p] for p in within if p in order), behind)
        if own < behind and shared.isdisjoint(within):
            return f"{names[own]} and {names[behind]} run in turn"
        latest.append(max(own, behind))
    return None


def _held_by_several(graph: OpGraph, units: Container[str]) -> set[str]:
    """Modules that several units hold, each of which calls them under one name."""
    found = set()
    for first, others in graph.aliases.items():
        held = {p for name in (first, *others) for p in prefixes(name) if p in units}
        if len(held) > 1:
            found.add(first)
    return found
