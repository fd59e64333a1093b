"""The memetic search of DT-FM for a division of devices into groups.

A genetic algorithm that improves offspring by a local search: cycles of moves from
group to group, where a device gains by the seconds between groups less those of its
fastest link inside its group. Sources: Yuan et al. 2022, DT-FM (2206.01288), section
3.3; Kang and Moon 2000, A hybrid genetic algorithm for multiway graph partitioning.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.dtfm.cost import Communication, Placement, place, seconds_of
from planner.simulate.compiled import compiled, copy_into, inner

__all__ = ["MemeticResult", "memetic_search"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Points of crossover between two parents.
_POINTS = 5
#: Every fourth offspring has two devices swapped instead of the local search, which
#: does not minimise COMM itself and cannot reach every division.
_PLAIN = 4
#: Most cycles of moves in a local search.
_CYCLES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class MemeticResult:
    """Best division that the search found.

    Attributes:
        best: The best placement.
        found_at: Number of trials (divisions priced) when it was found.
        trials: Number of all trials.
        population: Group of each device in the final population, best first. Shape
            [population, n].
    """

    best: Placement
    found_at: int
    trials: int
    population: Index


@inner
def _group_sums(pp_s: Array, group: Index, groups: int) -> Array:
    """Return the sum of seconds from each device to each group. Shape [n, groups]."""
    sums = np.zeros((len(group), groups))
    for device in range(len(group)):
        for other in range(len(group)):
            if other != device:
                sums[device, group[other]] += pp_s[device, other]
    return sums


@inner
def _move(
    pp_s: Array, group: Index, sizes: Index, sums: Array, device: int, target: int
) -> None:
    source = group[device]
    for other in range(len(group)):
        if other != device:
            sums[other, source] -= pp_s[other, device]
            sums[other, target] += pp_s[other, device]
    group[device] = target
    sizes[source] -= 1
    sizes[target] += 1


@inner
def _best_move(
    pp_s: Array,
    group: Index,
    sizes: Index,
    sums: Array,
    moved: NDArray[np.bool_],
    source: int,
    targets: NDArray[np.bool_],
) -> tuple[float, int, int]:
    """Return the greatest gain of a move of an unmoved device out of ``source``.

    The gain is the mean seconds to the target group less those of the fastest link
    inside ``source``, because that link will lie between groups.
    """
    best, device, target = -np.inf, -1, -1
    for one in range(len(group)):
        if group[one] != source or moved[one]:
            continue
        fastest = np.inf
        for other in range(len(group)):
            if group[other] == source and other != one:
                fastest = min(fastest, pp_s[one, other])
        if fastest == np.inf:
            fastest = 0.0
        for to in range(len(sizes)):
            if targets[to] and to != source:
                gain = sums[one, to] / max(sizes[to], 1) - fastest
                if gain > best:
                    best, device, target = gain, one, to
    return best, device, target


@inner
def _improve_by_cycle(
    pp_s: Array, group: Index, sums: Array, groups: int, start: int
) -> bool:
    """Move devices along a cycle of groups through ``start``, up to the best gain.

    Changes ``group`` and ``sums`` in place if there is a gain.
    """
    trial, added = group.copy(), sums.copy()
    sizes = np.full(groups, len(group) // groups)
    moved = np.zeros(len(group), dtype=np.bool_)
    unseen = np.ones(groups, dtype=np.bool_)
    home = np.zeros(groups, dtype=np.bool_)
    home[start], unseen[start] = True, False
    least = 1e-9 * np.abs(pp_s).max()
    best, total, source = least, 0.0, start
    kept = group.copy()
    for _ in range(groups - 1):
        gain, device, target = _best_move(
            pp_s, trial, sizes, added, moved, source, unseen
        )
        if device < 0:
            break
        _move(pp_s, trial, sizes, added, device, target)
        moved[device], unseen[target] = True, False
        total += gain
        source = target
        back, last, _ = _best_move(pp_s, trial, sizes, added, moved, source, home)
        if last >= 0 and total + back > best:
            best = total + back
            copy_into(kept, trial)
            kept[last] = start
    if best <= least:
        return False
    for device in range(len(group)):
        if kept[device] != group[device]:
            _move(pp_s, group, sizes, sums, device, kept[device])
    return True


@inner
def _local_search(pp_s: Array, group: Index, groups: int, first: int) -> None:
    """Try cycles from one group after another until a whole round gains nothing."""
    sums = _group_sums(pp_s, group, groups)
    idle, start = 0, first
    for _ in range(_CYCLES):
        gained = _improve_by_cycle(pp_s, group, sums, groups, start)
        idle = 0 if gained else idle + 1
        if idle == groups:
            return
        start = (start + 1) % groups


@inner
def _relabelled(group: Index, like: Index, groups: int) -> Index:
    """Rename the groups of a division so that it shares most devices with another."""
    shared = np.zeros((groups, groups), dtype=np.int64)
    for device in range(len(group)):
        shared[group[device], like[device]] += 1
    names = np.full(groups, -1, dtype=np.int64)
    for _ in range(groups):
        place_of_most = int(np.argmax(shared))
        one, other = place_of_most // groups, place_of_most % groups
        names[one] = other
        shared[one] = -1
        shared[:, other] = -1
    return names[group]


@inner
def _repair(group: Index, groups: int, keys: Array) -> None:
    """Move devices with the lowest keys out of groups that are too large, in place."""
    size = len(group) // groups
    sizes = np.zeros(groups, dtype=np.int64)
    for device in range(len(group)):
        sizes[group[device]] += 1
    needy = 0
    for device in np.argsort(keys):
        if sizes[group[device]] > size:
            while sizes[needy] >= size:
                needy += 1
            sizes[group[device]] -= 1
            sizes[needy] += 1
            group[device] = needy


@compiled
def _offspring(
    one: Index,
    other: Index,
    points: Index,
    keys: Array,
    pp_s: Array,
    groups: int,
    improved: bool,
) -> Index:
    """Cross two parents and repair the child; then improve it, or swap two devices."""
    second = _relabelled(other, one, groups)
    child = np.empty_like(one)
    piece = 0
    for device in range(len(one)):
        while piece < len(points) and device >= points[piece]:
            piece += 1
        child[device] = one[device] if piece % 2 == 0 else second[device]
    _repair(child, groups, keys)
    if improved:
        _local_search(pp_s, child, groups, int(keys[0] * groups))
    else:
        first, last = int(np.argmin(keys)), int(np.argmax(keys))
        child[first], child[last] = child[last], child[first]
    return child


@compiled
def _same_division(one: Index, other: Index, groups: int) -> bool:
    """Return True if two divisions differ in the names of their groups alone."""
    names = np.full(groups, -1, dtype=np.int64)
    for device in range(len(one)):
        if names[one[device]] < 0:
            names[one[device]] = other[device]
        elif names[one[device]] != other[device]:
            return False
    return True


def memetic_search(
    communication: Communication,
    *,
    population: int = 100,
    offspring: int = 4900,
    seed: int | np.random.Generator = 0,
    initial: Index | None = None,
    until: float | None = None,
) -> MemeticResult:
    """Divide devices into groups so that COMM is small.

    Args:
        communication: Seconds between devices; all devices are used.
        population: Number of random divisions to begin with.
        offspring: Number of children, made one after the other; each replaces the worse
            of its parents unless it is worse still.
        seed: Seed of all random draws.
        initial: Divisions to begin with in place of random ones: group of each device.
            Shape [any, n].
        until: ``time.perf_counter`` after which no more children are made; None for no
            limit.
    """
    rng = np.random.default_rng(seed)
    count, groups = communication.num_devices, communication.groups
    dp_s, pp_s = communication.dp_s, communication.pp_s
    slots = np.repeat(np.arange(groups, dtype=np.int64), count // groups)
    divisions = np.stack([rng.permutation(slots) for _ in range(max(population, 2))])
    if initial is not None:
        divisions[: len(initial)] = initial[: len(divisions)]
    costs = np.array(
        [seconds_of(dp_s, pp_s, division, groups) for division in divisions]
    )
    best, found_at = float(costs.min()), int(costs.argmin()) + 1
    made = 0
    for trial in range(offspring):
        if until is not None and time.perf_counter() >= until:
            break
        made = trial + 1
        one, other = rng.choice(len(divisions), size=2, replace=False)
        points = np.sort(rng.integers(1, max(count, 2), size=_POINTS))
        child = _offspring(
            divisions[one],
            divisions[other],
            points,
            rng.random(count),
            pp_s,
            groups,
            trial % _PLAIN > 0,
        )
        cost = float(seconds_of(dp_s, pp_s, child, groups))
        worse, better = (one, other) if costs[one] >= costs[other] else (other, one)
        if cost <= costs[worse] and not _same_division(
            child, divisions[better], groups
        ):
            divisions[worse], costs[worse] = child, cost
        if cost < best:
            best, found_at = cost, len(divisions) + trial + 1
    divisions = divisions[np.argsort(costs, kind="stable")]
    return MemeticResult(
        best=place(communication, divisions[0]),
        found_at=found_at,
        trials=len(divisions) + made,
        population=divisions,
    )
