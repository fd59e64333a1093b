"""How a split stands: what a network must know of it to make it better."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled
from planner.split import Groups, Split, loads_ms
from planner.split.task import Array, Index, Mask, summed

__all__ = ["STANDING", "stand"]

#: Names of the numbers of a group in a split, in their order.
STANDING = (
    "place",
    "load",
    "most_loaded",
    "load_before",
    "load_behind",
    "from_start",
    "to_end",
    "on_cpu",
    "comes_in",
    "goes_out",
    "held",
    "goes_forward",
    "goes_back",
)


@compiled
def _goes_along(
    order: Index, run: Index, start: Index, flat: Index, work: Array, along: Array
) -> None:
    """Work in the run of each group that must move with it.

    Args:
        order: All groups, those of ``flat`` before those they belong to.
        run: Of each place in that order. Shape [m].
        start: Starts of what each group must take along. Shape [m + 1].
        flat: That.
        work: Of each group. Shape [m].
        along: What is filled in. Shape [m].
    """
    m = len(order)
    goes = np.zeros(m, dtype=np.bool_)
    place = np.empty(m, dtype=np.int64)
    place[order] = np.arange(m)
    for last in range(m):
        goes[:] = False
        goes[last] = True
        for i in range(last, -1, -1):
            if run[i] != run[last]:
                break
            if not goes[i]:
                continue
            at = order[i]
            along[order[last]] += work[at]
            for k in range(start[at], start[at + 1]):
                goes[place[flat[k]]] = True


def _crossing(groups: Groups, device: Index) -> tuple[Array, Array]:
    """What comes in to each group from other devices, and what goes out to them."""
    m = len(groups)
    flow_of = np.repeat(np.arange(len(groups.flow_ms)), np.diff(groups.flow_start))
    crosses: Mask = device[groups.flow_from[flow_of]] != device[groups.flow_to]
    price = groups.flow_ms[flow_of] * crosses
    leaves = np.zeros(len(groups.flow_ms))
    leaves[flow_of[crosses]] = 1.0
    comes = summed(groups.flow_to, price, m)
    goes = summed(groups.flow_from, groups.flow_ms * leaves, m)
    return comes, goes


def stand(groups: Groups, order: Index, split: Split) -> NDArray[np.float32]:
    """The numbers of each group in a split whose devices take runs of an order.

    Args:
        groups: What is split.
        order: All groups, producers first. Shape [m].
        split: Cut along it.

    Returns:
        Shape [m, len(STANDING)].
    """
    m, task = len(groups), groups.task
    loads = loads_ms(task, split.assignment)
    loads /= max(float(loads.max()), 1e-12)
    along = split.group_device[order]
    starts = np.flatnonzero(np.diff(along, prepend=-1))
    run = np.cumsum(np.diff(along, prepend=-1) != 0) - 1
    lengths = np.diff(np.append(starts, m))
    run_load = loads[along[starts]]
    padded = np.concatenate([[0.0], run_load, [0.0]])
    inside = np.arange(m) - starts[run]
    comes, goes = _crossing(groups, split.group_device)
    held = summed(split.group_device, groups.size_bytes, task.devices)
    most = max(split.load_ms, 1e-12)
    work = np.where(
        split.group_device < task.accelerators, groups.accelerator_ms, groups.cpu_ms
    )
    forward, back = np.zeros(m), np.zeros(m)
    _goes_along(order, run, groups.before_start, groups.before, work, forward)
    turned, run_turned = order[::-1].copy(), run[::-1].copy()
    _goes_along(turned, run_turned, groups.after_start, groups.after, work, back)
    columns = np.empty((m, len(STANDING)))
    columns[order] = np.stack(
        [
            np.arange(m) / m,
            run_load[run],
            run_load[run] > 1 - 1e-9,
            padded[run],
            padded[run + 2],
            inside / lengths[run],
            1.0 - (inside + 1) / lengths[run],
            along >= task.accelerators,
            np.minimum(comes[order] / most, 2.0),
            np.minimum(goes[order] / most, 2.0),
            np.minimum(held[along] / max(task.memory_bytes, 1e-12), 2.0),
            np.minimum(forward[order] / most, 2.0),
            np.minimum(back[order] / most, 2.0),
        ],
        axis=1,
    )
    return columns.astype(np.float32)
