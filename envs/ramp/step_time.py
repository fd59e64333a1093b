"""Seconds of one training step of a placed job, in the benchmark's own arithmetic.

A job is split into sub-ops on servers, joined by edges with durations
(:func:`sub_graph`), and list scheduling without contention runs them
(:func:`step_time_s`). These are the benchmark's own rules, faults included.

*Messages.* The rate of a link is divided by the number of transceivers twice in a
collective, and a pair within one rack costs nothing.

*Sub-graph.* An edge carries what its source keeps in memory, activation and parameters,
over the sub-ops of both its ends; of two neighbours the one that is split later decides
whose memory that is. Sub-ops of one backward op are joined all to all, to add up
gradients.

*Scheduling.* It goes round by round. On each server the ready sub-op with the least
compute time runs, the later placed one among equals. Edges that take no time complete
first, in rounds of their own; else time goes on to the next completion: of a running
sub-op, or of the shortest ready edge between two servers, the later listed one among
equals. All ready edges progress at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.job import RampJob
from envs.ramp.topology import RampTopology
from planner.simulate.compiled import compiled, inner

__all__ = [
    "JobEdges",
    "LinkRates",
    "SubGraph",
    "collective_s",
    "job_edges",
    "link_rates",
    "message_s",
    "step_time_s",
    "sub_graph",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Limits of a server's reduction: memory bandwidth and FLOP/s. Source: the package's
#: paper, its RAMP environment; an A100's memory bandwidth of 2e12 B/s.
_MEMORY_BYTES_PER_S, _PEAK_FLOPS_PER_S = 2e12, 130e12


class LinkRates(NamedTuple):
    """Rates and shape of a topology, for compiled code.

    Attributes:
        racks: Racks in each group.
        servers: Servers in each rack.
        transceivers: Links of a server, as many as there are groups.
        link_bytes_per_s: Bandwidth of one link.
        fixed_s: Latency of a message.
    """

    racks: int
    servers: int
    transceivers: int
    link_bytes_per_s: float
    fixed_s: float


def link_rates(topology: RampTopology) -> LinkRates:
    """Return the rates of a topology."""
    return LinkRates(
        racks=topology.racks,
        servers=topology.servers,
        transceivers=topology.groups,
        link_bytes_per_s=topology.bandwidth_bytes_per_s / topology.groups,
        fixed_s=topology.propagation_s + 2 * topology.input_output_s,
    )


@inner
def message_s(size_bytes: float, rates: LinkRates) -> float:
    """Seconds of a message between two servers; 0 for an empty one."""
    if size_bytes == 0.0:
        return 0.0
    seconds: float = rates.fixed_s + size_bytes / rates.link_bytes_per_s
    return seconds


@inner
def collective_s(
    size_bytes: float, groups: int, racks: int, servers: int, rates: LinkRates
) -> float:
    """Seconds of a reduce-scatter and an all-gather over four subgroups in turn.

    Args:
        size_bytes: Sum over the edges of the collective.
        groups: Communication groups that it touches.
        racks: Different racks, by their number in a group.
        servers: Different servers, by their number in a rack.
        rates: Rates of the topology.
    """
    ways = rates.transceivers
    per_link = rates.link_bytes_per_s / ways
    sent, reduced, left = 0.0, 0.0, size_bytes
    for part in (groups, min(groups, servers), racks, -(-servers // ways)):
        left = math.ceil(left / part)
        if part > 1:
            rate = min(ways, ways // (part - 1)) * per_link
            sent += rates.fixed_s + left / rate
            ops = math.ceil(math.log2(part))
            speed = _MEMORY_BYTES_PER_S * ops / ((part + 1) * 2)
            reduced += ops * left / 2 / min(speed, _PEAK_FLOPS_PER_S)
    return 2 * sent + reduced


class JobEdges(NamedTuple):
    """A job as arrays: op ``i`` of ``n`` in the order of lines, its mirror ``n + i``.

    Attributes:
        order: Ops in topological order. Shape [n].
        compute: Compute times of forward ops, then of their mirrors. Shape [2 n].
        memory: Bytes of each op. Shape [n].
        source: Source of each edge: forward edges by source, then the one that joins
            the last op to its mirror, then mirrored edges by target. Shape [edges].
        target: Target of each edge.
        first_out: Start of the edges out of each forward op. Shape [n + 1].
        first_in: Start of the mirrored edges into each mirrored op. Shape [n + 1].
        join: The edge that joins both halves, from ``last`` to its mirror.
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
    """Convert a job to arrays."""
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
    """Graph of one training step. s sub-ops, e edges between them.

    Attributes:
        server: Server of each sub-op. Shape [s].
        compute: Compute time of each sub-op, in the profile's unit. Shape [s].
        needs: Edges that must complete before a sub-op is ready. Shape [s].
        first_edge: Start of each sub-op's outgoing edges in ``edges``. Shape [s + 1].
        edges: Numbers of edges by source. Shape [e].
        target: Sub-op that an edge leads to. Shape [e].
        pair: Number of its pair of servers. Shape [e].
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


@inner
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


@inner
def _same_servers(
    job: JobEdges, splits: Index, servers: Index, edges: Index, tally: Index
) -> bool:
    """Return True if a group's edges leave each server as often as they enter it."""
    count = len(splits)
    tally[:] = 0
    for edge in edges:
        u, v = job.source[edge] % count, job.target[edge] % count
        for piece in range(splits[u]):
            tally[servers[u, piece]] += splits[v]
        for piece in range(splits[v]):
            tally[servers[v, piece]] -= splits[u]
    return not tally.any()


@inner
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
        # One by one, to match the benchmark's sum in the last bit.
        for _ in range(splits[u] * splits[v]):
            total += size
        for op in (u, v):
            for piece in range(splits[op]):
                _touch(servers[op, piece], rates, touched)
    return _touched_s(total, touched, rates)


@inner
def _touch(server: int, rates: LinkRates, touched: NDArray[np.bool_]) -> None:
    rack = server // rates.servers
    touched[0, rack // rates.racks] = True
    touched[1, rack % rates.racks] = True
    touched[2, server % rates.servers] = True


@inner
def _touched_s(size: float, touched: NDArray[np.bool_], rates: LinkRates) -> float:
    groups, racks, servers = touched[0].sum(), touched[1].sum(), touched[2].sum()
    if groups * racks * servers == 1:
        return 0.0
    return collective_s(size, groups, racks, servers, rates)


@inner
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


@inner
def _sub_ops(
    job: JobEdges, splits: Index, servers: Index
) -> tuple[Index, Index, Array]:
    """Return the number of each op's first sub-op; server and compute time of all.

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


@inner
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
    """Fill in the sub-edges of a job's own edges, and count those that sub-ops need."""
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


@inner
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

    Each pair of them is a collective; no sub-op waits for it.
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
        job: Job to split.
        splits: Sub-ops of each op. Shape [n].
        servers: Servers of each op's sub-ops. Shape [n, most splits].
        rates: Rates of the topology.
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


@inner
def _complete(
    done: Index, graph: SubGraph, met: Index, queue: Index, queued: Index, most: int
) -> None:
    """Complete edges; sub-ops that become ready queue at their servers.

    Sync edges are counted, too, although none is needed: a fault of the benchmark.
    """
    for edge in done:
        op = graph.target[edge]
        met[op] += 1
        if met[op] == graph.needs[op]:
            server = graph.server[op]
            queue[server * most + queued[server]] = op
            queued[server] += 1


@inner
def _first_of(
    queue: Index, queued: Index, most: int, compute: Array, running: Index
) -> None:
    """Find the place in its queue of each server's first sub-op, or -1."""
    for server in range(len(queued)):
        running[server] = -1
        best = -1
        for place in range(queued[server]):
            op = queue[server * most + place]
            if best < 0 or (compute[op], -op) < (compute[best], -best):
                best, running[server] = op, place


@inner
def _tick_s(
    graph: SubGraph,
    running_left: Array,
    ready: Index,
    edge_left: Array,
    first: Index,
) -> float:
    """Seconds to the next completion; infinity if nothing is running.

    Only the edge of highest priority counts for each pair of servers. ``first`` is
    scratch, -1 for all pairs before and after.
    """
    tick: float = running_left.min()
    for edge in ready:
        best = first[graph.pair[edge]]
        if best < 0 or (graph.duration[edge], -edge) < (graph.duration[best], -best):
            first[graph.pair[edge]] = edge
    for edge in ready:
        best = first[graph.pair[edge]]
        if best >= 0:
            tick = min(tick, edge_left[best])
            first[graph.pair[edge]] = -1
    return tick


@inner
def _pass_time(ready: Index, edge_left: Array, tick: float, done: Index) -> int:
    """Advance ready edges; those that are left move to the front of ``ready``.

    Returns:
        Number of edges that have completed, which ``done`` is filled with.
    """
    kept, num_done = 0, 0
    for edge in ready:
        if edge_left[edge] <= tick:
            done[num_done] = edge
            num_done += 1
        else:
            edge_left[edge] -= tick
            ready[kept] = edge
            kept += 1
    return num_done


@compiled
def step_time_s(graph: SubGraph) -> float:
    """Run a step.

    Returns:
        Its seconds, summed tick by tick; infinity if edges wait for each other.
    """
    ops, edges = len(graph.server), len(graph.target)
    servers, most = graph.server.max() + 1, np.bincount(graph.server).max()
    queue = np.empty(servers * most, dtype=np.int64)
    queued, running = np.zeros(servers, dtype=np.int64), np.empty(servers, np.int64)
    met = np.zeros(ops, dtype=np.int64)
    for op in np.flatnonzero(graph.needs == 0):
        queue[graph.server[op] * most + queued[graph.server[op]]] = op
        queued[graph.server[op]] += 1
    op_left, edge_left = graph.compute.copy(), graph.duration.copy()
    running_left = np.empty(servers)
    # Edges that are ready: those that take time, and those that take none.
    ready, instant = np.empty(edges, np.int64), np.empty(edges, np.int64)
    done, first = np.empty(edges, np.int64), np.full(servers * servers, -1)
    num_ready, num_instant, left, time = 0, 0, ops + edges, 0.0
    while left:
        if num_instant:
            _complete(instant[:num_instant], graph, met, queue, queued, most)
            left, num_instant = left - num_instant, 0
            continue
        _first_of(queue, queued, most, graph.compute, running)
        for server in range(servers):
            place = server * most + running[server]
            waits = running[server] < 0
            running_left[server] = np.inf if waits else op_left[queue[place]]
        tick = _tick_s(graph, running_left, ready[:num_ready], edge_left, first)
        if tick == np.inf:
            return np.inf
        time += tick
        num_done = _pass_time(ready[:num_ready], edge_left, tick, done)
        num_ready -= num_done
        for server in np.flatnonzero(running >= 0):  # type: ignore[assignment]
            place = server * most + running[server]
            op = queue[place]
            op_left[op] -= tick
            if op_left[op] > 0.0:
                continue
            queued[server] -= 1
            queue[place] = queue[server * most + queued[server]]
            left -= 1
            for at in range(graph.first_edge[op], graph.first_edge[op + 1]):
                edge = graph.edges[at]
                if graph.duration[edge] > 0.0:
                    ready[num_ready] = edge
                    num_ready += 1
                else:
                    instant[num_instant] = edge
                    num_instant += 1
        _complete(done[:num_done], graph, met, queue, queued, most)
        left -= num_done
    return time
