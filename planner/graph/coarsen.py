"""From ops to blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.graph.block_sums import BlockSums
from planner.graph.dataflow import block_edges
from planner.graph.kinds import EXPERTS
from planner.graph.model import Block, Edge, Parameter
from planner.graph.ops import OpGraph
from planner.graph.roles import Roles
from planner.graph.structure import Structure

__all__ = ["Blocks", "coarsen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A coarsened model."""

    blocks: tuple[Block, ...]
    edges: tuple[Edge, ...]
    parameters: tuple[Parameter, ...]


def coarsen(graph: OpGraph, plan: Structure, roles: Roles) -> Blocks:
    """Sum ops into blocks.

    Args:
        graph: All forward ops with the cost of their backward.
        plan: Where blocks begin and end.
        roles: What tensor parallelism does to each op.
    """
    block_of = np.repeat(
        np.arange(len(plan.bounds)), [stop - start for start, stop in plan.bounds]
    )
    parameters = _parameters(graph, plan, roles, block_of)
    saved = _saved(graph, plan, block_of)
    summer = BlockSums(graph, plan, roles, parameters, saved)
    blocks = tuple(summer.block(index) for index in range(len(plan.bounds)))
    edges = block_edges(graph, plan.flow, block_of.tolist())
    return Blocks(blocks=blocks, edges=tuple(edges), parameters=tuple(parameters))


def _parameters(
    graph: OpGraph, plan: Structure, roles: Roles, block_of: np.ndarray
) -> list[Parameter]:
    """Each parameter with the block that uses it first."""
    readers: dict[int, dict[int, None]] = {}
    for row, reads in enumerate(graph.inputs):
        for storage in reads:
            if storage < 0:
                readers.setdefault(-1 - storage, {})[int(block_of[row])] = None
    made: list[Parameter] = []
    home = 0
    for index, tensor in enumerate(graph.parameters):
        found = tuple(readers.get(index, ()))
        # One that no op used stays beside the parameter listed before it.
        home = found[0] if found else home
        units = {plan.units[plan.bounds[block][0]] for block in found}
        made.append(
            Parameter(
                name=tensor.name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                block=home,
                aliases=tensor.aliases,
                readers=found if tensor.aliases and len(units) > 1 else (),
                trainable=tensor.trainable,
                expert=any(map(EXPERTS.search, (tensor.name, *tensor.aliases))),
                style=roles.parameters[index],
            )
        )
    return made


def _saved(graph: OpGraph, plan: Structure, block_of: np.ndarray) -> list[list[int]]:
    """Storages kept for backward, by the block that keeps them first.

    What can be made again from inputs alone (rotary tables, masks) belongs to the
    block that makes it, so that equal layers stay equal.
    """
    kept: list[list[int]] = [[] for _ in plan.bounds]
    maker = {
        storage: row
        for row, writes in reversed(list(enumerate(graph.outputs)))
        for storage in writes
    }
    seen: set[int] = set()
    for row, storage in graph.saves:
        if storage in seen:
            continue
        seen.add(storage)
        at = maker.get(storage, row) if storage in plan.flow.recomputable else row
        kept[int(block_of[at])].append(storage)
    return kept
