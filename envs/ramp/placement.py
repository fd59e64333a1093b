"""Place a split job on servers: beside its parents, else in the first free block.

:func:`place` goes through the ops of a job. :func:`servers_given` finds its servers
faster: an op without a parent of as many sub-ops requests the first block of its size,
and servers that the job itself holds count as free, so that all ops that request one
size get the same block. The requested sizes are known beforehand, and a placement is
one search for each. That holds as long as no server's memory fills up, which
:func:`requested_sizes` checks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.job import RampJob
from envs.ramp.topology import RampTopology
from planner.simulate.compiled import compiled, copy_into, inner

__all__ = [
    "BlockTable",
    "SplitJob",
    "block_table",
    "place",
    "requested_sizes",
    "servers_given",
    "split_job",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Masks = NDArray[np.uint64]


class SplitJob(NamedTuple):
    """A job of one degree as arrays, for placing it. n ops, p the most splits.

    Attributes:
        order: Ops in topological order. Shape [n].
        splits: Sub-ops of each op. Shape [n].
        memory: Bytes of each op. Shape [n].
        first_parent: Start of each op's parents in ``parents``. Shape [n + 1].
        parents: Ops, in the order of the edges. Shape [edges].
        first_block: Start of the blocks of each size in ``blocks``. Shape [p + 2].
        blocks: Servers of blocks, padded with -1. Shape [all blocks, p].
    """

    order: Index
    splits: Index
    memory: Array
    first_parent: Index
    parents: Index
    first_block: Index
    blocks: Index


@lru_cache(maxsize=64)
def _blocks(topology: RampTopology, sizes: tuple[int, ...]) -> tuple[Index, Index]:
    most = max(sizes)
    rows: list[Index] = []
    first = np.zeros(most + 2, dtype=np.int64)
    for size in range(1, most + 1):
        found = topology.blocks(size) if size > 1 and size in sizes else None
        count = 0 if found is None else len(found)
        first[size + 1] = first[size] + count
        if found is not None and count:
            padded = np.full((count, most), -1, dtype=np.int64)
            padded[:, :size] = found
            rows.append(padded)
    every = np.concatenate(rows) if rows else np.empty((0, most), dtype=np.int64)
    return first, every


def split_job(job: RampJob, degree: int, topology: RampTopology) -> SplitJob:
    """Split a job and list the blocks that its ops may get."""
    splits = job.splits(degree)
    by_target = np.argsort(job.edges[:, 1], kind="stable")
    count = np.bincount(job.edges[:, 1], minlength=len(splits))
    sizes = tuple(sorted(set(splits.tolist())))
    first_block, blocks = _blocks(topology, sizes)
    return SplitJob(
        order=job.order,
        splits=splits,
        memory=job.memory,
        first_parent=np.concatenate([[0], np.cumsum(count)]).astype(np.int64),
        parents=np.ascontiguousarray(job.edges[by_target, 0]),
        first_block=first_block,
        blocks=blocks,
    )


@inner
def _beside_parent(job: SplitJob, op: int, free: Array, servers: Index) -> bool:
    """Give an op the servers of the first parent with as many sub-ops and room."""
    size = job.splits[op]
    for index in range(job.first_parent[op], job.first_parent[op + 1]):
        parent = job.parents[index]
        if job.splits[parent] != size:
            continue
        room = 0.0
        for piece in range(size):
            room += free[servers[parent, piece]]
        if room >= job.memory[op]:
            copy_into(servers[op], servers[parent, :size])
            return True
    return False


@inner
def _in_block(job: SplitJob, op: int, busy: NDArray[np.bool_], free: Array) -> int:
    """Find the first block whose servers are free and have room, or -1."""
    size = job.splits[op]
    need = job.memory[op] / size
    for block in range(job.first_block[size], job.first_block[size + 1]):
        fits = True
        for piece in range(size):
            server = job.blocks[block, piece]
            if busy[server] or free[server] < need:
                fits = False
                break
        if fits:
            return block
    return -1


@compiled
def place(
    job: SplitJob, busy: NDArray[np.bool_], memory_bytes: float, servers: Index
) -> bool:
    """Place a job's forward ops; each mirrored op goes where its forward op is.

    Args:
        job: Job to place.
        busy: True for servers that other jobs hold. Shape [servers].
        memory_bytes: Memory of a server.
        servers: Filled in with the servers of each op's sub-ops. Shape [n, p].
    Returns:
        True if there is room.
    """
    free = np.full(len(busy), memory_bytes)
    for op in job.order:
        size = job.splits[op]
        if not _beside_parent(job, op, free, servers):
            if size > 1:
                block = _in_block(job, op, busy, free)
                if block < 0:
                    return False
                copy_into(servers[op], job.blocks[block, :size])
            else:
                found = -1
                for server in range(len(busy)):
                    if not busy[server] and free[server] >= job.memory[op]:
                        found = server
                        break
                if found < 0:
                    return False
                servers[op, 0] = found
        for piece in range(size):
            free[servers[op, piece]] -= job.memory[op] / size
    return True


#: Bits of a mask.
_MOST_SERVERS = 64


class BlockTable(NamedTuple):
    """Blocks of a topology as bit masks over its servers.

    Attributes:
        first: Start of the blocks of each size. Shape [largest size + 2].
        masks: In the order in which they are tried. Shape [blocks].
    """

    first: Index
    masks: Masks


def block_table(topology: RampTopology) -> BlockTable | None:
    """List a topology's blocks; None if it has more servers than a mask has bits."""
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
    """Return the block sizes that a job requests; None if memory matters. Shape [s]."""
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
    """Place a job by its requested sizes; return its servers as a mask, 0 without room.

    Args:
        sizes: Requested sizes, then 0. Shape [s].
        blocks: Blocks of the topology.
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
            # With a plain 0 the compiler would make all masks floating-point.
            return np.uint64(0)
    return given
