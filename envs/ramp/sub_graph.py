"""The graph of a split and placed job: sub-ops on servers, edges with durations.

An edge carries what its source keeps in memory, activation and parameters, over the
sub-ops of both its ends; of two neighbours the one that is split later decides whose
memory that is. Sub-ops of one backward op are joined all to all, to add up gradients.
These are the benchmark's own rules, faults included.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.communication import LinkRates, collective_s, message_s
from envs.ramp.job import RampJob
from planner.simulate.compiled import compiled

__all__ = ["JobEdges", "SubGraph", "job_edges", "sub_graph"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


class JobEdges(NamedTuple):
    """A job as arrays: op ``i`` of ``n`` in the order of lines, its mirror ``n + i``.

    Attributes:
        order: Ops in topological order. Shape [n].
        compute: Of forward ops, then of their mirrors. Shape [2 n].
        memory: Of an op. Shape [n].
        source: Of an edge: forward edges by source, then the one that joins the last
            op to its mirror, then mirrored edges by target. Shape [edges].
        target: Likewise.
        first_out: Where the edges out of each forward op start. Shape [n + 1].
        first_in: Where the mirrored edges into each mirrored op start. Shape [n + 1].
        join: The edge that joins both halves, out of ``last`` into its mirror.
        last: The forward op that is joined to its mirror.
    """

    order: Index
    compute: Array
    memory: Array
    source: Index
    target: Index
    first_out: Index
    first_in: Index
    join: int
    last: int


def job_edges(job: RampJob) -> JobEdges:
    """Lay a job out."""
    count = len(job.ids)
    by_source = job.edges[np.argsort(job.edges[:, 0], kind="stable")]
    last = int(job.position[-1])
    starts = np.searchsorted(by_source[:, 0], np.arange(count + 1))
    join = len(by_source)
    return JobEdges(
        order=job.order,
        compute=np.concatenate([job.forward, job.backward]),
        memory=job.memory,
        source=np.concatenate([by_source[:, 0], [last], count + by_source[:, 1]]),
        target=np.concatenate(
            [by_source[:, 1], [count + last], count + by_source[:, 0]]
        ),
        first_out=starts.astype(np.int64),
        first_in=(starts + join + 1).astype(np.int64),
        join=join,
        last=last,
    )


class SubGraph(NamedTuple):
    """What one training step runs. s sub-ops, e edges between them.

    Attributes:
        server: Of each sub-op. Shape [s].
        compute: Of each sub-op, in the profile's unit. Shape [s].
        needs: Edges that are to complete before a sub-op is ready. Shape [s].
        first_edge: Where each sub-op's edges out start in ``edges``. Shape [s + 1].
        edges: Numbers of edges by source. Shape [e].
        target: Sub-op that an edge leads to. Shape [e].
        pair: Number of its two servers. Shape [e].
        duration: Seconds. Shape [e].
    """

    server: Index
    compute: Array
    needs: Index
    first_edge: Index
    edges: Index
    target: Index
    pair: Index
    duration: Array


@compiled
def _size(job: JobEdges, splits: Index, source: int, target: int) -> float:
    """Bytes of an edge between sub-ops of two ops."""
    count = len(splits)
    u, v = source % count, target % count
    if splits[u] == 1 and splits[v] == 1:
        size: float = job.memory[u]
        return size
    # Pairs are split in the order of lines, forward op before mirror.
    later = splits[v] > 1 and (splits[u] == 1 or v > u or (v == u and target > source))
    if later:
        size = job.memory[u] / splits[u] / splits[v]
    else:
        size = job.memory[v] / splits[v] / splits[u]
    return size


@compiled
def _same_servers(
    job: JobEdges, splits: Index, servers: Index, edges: Index, tally: Index
) -> bool:
    """Whether a group's edges leave each server as often as they enter it."""
    count = len(splits)
    tally[:] = 0
    for edge in edges:
        u, v = job.source[edge] % count, job.target[edge] % count
        for piece in range(splits[u]):
            tally[servers[u, piece]] += splits[v]
        for piece in range(splits[v]):
            tally[servers[v, piece]] -= splits[u]
    return not tally.any()


@compiled
def _group_s(
    job: JobEdges, splits: Index, servers: Index, edges: Index, rates: LinkRates
) -> float:
    """Seconds of a collective over all edges of a group."""
    count = len(splits)
    touched = np.zeros((3, servers.max() + 1), dtype=np.bool_)
    total = 0.0
    for edge in edges:
        u, v = job.source[edge] % count, job.target[edge] % count
        size = _size(job, splits, job.source[edge], job.target[edge])
        # One by one: the last bit of the sum is the benchmark's.
        for _ in range(splits[u] * splits[v]):
            total += size
        for op in (u, v):
            for piece in range(splits[op]):
                _touch(servers[op, piece], rates, touched)
    return _touched_s(total, touched, rates)


@compiled
def _touch(server: int, rates: LinkRates, touched: NDArray[np.bool_]) -> None:
    rack = server // rates.servers
    touched[0, rack // rates.racks] = True
    touched[1, rack % rates.racks] = True
    touched[2, server % rates.servers] = True


@compiled
def _touched_s(size: float, touched: NDArray[np.bool_], rates: LinkRates) -> float:
    groups, racks, servers = touched[0].sum(), touched[1].sum(), touched[2].sum()
    if groups * racks * servers == 1:
        return 0.0
    return collective_s(size, groups, racks, servers, rates)


@compiled
def _list_edges(
    job: JobEdges, splits: Index, servers: Index, rates: LinkRates
) -> tuple[Index, Array, Index, int]:
    """Number sub-edges: those of collectives first, op by op, then all others.

    Returns:
        Number of the first sub-edge of each edge, seconds of each edge between
        different servers (-1 for each on its own), number of the first sync edge of
        each op, and how many there are.
    """
    count, edges = len(splits), len(job.source)
    first = np.full(edges, -1)
    seconds = np.full(edges, -1.0)
    sync = np.full(count, -1)
    tally = np.zeros(servers.max() + 1, dtype=np.int64)
    alone = np.empty(edges + 1, dtype=np.int64)
    number, left = 0, 0
    for op in range(count):
        out = np.arange(job.first_out[op], job.first_out[op + 1])
        into = np.arange(job.first_in[op], job.first_in[op + 1])
        if op == job.last:
            out, into = np.append(out, job.join), np.append(job.join, into)
        for group in (out, into):
            if splits[op] == 1 or not _same_servers(job, splits, servers, group, tally):
                for edge in group:
                    alone[left] = edge
                    left += 1
                continue
            taken = _group_s(job, splits, servers, group, rates) if len(group) else 0.0
            for edge in group:
                seconds[edge] = taken
                if first[edge] < 0:
                    first[edge] = number
                    u, v = job.source[edge] % count, job.target[edge] % count
                    number += splits[u] * splits[v]
        if splits[op] > 1:
            sync[op] = number
            number += splits[op] * (splits[op] - 1)
    for edge in alone[:left]:
        if first[edge] < 0:
            first[edge] = number
            u, v = job.source[edge] % count, job.target[edge] % count
            number += splits[u] * splits[v]
    return first, seconds, sync, number


@compiled
def _sub_ops(
    job: JobEdges, splits: Index, servers: Index
) -> tuple[Index, Index, Array]:
    """Number of each op's first sub-op; server and compute time of all.

    Sub-op j of op u is base[u] + 2 j, that of its mirror the next: as they are placed.
    """
    count, total = len(splits), 0
    base = np.zeros(count, dtype=np.int64)
    for op in job.order:
        base[op] = total
        total += 2 * splits[op]
    server, compute = np.empty(total, dtype=np.int64), np.empty(total)
    for op in range(count):
        for piece in range(splits[op]):
            for half in range(2):
                at = base[op] + 2 * piece + half
                server[at] = servers[op, piece]
                compute[at] = job.compute[op + half * count] / splits[op]
    return base, server, compute


class _Sent(NamedTuple):
    """Ends and seconds of sub-edges. Shapes [e]."""

    source: Index
    target: Index
    duration: Array


@compiled
def _fill_edges(
    job: JobEdges,
    splits: Index,
    servers: Index,
    base: Index,
    first: Index,
    seconds: Array,
    rates: LinkRates,
    sent: _Sent,
    needs: Index,
) -> None:
    """Fill in the sub-edges of a job's own edges, and count what sub-ops wait for."""
    count = len(splits)
    for edge in range(len(job.source)):
        u, v = job.source[edge], job.target[edge]
        a, b = u % count, v % count
        taken, at = seconds[edge], first[edge]
        if taken < 0:
            taken = message_s(_size(job, splits, u, v), rates)
        for x in range(splits[a]):
            for y in range(splits[b]):
                sent.source[at] = base[a] + 2 * x + u // count
                sent.target[at] = base[b] + 2 * y + v // count
                needs[sent.target[at]] += 1
                if servers[a, x] != servers[b, y]:
                    sent.duration[at] = taken
                at += 1


@compiled
def _fill_sync(
    job: JobEdges,
    splits: Index,
    servers: Index,
    base: Index,
    sync: Index,
    rates: LinkRates,
    sent: _Sent,
) -> None:
    """Fill in the edges among the sub-ops of each mirrored op.

    Each pair of them is a collective; nothing is said to wait for it.
    """
    touched = np.zeros((3, servers.max() + 1), dtype=np.bool_)
    for op in range(len(splits)):
        at = sync[op]
        if at < 0:
            continue
        size = job.memory[op] / splits[op]
        for x in range(splits[op]):
            for y in range(x + 1, splits[op]):
                touched[:] = False
                _touch(servers[op, x], rates, touched)
                _touch(servers[op, y], rates, touched)
                taken = _touched_s(size + size, touched, rates)
                for a, b in ((x, y), (y, x)):
                    sent.source[at] = base[op] + 2 * a + 1
                    sent.target[at] = base[op] + 2 * b + 1
                    if servers[op, a] != servers[op, b]:
                        sent.duration[at] = taken
                    at += 1


@compiled
def sub_graph(
    job: JobEdges, splits: Index, servers: Index, rates: LinkRates
) -> SubGraph:
    """Split a job's graph.

    Args:
        job: What to split.
        splits: Sub-ops of each op. Shape [n].
        servers: Of each op's sub-ops. Shape [n, most splits].
        rates: Of the topology.
    """
    first, seconds, sync, number = _list_edges(job, splits, servers, rates)
    base, server, compute = _sub_ops(job, splits, servers)
    needs = np.zeros(len(server), dtype=np.int64)
    sent = _Sent(
        np.empty(number, dtype=np.int64),
        np.empty(number, dtype=np.int64),
        np.zeros(number),
    )
    _fill_edges(job, splits, servers, base, first, seconds, rates, sent, needs)
    _fill_sync(job, splits, servers, base, sync, rates, sent)
    first_edge = np.zeros(len(server) + 1, dtype=np.int64)
    for at in sent.source:
        first_edge[at + 1] += 1
    many = servers.max() + 1
    return SubGraph(
        server,
        compute,
        needs,
        np.cumsum(first_edge),
        np.argsort(sent.source, kind="mergesort"),
        sent.target,
        server[sent.source] * many + server[sent.target],
        sent.duration,
    )
