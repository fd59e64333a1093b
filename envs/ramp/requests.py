"""Placing a job by the blocks that it asks for, without going through its ops.

An op that no parent of as many sub-ops precedes asks for the first block of its size. A
server that the job itself holds counts as free, so that all ops that ask for one size
are given the same block: which sizes a job asks for is known beforehand, and a
placement is one search a size. That holds as long as no server's memory fills up, which
:func:`requested_sizes` makes sure of.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.placement import SplitJob
from envs.ramp.topology import RampTopology
from planner.simulate.compiled import compiled

__all__ = ["BlockTable", "block_table", "requested_sizes", "servers_given"]

Index = NDArray[np.int64]
Masks = NDArray[np.uint64]

#: Servers that a mask has bits for.
_MOST_SERVERS = 64


class BlockTable(NamedTuple):
    """Blocks of a topology as bit masks over its servers.

    Attributes:
        first: Where the blocks of a size start. Shape [most size + 2].
        masks: In the order in which they are tried. Shape [blocks].
    """

    first: Index
    masks: Masks


def block_table(topology: RampTopology) -> BlockTable | None:
    """Of a topology; None if it has more servers than a mask has bits."""
    if topology.num_servers > _MOST_SERVERS:
        return None
    first, masks = [0, 0], []
    for size in range(1, topology.most_splits + 1):
        blocks = topology.blocks(size)
        if size == 1:
            # Single servers are tried in the order of their numbers.
            blocks = np.arange(topology.num_servers)[:, None]
        masks += [sum(1 << server for server in block) for block in blocks.tolist()]
        first.append(len(masks))
    return BlockTable(np.array(first, dtype=np.int64), np.array(masks, dtype=np.uint64))


def requested_sizes(job: SplitJob, topology: RampTopology) -> Index | None:
    """Sizes of the blocks that a job asks for; None if memory may decide. Shape [s]."""
    if job.memory.sum() > topology.memory_bytes:
        return None
    sizes: dict[int, None] = {}
    for op in job.order.tolist():
        begin, end = job.first_parent[op], job.first_parent[op + 1]
        if not (job.splits[job.parents[begin:end]] == job.splits[op]).any():
            sizes[int(job.splits[op])] = None
    return np.array(list(sizes), dtype=np.int64)


@compiled
def servers_given(sizes: Index, blocks: BlockTable, busy: np.uint64) -> np.uint64:
    """Servers of a placed job as a mask; 0 without room.

    Args:
        sizes: That it asks for; after a 0 come no more. Shape [s].
        blocks: Of the topology.
        busy: Servers that other jobs hold, as a mask.
    """
    given = np.uint64(0)
    for size in sizes:
        if size == 0:
            break
        found = False
        for block in range(blocks.first[size], blocks.first[size + 1]):
            if blocks.masks[block] & busy == 0:
                given |= blocks.masks[block]
                found = True
                break
        if not found:
            # Not a plain 0: with it the compiler makes all masks floating-point.
            return np.uint64(0)
    return given
