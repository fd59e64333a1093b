"""What the network sees of a task: numbers of each group, without units.

Times are relative to the mean group and to an accelerator's fair share, places to the
number of groups, paths to the longest one: tasks of all sizes look alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled
from planner.split import Groups, order_by_priority
from planner.split.ideals import followers
from planner.split.task import Array, Index, Precedence, summed

__all__ = ["FEATURES", "PRIORS", "Observation", "both_ways", "observe", "walks"]

#: Names of the numbers of a group, in their order.
FEATURES = (
    "work",
    "share",
    "cpu",
    "size",
    "weight",
    "supported",
    "gives",
    "gives_share",
    "takes",
    "takes_share",
    "followers",
    "leaders",
    "level_down",
    "level_up",
    "path_down",
    "path_up",
    "before",
    "behind",
    "free",
    "depth_first",
    "depth_first_back",
    "first_come",
    "accelerators",
    "cpus",
    "traffic",
    "memory",
    "groups",
    "longest",
    "edges",
)

#: Names of the orders that scores start from, as priorities.
PRIORS = ("depth_first", "depth_first_back", "path_down", "path_up")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Observation:
    """A task as the network reads it.

    Attributes:
        nodes: Shape [m, len(FEATURES)].
        priors: The highest comes first. Shape [m, len(PRIORS)].
        edges: Groups and those that must not come earlier. Shape [2, e].
    """

    nodes: NDArray[np.float32]
    priors: NDArray[np.float32]
    edges: Index


@compiled
def _depth_first(
    before_start: Index, after_start: Index, after: Index, back: bool, place: Array
) -> None:
    """Place of each group where each is followed by what it has made ready."""
    m = len(before_start) - 1
    waits = before_start[1:] - before_start[:-1]
    stack = np.empty(m, dtype=np.int64)
    top = 0
    for k in range(m):
        at = m - 1 - k if back else k
        if waits[at] == 0:
            stack[top] = at
            top += 1
    count = 0
    while top > 0:
        top -= 1
        at = stack[top]
        place[at] = count
        count += 1
        first, last = after_start[at], after_start[at + 1]
        for k in range(last - first):
            to = after[last - 1 - k if back else first + k]
            waits[to] -= 1
            if waits[to] == 0:
                stack[top] = to
                top += 1


@compiled
def _paths(order: Index, start: Index, flat: Index, weight: Array, path: Array) -> None:
    """Longest weighted path that ends with each group."""
    for at in order:
        longest = 0.0
        for k in range(start[at], start[at + 1]):
            longest = max(longest, path[flat[k]])
        path[at] = longest + weight[at]


@compiled
def _around(
    reach: NDArray[np.uint64], work: Array, before: Array, behind: Array
) -> None:
    """Work of all that comes before each group, and of all that comes after it."""
    for at in range(len(work)):
        for word in range(reach.shape[1]):
            bits = reach[at, word]
            other = word << 6
            while bits:
                if bits & np.uint64(1) and other != at:
                    behind[at] += work[other]
                    before[other] += work[at]
                bits >>= np.uint64(1)
                other += 1


def _relative(values: Array, whole: float) -> Array:
    return values / whole if whole > 0 else np.zeros_like(values)


def both_ways(groups: Precedence, first: Index, weight: Array) -> tuple[Array, Array]:
    """Longest paths up to each group and from it on, relative to the longest of all."""
    m = len(groups)
    down, up = np.zeros(m), np.zeros(m)
    _paths(first, groups.before_start, groups.before, weight, down)
    _paths(first[::-1].copy(), groups.after_start, groups.after, weight, up)
    whole = float(down.max(initial=0.0))
    return _relative(down, whole), _relative(up, whole)


def walks(groups: Precedence, first: Index) -> tuple[Array, Array, Array]:
    """Places of the groups depth first, the same with turns swapped, first come."""
    m = len(groups)
    places = np.zeros((3, m))
    for back in (False, True):
        _depth_first(
            groups.before_start,
            groups.after_start,
            groups.after,
            back,
            places[int(back)],
        )
    places[2, first] = np.arange(m)
    places /= max(m, 1)
    return places[0], places[1], places[2]


def observe(groups: Groups) -> Observation:
    """The numbers of a task's groups.

    Args:
        groups: What is to be ordered.
    """
    m, task = len(groups), groups.task
    first = order_by_priority(groups, np.zeros(m))
    work = np.where(groups.supported, groups.accelerator_ms, 0.0)
    total = float(work.sum())
    gives = summed(groups.flow_from, groups.flow_ms, m)
    owner = np.repeat(np.arange(m), np.diff(groups.touch_start))
    takes = summed(owner, groups.flow_ms[groups.touch], m)
    before, behind = np.zeros(m), np.zeros(m)
    _around(followers(groups, first), work, before, behind)
    before, behind = _relative(before, total), _relative(behind, total)
    level_down, level_up = both_ways(groups, first, np.ones(m))
    path_down, path_up = both_ways(groups, first, work)
    walk, back, come = walks(groups, first)
    many = max(task.accelerators, 1)
    longest = float(np.max(before + behind, initial=0.0))
    ones = np.ones(m)
    columns = (
        np.log1p(_relative(work * m, total)),
        np.minimum(_relative(work * many, total), 2.0),
        np.log1p(_relative(groups.cpu_ms * m, total)),
        np.minimum(groups.size_bytes / max(task.memory_bytes, 1e-12), 2.0),
        np.log1p(_relative(groups.size_bytes * m, float(groups.size_bytes.sum()))),
        groups.supported.astype(np.float64),
        np.log1p(_relative(gives * m, total)),
        np.minimum(_relative(gives * many, total), 2.0),
        np.log1p(_relative(takes * m, total)),
        np.minimum(_relative(takes * many, total), 2.0),
        np.log1p(np.diff(groups.after_start)),
        np.log1p(np.diff(groups.before_start)),
        level_down,
        level_up,
        path_down,
        path_up,
        before,
        behind,
        1.0 - before - behind,
        walk,
        back,
        come,
        ones * task.accelerators / 8,
        ones * min(task.cpus, 4),
        ones * np.log1p(float(groups.flow_ms.sum()) / max(total, 1e-12)),
        ones
        * min(float(groups.size_bytes.sum()) / (many * task.memory_bytes + 1e-12), 2.0),
        ones * np.log1p(m) / 8,
        ones * longest,
        ones * np.log1p(len(groups.after) / max(m, 1)),
    )
    source = np.repeat(np.arange(m), np.diff(groups.after_start))
    return Observation(
        nodes=np.stack(columns, axis=1).astype(np.float32),
        priors=np.stack([-walk, -back, -path_down, path_up], axis=1).astype(np.float32),
        edges=np.stack([source, groups.after]),
    )
