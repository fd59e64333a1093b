"""Operators that must lie together, as one graph of groups without cycles.

A group has the forward and the backward nodes of one or more classes; its place in the
order is that of the forward ones. A class without a forward node gets its place from
its backward edges, turned round, since the backward pass runs through the devices the
other way. Groups on a cycle are fused, for a contiguous set cannot part them, and a
forward node without time that has one neighbour (a weight, say) goes with it: that
loses nothing where all fits into one memory, and elsewhere is done up to an eighth.
Source: Tarnawski et al. 2020, arXiv 2006.16423, section 5.2 and appendix B.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import networkx as nx
import numpy as np

from planner.errors import NoFeasiblePlanError, StrategyError
from planner.split.task import Array, Index, Mask, SplitTask, neighbours, summed

__all__ = ["Groups", "group"]

_NO_TIME_MS = 1e-6  # what counts as no time
_SHARE = 0.125  # of a memory too small for all, that a group may grow to


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Groups:
    """What moves as one, and what flows between.

    A flow is one or more outputs of one group that go to the same other groups.

    Attributes:
        task: What was grouped.
        member_of: Group of each node. Shape [n].
        accelerator_ms: Time on an accelerator. Shape [m].
        cpu_ms: Time on a CPU. Shape [m].
        size_bytes: Memory held on an accelerator. Shape [m].
        supported: Whether an accelerator can run it. Shape [m].
        after_start: Starts of the groups that must not come earlier. Shape [m + 1].
        after: Those groups.
        before_start: The same for those that must not come later. Shape [m + 1].
        before: Those groups.
        flow_ms: Transfer time of each flow. Shape [f].
        flow_from: Producer of each flow. Shape [f].
        flow_start: Starts of each flow's consumers. Shape [f + 1].
        flow_to: Consumers.
        touch_start: Starts of the flows each group consumes. Shape [m + 1].
        touch: Those flows.
        give_start: Starts of the flows each group produces. Shape [m + 1].
        give: Those flows.
    """

    task: SplitTask
    member_of: Index
    accelerator_ms: Array
    cpu_ms: Array
    size_bytes: Array
    supported: Mask
    after_start: Index
    after: Index
    before_start: Index
    before: Index
    flow_ms: Array
    flow_from: Index
    flow_start: Index
    flow_to: Index
    touch_start: Index
    touch: Index
    give_start: Index
    give: Index

    def __len__(self) -> int:
        return len(self.accelerator_ms)

    def spread(self, device: Index) -> Index:
        """Device of each node from the device of each group."""
        found: Index = device[self.member_of]
        return found

    def checked(self, order: Index) -> Index:
        """An order of all groups, producers first.

        Raises:
            StrategyError: If it is no such order.
        """
        order = np.asarray(order, dtype=np.int64)
        m = len(self)
        if order.shape != (m,) or not np.array_equal(np.sort(order), np.arange(m)):
            raise StrategyError(
                f"an order of shape {order.shape}; {self.task.name} needs each of its "
                f"{m} groups once"
            )
        place = np.empty(m, dtype=np.int64)
        place[order] = np.arange(m)
        owner = np.repeat(np.arange(m), np.diff(self.after_start))
        wrong = place[owner] > place[self.after]
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise StrategyError(
                f"group {self.after[at]} stands before group {owner[at]}, whose output "
                f"it needs; list producers first"
            )
        return order


def _forward_graph(task: SplitTask, mirrored: bool) -> nx.DiGraph:
    """Classes, and which must not come after which."""
    colours = int(task.colour.max()) + 1
    has_forward = np.zeros(colours, dtype=bool)
    has_forward[task.colour[~task.backward]] = True
    graph = nx.DiGraph()
    graph.add_nodes_from(range(colours))
    source, target = task.edge_source, task.edge_target
    for u, v, back_u, back_v in zip(
        task.colour[source].tolist(),
        task.colour[target].tolist(),
        task.backward[source].tolist(),
        task.backward[target].tolist(),
        strict=True,
    ):
        if u == v:
            continue
        if not back_u and not back_v:
            graph.add_edge(u, v)
        elif (
            back_u and back_v and (mirrored or not (has_forward[u] and has_forward[v]))
        ):
            graph.add_edge(v, u)
    return graph


def _fuse(graph: nx.DiGraph) -> tuple[Index, nx.DiGraph]:
    """Component of each class, and the graph of components."""
    component = np.empty(graph.number_of_nodes(), dtype=np.int64)
    members = sorted(sorted(c) for c in nx.strongly_connected_components(graph))
    for at, classes in enumerate(members):
        component[classes] = at
    fused = nx.DiGraph()
    fused.add_nodes_from(range(len(members)))
    fused.add_edges_from(
        (int(component[u]), int(component[v]))
        for u, v in graph.edges
        if component[u] != component[v]
    )
    return component, fused


def _attach(task: SplitTask, group_of: Index, graph: nx.DiGraph) -> Index:
    """Group that each group goes with: itself, or its only neighbour."""
    count = graph.number_of_nodes()
    back, times = task.backward, (task.accelerator_ms, task.cpu_ms)
    forward_ms = [summed(group_of[~back], t[~back], count) for t in times]
    backward_ms = (task.accelerator_ms + task.cpu_ms)[back]
    idle_back = summed(group_of[back], backward_ms, count) < _NO_TIME_MS
    idle = (forward_ms[0] < _NO_TIME_MS) & (forward_ms[1] < _NO_TIME_MS) & idle_back
    source, target = task.edge_source, task.edge_target
    feeds_back = np.zeros(count, dtype=bool)
    feeds_back[group_of[source[~back[source] & back[target]]]] = True
    free = idle & ~feeds_back
    held = summed(group_of, task.size_bytes, count)
    room = np.inf if held.sum() <= task.memory_bytes else _SHARE * task.memory_bytes
    goes_with = np.arange(count)
    near = nx.Graph(graph)
    waiting = [int(g) for g in np.flatnonzero(free)]
    while waiting:
        at = waiting.pop()
        if at not in near or near.degree(at) != 1:
            continue
        (other,) = near[at]
        if held[at] > 0 and held[at] + held[other] > room:
            continue
        goes_with[at] = other
        held[other] += held[at]
        near.remove_node(at)
        if free[other]:
            waiting.append(other)
    for at in range(count):
        end = at
        while goes_with[end] != end:
            end = int(goes_with[end])
        goes_with[at] = end
    return goes_with


def _flows(
    task: SplitTask, group_of: Index
) -> dict[tuple[int, tuple[int, ...]], float]:
    """Price by producer and consumers."""
    consumers: dict[int, set[int]] = defaultdict(set)
    for u, v in zip(task.edge_source.tolist(), task.edge_target.tolist(), strict=True):
        if group_of[u] != group_of[v] and task.transfer_ms[u] > 0:
            consumers[u].add(int(group_of[v]))
    flows: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
    for u, reached in sorted(consumers.items()):
        flows[int(group_of[u]), tuple(sorted(reached))] += float(task.transfer_ms[u])
    return flows


def _must_hold(task: SplitTask, group_of: Index, size: Array, supported: Mask) -> None:
    if task.cpus:
        return
    bad = np.flatnonzero(~supported | (size > task.memory_bytes))
    if len(bad):
        node = task.nodes[int(np.flatnonzero(group_of == bad[0])[0])]
        raise NoFeasiblePlanError(
            [
                f"{task.name}: the group of node {node!r} needs {size[bad[0]]:.0f} "
                f"bytes on one device; an accelerator has {task.memory_bytes:.0f} and "
                f"there is no CPU"
            ],
        )


def group(task: SplitTask, *, mirrored: bool = False) -> Groups:
    """Group the operators of a task.

    Args:
        task: What is split.
        mirrored: Whether all backward edges count, turned round. Every split along
            such groups has contiguous backward parts; otherwise that is to be looked
            at, and is rarely found not to be so.

    Raises:
        NoFeasiblePlanError: If no device can hold a group.
    """
    component, graph = _fuse(_forward_graph(task, mirrored))
    goes_with = _attach(task, component[task.colour], graph)
    kept, dense = np.unique(goes_with, return_inverse=True)
    member_of: Index = dense[component[task.colour]].astype(np.int64)
    m = len(kept)

    def total(values: Array) -> Array:
        return summed(member_of, values, m)

    supported = total((~task.supported).astype(float)) == 0
    size = total(task.size_bytes)
    _must_hold(task, member_of, size, supported)
    pairs = sorted({(int(dense[u]), int(dense[v])) for u, v in graph.edges})
    ends = np.array([p for p in pairs if p[0] != p[1]], dtype=np.int64).reshape(-1, 2)
    flows = _flows(task, member_of)
    flow_to = [np.array(to, dtype=np.int64) for _, to in flows]
    flow_of = np.repeat(np.arange(len(flows)), [len(to) for to in flow_to])
    flat = np.concatenate([*flow_to, np.empty(0, dtype=np.int64)])
    flow_from = np.array([producer for producer, _ in flows], dtype=np.int64)
    after_start, after = neighbours(ends[:, 0], ends[:, 1], m)
    before_start, before = neighbours(ends[:, 1], ends[:, 0], m)
    flow_start, flow_to_flat = neighbours(flow_of, flat, len(flows))
    touch_start, touch = neighbours(flat, flow_of, m)
    give_start, give = neighbours(flow_from, np.arange(len(flows)), m)
    return Groups(
        task=task,
        member_of=member_of,
        accelerator_ms=total(task.accelerator_ms),
        cpu_ms=total(task.cpu_ms),
        size_bytes=size,
        supported=supported,
        after_start=after_start,
        after=after,
        before_start=before_start,
        before=before,
        flow_ms=np.array(list(flows.values())),
        flow_from=flow_from,
        flow_start=flow_start,
        flow_to=flow_to_flat,
        touch_start=touch_start,
        touch=touch,
        give_start=give_start,
        give=give,
    )
