"""Whether an order allows a split below a load, without finding it.

Most orders allow none that is better than the best one known. To know so takes a small
part of the time of the cut: sets of devices used are bits, and runs of groups are
looked at from places alone that some set of devices has come to.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.simulate.compiled import compiled, inlined
from planner.split import Groups
from planner.split.task import Array, Index, Mask

__all__ = ["can_tell", "first_below"]

_BITS = 63


class _Groups(NamedTuple):
    """The groups in the form compiled code takes; see :class:`Groups`."""

    work: Array
    cpu: Array
    size: Array
    supported: Mask
    memory: float
    flow_ms: Array
    flow_start: Index
    touch_start: Index
    touch: Index
    give_start: Index
    give: Index


@inlined
def _by_cpu(
    order: Index, cpu: Array, i: int, bound: float, add: int, come: Index
) -> None:
    """Note where a CPU comes to from a place."""
    busy = 0.0
    for j in range(i, len(order)):
        busy += cpu[order[j]]
        if busy >= bound:
            return
        come[j + 1] |= add


@inlined
def _entered(p: _Groups, at: int, inside: Index, produced: Mask) -> float:
    """What it adds to the time moved that a group joins the run."""
    moved = 0.0
    for k in range(p.touch_start[at], p.touch_start[at + 1]):
        f = p.touch[k]
        inside[f] += 1
        if produced[f]:
            if inside[f] == p.flow_start[f + 1] - p.flow_start[f]:
                moved -= p.flow_ms[f]
        elif inside[f] == 1:
            moved += p.flow_ms[f]
    for k in range(p.give_start[at], p.give_start[at + 1]):
        f = p.give[k]
        produced[f] = True
        if inside[f] == 0:
            moved += p.flow_ms[f]
        elif inside[f] == p.flow_start[f + 1] - p.flow_start[f]:
            moved -= p.flow_ms[f]
    return moved


@inlined
def _by_accelerator(
    p: _Groups,
    order: Index,
    i: int,
    bound: float,
    add: int,
    come: Index,
    inside: Index,
    produced: Mask,
) -> None:
    """Note where an accelerator comes to from a place."""
    busy, moved, held = 0.0, 0.0, 0.0
    end = i
    for j in range(i, len(order)):
        at = order[j]
        busy += p.work[at]
        held += p.size[at]
        if busy >= bound or held > p.memory or not p.supported[at]:
            break
        end = j + 1
        moved += _entered(p, at, inside, produced)
        if busy + moved < bound:
            come[end] |= add
    for j in range(i, end):
        at = order[j]
        for k in range(p.touch_start[at], p.touch_start[at + 1]):
            inside[p.touch[k]] = 0
        for k in range(p.give_start[at], p.give_start[at + 1]):
            produced[p.give[k]] = False


@compiled
def _first(p: _Groups, orders: Index, masks: Index, bound: float) -> int:
    """The first order that can be cut into runs with loads below the bound.

    Args:
        masks: Device sets that have an accelerator, or a CPU, left to add; how many
            bits on the set with one more accelerator is. Shape [3].
    """
    flows, m = len(p.flow_ms), orders.shape[1]
    inside, produced = np.zeros(flows, dtype=np.int64), np.zeros(flows, dtype=np.bool_)
    for row in range(len(orders)):
        come = np.zeros(m + 1, dtype=np.int64)
        come[0] = 1
        order = orders[row]
        for i in range(m):
            add = (come[i] & masks[1]) << 1
            if add:
                _by_cpu(order, p.cpu, i, bound, add, come)
            add = (come[i] & masks[0]) << masks[2]
            if add:
                _by_accelerator(p, order, i, bound, add, come, inside, produced)
        if come[m] != 0:
            return row
    return len(orders)


def _masks(accelerators: int, cpus: int) -> Index:
    """See :func:`_first`; bit a (C + 1) + c is a accelerators and c CPUs."""
    wide = cpus + 1
    more = sum(1 << state for state in range(accelerators * wide))
    cpu = sum(1 << s for s in range((accelerators + 1) * wide) if s % wide < cpus)
    return np.array([more, cpu, wide], dtype=np.int64)


def can_tell(groups: Groups) -> bool:
    """Whether there are bits for all sets of devices."""
    return (groups.task.accelerators + 1) * (groups.task.cpus + 1) <= _BITS


def first_below(groups: Groups, orders: Index, bound_ms: float) -> int:
    """The first of some orders along which there is a split below a load.

    Args:
        groups: What is split.
        orders: All groups, producers first, in each row. Shape [orders, m].
        bound_ms: The load.

    Returns:
        Its row; the number of rows if there is none. Row 0, unseen, if
        :func:`can_tell` is not.
    """
    if not can_tell(groups):
        return 0
    task = groups.task
    parts = _Groups(
        work=groups.accelerator_ms,
        cpu=groups.cpu_ms,
        size=groups.size_bytes,
        supported=groups.supported,
        memory=task.memory_bytes,
        flow_ms=groups.flow_ms,
        flow_start=groups.flow_start,
        touch_start=groups.touch_start,
        touch=groups.touch,
        give_start=groups.give_start,
        give=groups.give,
    )
    masks = _masks(task.accelerators, task.cpus)
    return int(_first(parts, np.ascontiguousarray(orders), masks, bound_ms))
