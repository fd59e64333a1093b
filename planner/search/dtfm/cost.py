"""Communication cost of a grid of stages and replicas, after DT-FM.

COMM = max over groups of the time in which its members add up their gradients
     + the shortest open tour through the groups, where two groups are as far apart as
       the slowest pair of the fastest way to pair their members up.

Source: Yuan et al. 2022, DT-FM (2206.01288), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import ClusterError
from planner.simulate.compiled import compiled, copy_into, inner

__all__ = [
    "EXACT_GROUPS",
    "Communication",
    "Placement",
    "bottleneck_matching",
    "open_tour",
    "place",
    "seconds_of",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Most groups for an exact tour: time and memory double with each further group.
EXACT_GROUPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Seconds between any two devices.

    Attributes:
        dp_s: Seconds if both have the same stage and add up its gradients. [n, n].
        pp_s: Seconds if they have neighbouring stages of one pipeline. Shape [n, n].
        groups: Number of stages; each has n / groups devices.
    """

    dp_s: Array
    pp_s: Array
    groups: int

    @property
    def num_devices(self) -> int:
        """Number of devices, all of which are used."""
        return len(self.dp_s)

    @classmethod
    def between(
        cls,
        bandwidth_bytes_per_s: Array,
        latency_s: Array,
        *,
        dp_bytes: float,
        pp_bytes: float,
        groups: int,
    ) -> Communication:
        """Compute the seconds from links, with the mean of both directions.

        dp: 2 (latency + dp_bytes / members / bandwidth), a parameter server whose parts
        lie on the members; pp: 2 (latency + pp_bytes / bandwidth), forward and back.

        Args:
            bandwidth_bytes_per_s: Bandwidth; the diagonal is not read. Shape [n, n].
            latency_s: Latency; the diagonal is not read. Shape [n, n].
            dp_bytes: Bytes of the gradients of one stage.
            pp_bytes: Bytes that a device sends on in a step.
            groups: Number of stages.
        Raises:
            ClusterError: If the stages do not divide the devices.
        """
        count = len(bandwidth_bytes_per_s)
        if groups < 1 or count % groups:
            raise ClusterError(
                f"groups={groups} does not divide {count} devices; use a divisor"
            )
        speed = (bandwidth_bytes_per_s + bandwidth_bytes_per_s.T) / 2
        wait = (latency_s + latency_s.T) / 2
        speed, wait = speed.astype(np.float64), wait.astype(np.float64)
        np.fill_diagonal(speed, np.inf)
        np.fill_diagonal(wait, 0.0)
        members = count // groups
        return cls(
            dp_s=np.ascontiguousarray(2 * (wait + dp_bytes / members / speed)),
            pp_s=np.ascontiguousarray(2 * (wait + pp_bytes / speed)),
            groups=groups,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices as a grid of stages and replicas.

    Attributes:
        grid: Device of each stage and replica; columns are pipelines. Shape
            [groups, n / groups].
        dp_s: Seconds of the slowest group.
        pp_s: Seconds of the tour through the groups.
    """

    grid: Index
    dp_s: float
    pp_s: float

    @property
    def seconds(self) -> float:
        """COMM, which the search minimises."""
        return self.dp_s + self.pp_s


# -- The slowest pair of two groups ----------------------------------------------


@inner
def _augmented(
    weights: Array, limit: float, row: int, partner: Index, seen: NDArray[np.bool_]
) -> bool:
    """Find a column for ``row`` over edges up to ``limit``: Kuhn's augmenting path.

    Depth-first without recursion: ``column[d]`` is the column of the row at depth d.
    """
    members = len(weights)
    rows = np.empty(members + 1, dtype=np.int64)
    column = np.empty(members + 1, dtype=np.int64)
    rows[0], column[0], depth = row, -1, 0
    while depth >= 0:
        here = rows[depth]
        taken = column[depth] + 1
        while taken < members and (seen[taken] or weights[here, taken] > limit):
            taken += 1
        if taken == members:
            depth -= 1
            continue
        seen[taken] = True
        column[depth] = taken
        if partner[taken] < 0:
            while depth >= 0:
                partner[column[depth]] = rows[depth]
                depth -= 1
            return True
        depth += 1
        rows[depth], column[depth] = partner[taken], -1
    return False


@inner
def _is_perfect(weights: Array, limit: float, partner: Index) -> bool:
    """Return True if edges up to ``limit`` match all rows; fills ``partner``."""
    members = len(weights)
    partner[:] = -1
    seen = np.zeros(members, dtype=np.bool_)
    for row in range(members):
        seen[:] = False
        if not _augmented(weights, limit, row, partner, seen):
            return False
    return True


@compiled
def bottleneck_matching(weights: Array) -> tuple[float, Index]:
    """Find the perfect matching with the smallest largest weight.

    Bisection over the sorted weights, from the bound that each row and each column
    needs at least its own smallest.

    Args:
        weights: Weights between two groups of equal size. Shape [m, m].
    Returns:
        The largest weight used; and the column of each row. Shape [m].
    """
    members = len(weights)
    bound = -np.inf
    for member in range(members):
        bound = max(bound, weights[member].min(), weights[:, member].min())
    partner = np.empty(members, dtype=np.int64)
    limit = bound
    if not _is_perfect(weights, bound, partner):
        steps = np.unique(weights)
        low, high = int(np.searchsorted(steps, bound)) + 1, len(steps) - 1
        while low < high:
            middle = (low + high) // 2
            if _is_perfect(weights, steps[middle], partner):
                high = middle
            else:
                low = middle + 1
        limit = steps[low]
        _is_perfect(weights, limit, partner)
    column = np.empty(members, dtype=np.int64)
    for taken in range(members):
        column[partner[taken]] = taken
    return limit, column


# -- The tour through the groups -------------------------------------------------


@inner
def _held_karp(edges: Array) -> tuple[float, Index]:
    """Find the exact tour, over subsets and last groups. Source: Held and Karp 1962."""
    count = len(edges)
    best = np.full((1 << count, count), np.inf)
    before = np.full((1 << count, count), -1, dtype=np.int64)
    for group in range(count):
        best[1 << group, group] = 0.0
    for subset in range(1, 1 << count):
        for last in range(count):
            here = best[subset, last]
            if here == np.inf:
                continue
            for following in range(count):
                if subset >> following & 1:
                    continue
                grown = subset | 1 << following
                total = here + edges[last, following]
                if total < best[grown, following]:
                    best[grown, following] = total
                    before[grown, following] = last
    subset = (1 << count) - 1
    last = int(np.argmin(best[subset]))
    total = best[subset, last]
    path = np.empty(count, dtype=np.int64)
    for place in range(count - 1, -1, -1):
        path[place] = last
        subset, last = subset & ~(1 << last), before[subset, last]
    return total, path


@inner
def _length(edges: Array, path: Index) -> float:
    total = 0.0
    for place in range(1, len(path)):
        total += edges[path[place - 1], path[place]]
    return total


@inner
def _nearest_first(edges: Array, start: int) -> Index:
    """Return the path from ``start`` that always goes on to the nearest group left."""
    count = len(edges)
    left = np.ones(count, dtype=np.bool_)
    path = np.empty(count, dtype=np.int64)
    here = start
    for place in range(count):
        path[place] = here
        left[here] = False
        nearest = -1
        for group in range(count):
            if left[group] and (
                nearest < 0 or edges[here, group] < edges[here, nearest]
            ):
                nearest = group
        here = nearest
    return path


@inner
def _two_opt(edges: Array, path: Index) -> None:
    """Reverse runs of the path, in place, until none makes it shorter."""
    count = len(path)
    better = True
    while better:
        better = False
        for first in range(count - 1):
            for last in range(first + 1, count):
                change = 0.0
                if first > 0:
                    ahead = path[first - 1]
                    change += edges[ahead, path[last]] - edges[ahead, path[first]]
                if last < count - 1:
                    after = path[last + 1]
                    change += edges[path[first], after] - edges[path[last], after]
                if change < -1e-12 * (1.0 + abs(edges[path[first], path[last]])):
                    turned = path[first : last + 1][::-1].copy()
                    copy_into(path[first : last + 1], turned)
                    better = True


@compiled
def open_tour(edges: Array) -> tuple[float, Index]:
    """Find the shortest path through all groups, which does not return.

    Exact up to :data:`EXACT_GROUPS`; beyond, the best of nearest-first paths from
    every start, each improved by reversing runs.

    Args:
        edges: Symmetric distances. Shape [k, k].
    Returns:
        Its length, and the groups in order. Shape [k].
    """
    count = len(edges)
    if count <= EXACT_GROUPS:
        return _held_karp(edges)
    shortest, kept = np.inf, np.arange(count)
    for start in range(count):
        path = _nearest_first(edges, start)
        _two_opt(edges, path)
        length = _length(edges, path)
        if length < shortest:
            shortest, kept = length, path
    return shortest, kept


# -- Cost ------------------------------------------------------------------------


@inner
def _members(group: Index, groups: int) -> Index:
    """Return the devices of each group. Shape [groups, n / groups]."""
    found = np.empty((groups, len(group) // groups), dtype=np.int64)
    filled = np.zeros(groups, dtype=np.int64)
    for device in range(len(group)):
        here = group[device]
        found[here, filled[here]] = device
        filled[here] += 1
    return found


@inner
def _slowest_group(dp_s: Array, members: Index) -> float:
    slowest = 0.0
    for group in range(len(members)):
        for one in members[group]:
            total = 0.0
            for other in members[group]:
                if other != one:
                    total += dp_s[one, other]
            slowest = max(slowest, total)
    return slowest


@inner
def _pair_weights(pp_s: Array, one: Index, other: Index) -> Array:
    weights = np.empty((len(one), len(other)))
    for row in range(len(one)):
        for column in range(len(other)):
            weights[row, column] = pp_s[one[row], other[column]]
    return weights


@inner
def _distances(pp_s: Array, members: Index) -> Array:
    """Return the bottleneck between any two groups. Shape [groups, groups]."""
    groups = len(members)
    edges = np.zeros((groups, groups))
    for one in range(groups):
        for other in range(one + 1, groups):
            weights = _pair_weights(pp_s, members[one], members[other])
            edges[one, other] = bottleneck_matching(weights)[0]
            edges[other, one] = edges[one, other]
    return edges


@compiled
def seconds_of(dp_s: Array, pp_s: Array, group: Index, groups: int) -> float:
    """Return COMM of a division of devices into groups of equal size.

    Args:
        dp_s: As in :class:`Communication`.
        pp_s: As in :class:`Communication`.
        group: Group of each device. Shape [n].
        groups: Number of groups.
    """
    members = _members(group, groups)
    tour = open_tour(_distances(pp_s, members))[0]
    return _slowest_group(dp_s, members) + tour


@compiled
def _laid_out(
    dp_s: Array, pp_s: Array, group: Index, groups: int
) -> tuple[Index, float, float]:
    members = _members(group, groups)
    tour, path = open_tour(_distances(pp_s, members))
    grid = np.empty_like(members)
    grid[0] = members[path[0]]
    for stage in range(1, groups):
        following = members[path[stage]]
        weights = _pair_weights(pp_s, grid[stage - 1], following)
        grid[stage] = following[bottleneck_matching(weights)[1]]
    return grid, _slowest_group(dp_s, members), tour


def place(communication: Communication, group: Index) -> Placement:
    """Put groups in the order of their tour, and their members into pipelines.

    Args:
        communication: Seconds between devices.
        group: Group of each device, from 0; groups are of equal size. Shape [n].
    Raises:
        ClusterError: If groups are not of equal size.
    """
    sizes = np.bincount(group, minlength=communication.groups)
    if (sizes * communication.groups != communication.num_devices).any():
        raise ClusterError(
            f"groups of {sizes.tolist()} devices; {communication.num_devices} devices "
            f"need {communication.groups} groups of one size"
        )
    grid, dp_s, pp_s = _laid_out(
        communication.dp_s,
        communication.pp_s,
        np.ascontiguousarray(group, dtype=np.int64),
        communication.groups,
    )
    return Placement(grid=grid, dp_s=float(dp_s), pp_s=float(pp_s))
