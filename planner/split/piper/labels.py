"""Ways to run each suffix of a Piper task within a time per sample asked for.

A way is told by two numbers: the sum of its stages' data-parallel degrees, which says
how much the stages before it keep in flight, and the devices it takes. One that has as
much of both as another, or more, is of no use, so that few are kept of each suffix: a
stage is not slower with less in flight. (That options are chosen greedily does not
promise it, but no task was found where it fails.) Source: Tarnawski et al. 2021
(Piper), section 4, where a table holds the best time for every value of both instead.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.simulate.compiled import compiled, inlined
from planner.split.piper.stage import Flags, Layers, members, stage_time
from planner.split.piper.suffixes import Suffixes
from planner.split.task import Array, Index

__all__ = ["Limits", "Ways", "extend", "new_ways"]

_SLACK = 1e-9  # relative; bounds are sums taken in another order than times are


class Limits(NamedTuple):
    """What stages may be.

    Attributes:
        degrees: Tensor-parallel degrees. Shape [t].
        replicas: Data-parallel degrees, ascending. Shape [r].
        devices: There are so many.
        sums: Largest sum of data-parallel degrees.
        asked: Most time per sample.
    """

    degrees: Index
    replicas: Index
    devices: int
    sums: int
    asked: float


class Ways(NamedTuple):
    """Ways found so far.

    Attributes:
        many: How many, by suffix. Shape [s].
        sum: Of data-parallel degrees. Shape [s, most].
        used: Devices. Shape [s, most].
        rest: Suffix that the first stage leaves. Shape [s, most].
        way: The rest's own. Shape [s, most].
        degree: Place of the first stage's tensor-parallel degree. Shape [s, most].
        replicas: Place of its data-parallel degree. Shape [s, most].
        beyond: Least time above the one asked for that could let more in. Shape [1].
    """

    many: Index
    sum: Index
    used: Index
    rest: Index
    way: Index
    degree: Index
    replicas: Index
    beyond: Array


def new_ways(suffixes: int, most: int) -> Ways:
    """None but the empty one of the empty suffix, which is the first."""
    many = np.zeros(suffixes, dtype=np.int64)
    many[0] = 1
    sums, used, rest, way, degree, replicas = np.zeros(
        (6, suffixes, most), dtype=np.int64
    )
    return Ways(many, sums, used, rest, way, degree, replicas, np.full(1, np.inf))


@inlined
def _of_use(ways: Ways, at: int, total: int, used: int) -> bool:
    """Whether no way of a suffix has as little of both."""
    for k in range(ways.many[at]):
        if ways.sum[at, k] <= total and ways.used[at, k] <= used:
            return False
    return True


@inlined
def _keep(ways: Ways, at: int, total: int, used: int) -> int:
    """Make room for a way in place of those that have as much of both; its place."""
    kept = 0
    for k in range(ways.many[at]):
        if ways.sum[at, k] >= total and ways.used[at, k] >= used:
            continue
        if kept < k:
            ways.sum[at, kept] = ways.sum[at, k]
            ways.used[at, kept] = ways.used[at, k]
            ways.rest[at, kept] = ways.rest[at, k]
            ways.way[at, kept] = ways.way[at, k]
            ways.degree[at, kept] = ways.degree[at, k]
            ways.replicas[at, kept] = ways.replicas[at, k]
        kept += 1
    if kept < ways.sum.shape[1]:
        ways.many[at] = kept + 1
        ways.sum[at, kept] = total
        ways.used[at, kept] = used
        return kept
    return -1


@inlined
def _not_yet(beyond: Array, time: float) -> None:
    """Note a time that would let more in."""
    beyond[0] = min(beyond[0], time)


class _Stage(NamedTuple):
    """The layers between two suffixes, and their tensor-parallel degree.

    Attributes:
        whole: The larger suffix.
        rest: The smaller one.
        t: Place of the tensor-parallel degree.
        each: Fewest bytes for each microbatch in flight.
        once: Fewest bytes besides.
        need: Fewest devices for all layers before it.
    """

    whole: int
    rest: int
    t: int
    each: float
    once: float
    need: int


class _Scratch(NamedTuple):
    """Room to reckon in; see :func:`planner.split.piper.stage.stage_time`."""

    inside: Flags
    nodes: Index
    cost: Array
    held: Array
    chosen: Index


@inlined
def _first(
    layers: Layers,
    suffixes: Suffixes,
    limits: Limits,
    ways: Ways,
    p: int,
    stage: _Stage,
) -> int:
    """Place of the fewest replicas that may do; how many there are if none.

    With d replicas a stage takes at least ``alone / d + always (d - 1) / d``.
    """
    whole, rest, t = stage.whole, stage.rest, stage.t
    weight = suffixes.weight[whole, t] - suffixes.weight[rest, t]
    alone = suffixes.time[whole, t] - suffixes.time[rest, t]
    alone += suffixes.moved[p, t] / layers.bandwidth
    always = 4 * weight / layers.microbatches / layers.bandwidth
    asked = limits.asked * (1 + _SLACK)
    for r in range(len(limits.replicas)):
        d = limits.replicas[r]
        time = (alone + always * (d - 1)) / d
        if time <= asked:
            return r
        _not_yet(ways.beyond, time)
    return len(limits.replicas)


@inlined
def _put_before(
    layers: Layers,
    suffixes: Suffixes,
    limits: Limits,
    ways: Ways,
    scratch: _Scratch,
    stage: _Stage,
    begin: int,
) -> bool:
    """Put a stage before each way of the rest, on the fewest replicas that do.

    More replicas take more of both, so that the fewest are all that is wanted.

    Returns:
        Whether there was room.
    """
    whole, rest, t, nodes = stage.whole, stage.rest, stage.t, -1
    for k in range(ways.many[rest]):
        behind, taken = ways.sum[rest, k], ways.used[rest, k]
        for r in range(begin, len(limits.replicas)):
            d = limits.replicas[r]
            total = behind + d
            used = taken + limits.degrees[t] * d
            if total > limits.sums or not _of_use(ways, whole, total, used):
                break
            left = limits.devices - used
            if left < stage.need:
                if left > 0:
                    _not_yet(ways.beyond, suffixes.before[whole] / left)
                break
            flight = (total + d - 1) // d
            if (stage.each * flight + stage.once) * (1 - _SLACK) > layers.memory:
                continue
            if nodes < 0:
                one, other = suffixes.has[whole], suffixes.has[rest]
                nodes = members(one, other, scratch.inside, scratch.nodes)
            time = stage_time(
                layers,
                scratch.inside,
                scratch.nodes[:nodes],
                t,
                d,
                flight,
                scratch.cost,
                scratch.held,
                scratch.chosen,
            )
            if time > limits.asked or time == np.inf:
                _not_yet(ways.beyond, time)
                continue
            at = _keep(ways, whole, total, used)
            if at < 0:
                return False
            ways.rest[whole, at] = rest
            ways.way[whole, at] = k
            ways.degree[whole, at] = t
            ways.replicas[whole, at] = r
            break
    return True


@compiled
def extend(
    layers: Layers,
    suffixes: Suffixes,
    limits: Limits,
    ways: Ways,
    first: int,
    last: int,
) -> bool:
    """Put one stage before the ways of some suffixes.

    Args:
        layers: Of the task.
        suffixes: Of it.
        limits: Of stages.
        ways: Of the task; complete for all suffixes before ``last`` then.
        first: The first suffix.
        last: The one after the last.

    Returns:
        Whether there was room for all ways.
    """
    n, options = layers.time.shape[0], layers.time.shape[2]
    scratch = _Scratch(
        np.empty(n, dtype=np.int8),
        np.empty(n, dtype=np.int64),
        np.empty((n, options)),
        np.empty((n, options)),
        np.empty(n, dtype=np.int64),
    )
    for rest in range(first, last):
        if ways.many[rest] == 0:
            continue
        for p in range(suffixes.start[rest], suffixes.start[rest + 1]):
            whole = suffixes.whole[p]
            need = 0
            if 0 < limits.asked < np.inf:
                need = int(np.ceil(suffixes.before[whole] / limits.asked - _SLACK))
            for t in range(len(limits.degrees)):
                each = suffixes.each[whole, t] - suffixes.each[rest, t]
                once = suffixes.once[whole, t] - suffixes.once[rest, t]
                lacks = suffixes.lacking[whole, t] > suffixes.lacking[rest, t]
                if lacks or (each + once) * (1 - _SLACK) > layers.memory:
                    continue
                stage = _Stage(whole, rest, t, each, once, need)
                begin = _first(layers, suffixes, limits, ways, p, stage)
                if not _put_before(
                    layers, suffixes, limits, ways, scratch, stage, begin
                ):
                    return False
    return True
