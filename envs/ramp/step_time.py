"""Seconds of one training step of a placed job: list scheduling without contention.

Round by round. On each server the ready sub-op with the least compute time runs, the
later placed one among equals. Edges that take no time complete first, in rounds of
their own; else time goes on to the next completion: of a running sub-op, or of the
shortest ready edge between two servers, the later listed one among equals. All ready
edges go on at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.ramp.sub_graph import SubGraph
from planner.simulate.compiled import compiled

__all__ = ["step_time_s"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@compiled
def _complete(
    done: Index, graph: SubGraph, met: Index, queue: Index, queued: Index, most: int
) -> None:
    """Note completed edges; sub-ops that become ready queue at their servers.

    Sync edges are counted, too, although none is waited for: a fault of the benchmark.
    """
    for edge in done:
        op = graph.target[edge]
        met[op] += 1
        if met[op] == graph.needs[op]:
            server = graph.server[op]
            queue[server * most + queued[server]] = op
            queued[server] += 1


@compiled
def _first_of(
    queue: Index, queued: Index, most: int, compute: Array, running: Index
) -> None:
    """Where in its queue each server's sub-op of highest priority is, or -1."""
    for server in range(len(queued)):
        running[server] = -1
        best = -1
        for place in range(queued[server]):
            op = queue[server * most + place]
            if best < 0 or (compute[op], -op) < (compute[best], -best):
                best, running[server] = op, place


@compiled
def _tick_s(
    graph: SubGraph,
    running_left: Array,
    ready: Index,
    edge_left: Array,
    first: Index,
) -> float:
    """Seconds to the next completion; infinity if nothing goes on.

    Of each pair of servers only the edge of highest priority is looked at. ``first`` is
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


@compiled
def _pass_time(ready: Index, edge_left: Array, tick: float, done: Index) -> int:
    """Let ready edges go on; those that are left move to the front of ``ready``.

    Returns:
        How many have ended, which ``done`` is filled with.
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
        Its seconds, added up tick by tick; infinity if edges wait for each other.
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
