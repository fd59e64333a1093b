"""Who makes and who reads each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph.model import Edge
from planner.graph.ops import OpGraph

__all__ = ["Flow", "block_edges", "read_flow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Data dependences between ops.

    Attributes:
        reads: Of each op, (op that wrote it last, storage) of every storage it reads
            that an op made.
        recomputable: Storages made from inputs and constants alone, without weights
            or random numbers.
    """

    reads: list[tuple[tuple[int, int], ...]]
    recomputable: frozenset[int]


def read_flow(graph: OpGraph) -> Flow:
    """Follow every storage from the op that writes it to those that read it."""
    writer: dict[int, int] = {}
    reads: list[tuple[tuple[int, int], ...]] = []
    constant = set(graph.sources)
    free: set[int] = set()
    for row, (ins, outs) in enumerate(zip(graph.inputs, graph.outputs, strict=True)):
        reads.append(tuple((writer[i], i) for i in ins if i in writer))
        known = all(i >= 0 and (i in constant or i in free) for i in ins)
        for storage in outs:
            writer[storage] = row
            if known and not graph.random[row]:
                free.add(storage)
            else:
                free.discard(storage)
                constant.discard(storage)
    return Flow(reads=reads, recomputable=frozenset(free))


def block_edges(graph: OpGraph, flow: Flow, block_of: Sequence[int]) -> list[Edge]:
    """Edges between blocks, sorted; each tensor once an edge."""
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
