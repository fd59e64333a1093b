"""Coarsening of a model's ops into blocks, and the edges between blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.graph.block_sums import EXPERTS, BlockSums
from planner.graph.model import Block, Edge, Parameter
from planner.graph.ops import Flow, OpGraph
from planner.graph.sharding import Roles
from planner.graph.spatial import Space, read_space
from planner.graph.units import Structure

__all__ = ["Blocks", "coarsen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A coarsened model: blocks, the edges between them, parameters, and its space."""

    blocks: tuple[Block, ...]
    edges: tuple[Edge, ...]
    parameters: tuple[Parameter, ...]
    space: Space


def coarsen(graph: OpGraph, structure: Structure, roles: Roles) -> Blocks:
    """Sum ops into blocks.

    Args:
        graph: All forward ops with the cost of their backward.
        structure: Units and blocks of the model.
        roles: Tensor-parallel role of each op.
    """
    block_of = np.repeat(
        np.arange(len(structure.bounds)),
        [stop - start for start, stop in structure.bounds],
    )
    parameters = _parameters(graph, structure, roles, block_of)
    saved = _saved(graph, structure, block_of)
    space = read_space(graph)
    summer = BlockSums(graph, structure, roles, parameters, saved, space)
    blocks = tuple(summer.block(index) for index in range(len(structure.bounds)))
    edges = _block_edges(graph, structure.flow, block_of.tolist())
    return Blocks(
        blocks=blocks,
        edges=tuple(edges),
        parameters=tuple(parameters),
        space=space,
    )


def _parameters(
    graph: OpGraph, structure: Structure, roles: Roles, block_of: np.ndarray
) -> list[Parameter]:
    """Return the parameters, each with the block that uses it first."""
    readers: dict[int, dict[int, None]] = {}
    for row, reads in enumerate(graph.inputs):
        for storage in reads:
            if storage < 0:
                readers.setdefault(-1 - storage, {})[int(block_of[row])] = None
    made: list[Parameter] = []
    home = 0
    for index, tensor in enumerate(graph.parameters):
        found = tuple(readers.get(index, ()))
        # A parameter that no op used stays beside the parameter listed before it.
        home = found[0] if found else home
        units = {structure.units[structure.bounds[block][0]] for block in found}
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


def _saved(
    graph: OpGraph, structure: Structure, block_of: np.ndarray
) -> list[list[int]]:
    """Return the storages kept for backward, by the block that keeps them first.

    A tensor that can be made again from inputs alone (rotary tables, masks) belongs to
    the block that makes it, so that equal layers stay equal.
    """
    kept: list[list[int]] = [[] for _ in structure.bounds]
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
        at = maker.get(storage, row) if storage in structure.flow.recomputable else row
        kept[int(block_of[at])].append(storage)
    return kept


def _block_edges(graph: OpGraph, flow: Flow, block_of: Sequence[int]) -> list[Edge]:
    """Return the edges between blocks, sorted, with each tensor once an edge."""
    crossing: dict[tuple[int, int], dict[tuple[int, int], None]] = {}
    for row, reads in enumerate(flow.reads):
        target = block_of[row]
        for made in reads:
            source = block_of[made[0]]
            if source != target:
                crossing.setdefault((source, target), {})[made] = None
    number: dict[tuple[int, int], int] = {}
    edges = []
    for (source, target), tensors in sorted(crossing.items()):
        storages = [storage for _, storage in tensors]
        sizes = [float(graph.storage_bytes[i]) for i in storages]
        again = [
            size if i in flow.recomputable else 0.0
            for i, size in zip(storages, sizes, strict=True)
        ]
        edges.append(
            Edge(
                source=source,
                target=target,
                tensors=tuple(graph.storage_tensor[i] for i in storages),
                bytes=sum(sizes),
                recomputable=sum(again),
                identities=tuple(number.setdefault(t, len(number)) for t in tensors),
                sent=tuple(a - b for a, b in zip(sizes, again, strict=True)),
            )
        )
    return edges
