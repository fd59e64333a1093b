"""The best split along one order of the groups: cuts by dynamic programming.

Along an order every device takes a run of groups; which run goes to which device is
then found exactly, in time of the square of the groups. Source: Tarnawski et al. 2020,
arXiv 2006.16423, section 5.1 (linearisation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.simulate.compiled import compiled, inlined
from planner.split.groups import Groups
from planner.split.loads import max_load_ms
from planner.split.task import Array, Index, Mask, Precedence

__all__ = [
    "Split",
    "best_along",
    "best_linear",
    "depth_first",
    "order_by_priority",
    "standard_orders",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Where everything goes.

    Attributes:
        load_ms: Of the busiest device, by the judge.
        assignment: Device of each node. Shape [n].
        group_device: Device of each group. Shape [m].
    """

    load_ms: float
    assignment: Index
    group_device: Index


@compiled
def _run_loads(
    order: Index,
    work: Array,
    size: Array,
    supported: Mask,
    memory: float,
    flow_ms: Array,
    flow_start: Index,
    touch_start: Index,
    touch: Index,
    give_start: Index,
    give: Index,
    bound: float,
    load: Array,
) -> None:
    """Fill in the load of an accelerator that takes groups i to j - 1 of the order.

    Args:
        bound: Runs that compute longer are left infinite.
        load: Shape [m + 1, m + 1], all infinite.
    """
    m, flows = len(order), len(flow_ms)
    inside = np.zeros(flows, dtype=np.int64)
    produced = np.zeros(flows, dtype=np.bool_)
    for i in range(m):
        inside[:] = 0
        produced[:] = False
        busy, moved, held = 0.0, 0.0, 0.0
        for j in range(i, m):
            at = order[j]
            busy += work[at]
            held += size[at]
            if busy >= bound or held > memory or not supported[at]:
                break
            for k in range(touch_start[at], touch_start[at + 1]):
                f = touch[k]
                inside[f] += 1
                if produced[f]:
                    if inside[f] == flow_start[f + 1] - flow_start[f]:
                        moved -= flow_ms[f]
                elif inside[f] == 1:
                    moved += flow_ms[f]
            for k in range(give_start[at], give_start[at + 1]):
                f = give[k]
                produced[f] = True
                whole = inside[f] == flow_start[f + 1] - flow_start[f]
                if inside[f] == 0:
                    moved += flow_ms[f]
                elif whole:
                    moved -= flow_ms[f]
            load[i, j + 1] = busy + moved


@inlined
def _last_run(
    time: Array, before: Array, load: Array, j: int, bound: float
) -> tuple[float, int]:
    """Least bottleneck up to j, and twice the start of its last run; -1 if none.

    Args:
        time: Sum of the device's times up to each place.
        before: Least bottleneck up to each place without the device.
        load: The device's by first group and end; empty for a CPU.
    """
    least, chosen = bound, -1
    for i in range(j, -1, -1):
        if time[j] - time[i] >= least:
            break
        run = 0.0 if i == j else load[i, j] if len(load) else time[j] - time[i]
        value = max(before[i], run)
        if value < least:
            least, chosen = value, 2 * i
    return least, chosen


@compiled
def _cut(
    load: Array,
    work: Array,
    cpu: Array,
    accelerators: int,
    cpus: int,
    bound: float,
    took: Index,
) -> float:
    """Least largest load.

    Args:
        load: Of an accelerator by first group and end. Shape [m + 1, m + 1].
        work: Sum of accelerator times up to each place. Shape [m + 1].
        cpu: Sum of CPU times up to each place. Shape [m + 1].
        bound: Splits that are no better are not looked for.
        took: By accelerators, CPUs and end: 2 i if the last device is an accelerator
            that starts at i, 2 i + 1 if a CPU. Shape [A + 1, C + 1, m + 1].

    Returns:
        The load; infinite if none is below the bound.
    """
    m = len(work) - 1
    best = np.full((accelerators + 1, cpus + 1, m + 1), np.inf)
    for a in range(accelerators + 1):
        for c in range(cpus + 1):
            best[a, c, 0] = 0.0
            for j in range(1, m + 1):
                least, chosen = bound, -1
                if a > 0:
                    least, chosen = _last_run(work, best[a - 1, c], load, j, least)
                if c > 0:
                    less, start = _last_run(cpu, best[a, c - 1], load[:0], j, least)
                    if start >= 0:
                        least, chosen = less, start + 1
                if chosen >= 0:
                    best[a, c, j] = least
                    took[a, c, j] = chosen
    return float(best[accelerators, cpus, m])


def best_along(
    groups: Groups, order: Index, bound_ms: float = np.inf, *, check: bool = True
) -> Split | None:
    """The best split in which each device takes a run of the order.

    Args:
        groups: What is split.
        order: All groups, producers first. Shape [m].
        bound_ms: Splits that are no better are not looked for, which saves time.
        check: Whether to look the order over; leave out for orders made by
            :func:`order_by_priority`.

    Returns:
        The split; None if there is none below the bound.

    Raises:
        StrategyError: If it is no order of the groups.
    """
    if check:
        order = groups.checked(order)
    task, m = groups.task, len(groups)
    load = np.full((m + 1, m + 1), np.inf)
    _run_loads(
        order,
        groups.accelerator_ms,
        groups.size_bytes,
        groups.supported,
        task.memory_bytes,
        groups.flow_ms,
        groups.flow_start,
        groups.touch_start,
        groups.touch,
        groups.give_start,
        groups.give,
        bound_ms,
        load,
    )
    work = np.concatenate([[0.0], np.cumsum(groups.accelerator_ms[order])])
    cpu = np.concatenate([[0.0], np.cumsum(groups.cpu_ms[order])])
    took = np.full((task.accelerators + 1, task.cpus + 1, m + 1), -1, dtype=np.int64)
    value = _cut(load, work, cpu, task.accelerators, task.cpus, bound_ms, took)
    if not np.isfinite(value):
        return None
    device = np.empty(m, dtype=np.int64)
    a, c, end = task.accelerators, task.cpus, m
    while end > 0:
        start, on_cpu = divmod(int(took[a, c, end]), 2)
        if on_cpu:
            c -= 1
            device[order[start:end]] = task.accelerators + c
        else:
            a -= 1
            device[order[start:end]] = a
        end = start
    assignment = groups.spread(device)
    return Split(
        load_ms=max_load_ms(task, assignment),
        assignment=assignment,
        group_device=device,
    )


@compiled
def _by_priority(
    priority: Array,
    before_start: Index,
    after_start: Index,
    after: Index,
    order: Index,
) -> None:
    """Of the groups that may come next, the first in priority, again and again."""
    m = len(priority)
    waits = before_start[1:] - before_start[:-1]
    ready = np.empty(m, dtype=np.int64)
    count = 0
    for at in range(m):
        if waits[at] == 0:
            ready[count] = at
            count += 1
    for place in range(m):
        pick = 0
        for k in range(1, count):
            if priority[ready[k]] > priority[ready[pick]] or (
                priority[ready[k]] == priority[ready[pick]] and ready[k] < ready[pick]
            ):
                pick = k
        at = ready[pick]
        count -= 1
        ready[pick] = ready[count]
        order[place] = at
        for k in range(after_start[at], after_start[at + 1]):
            waits[after[k]] -= 1
            if waits[after[k]] == 0:
                ready[count] = after[k]
                count += 1


def order_by_priority(groups: Precedence, priority: Array) -> Index:
    """The order in which, of all groups that may come next, the first in priority does.

    Args:
        groups: What is ordered.
        priority: Of each group, the highest first; ties go by number. Shape [m].
    """
    order = np.empty(len(groups), dtype=np.int64)
    _by_priority(
        np.ascontiguousarray(priority, dtype=np.float64),
        groups.before_start,
        groups.after_start,
        groups.after,
        order,
    )
    return order


def depth_first(groups: Precedence, reverse: bool) -> Index:
    """Producers first, going on from what was placed last."""
    m = len(groups)
    waits = np.diff(groups.before_start)
    stack = [int(g) for g in np.flatnonzero(waits == 0)]
    if reverse:
        stack.reverse()
    order = []
    while stack:
        at = stack.pop()
        order.append(at)
        follow = groups.after[groups.after_start[at] : groups.after_start[at + 1]]
        for after in follow[::-1] if reverse else follow:
            waits[after] -= 1
            if waits[after] == 0:
                stack.append(int(after))
    return np.array(order, dtype=np.int64).reshape(m)


@compiled
def _levels(
    order: Index, start: Index, flat: Index, weight: Array, level: Array
) -> None:
    """Longest weighted path that ends with each group, those of ``flat`` before it."""
    for at in order:
        longest = 0.0
        for k in range(start[at], start[at + 1]):
            longest = max(longest, level[flat[k]])
        level[at] = longest + weight[at]


def standard_orders(groups: Groups) -> Iterator[Index]:
    """Orders that often do well, without chance: depth first and by longest paths."""
    for reverse in (False, True):
        yield depth_first(groups, reverse)
    first = order_by_priority(groups, np.zeros(len(groups)))
    ones, work = np.ones(len(groups)), groups.accelerator_ms
    for weight in (ones, work):
        down, up = np.zeros(len(groups)), np.zeros(len(groups))
        _levels(first, groups.before_start, groups.before, weight, down)
        _levels(first[::-1].copy(), groups.after_start, groups.after, weight, up)
        for priority in (-down, up, up - down, -down + 1e-3 * up):
            yield order_by_priority(groups, priority)


def best_linear(groups: Groups) -> Split | None:
    """The best split along any of the standard orders; None if no order allows one."""
    best: Split | None = None
    for order in standard_orders(groups):
        bound = np.inf if best is None else best.load_ms
        best = best_along(groups, order, bound, check=False) or best
    return best
