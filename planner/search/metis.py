"""Splits of the device graph by METIS, the best of them searched exhaustively.

The graph's vertices are the hosts with free devices, its edges their bandwidths. METIS
cuts it into parts so that the edges between parts carry little bandwidth. Parts become
the stages of a pipeline, or each part a pipeline of its own with its replicas in the
others.

Source: Karypis and Kumar 1998, "A fast and high quality multilevel scheme for
    partitioning irregular graphs", SIAM J. Sci. Comput. 20(1).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.errors import MeshwrightError
from planner.search.base import Candidate, Request, SearchResult, finish, scores_of
from planner.search.budget import Budget
from planner.search.exhaustive import search_order
from planner.search.orders import device_orders
from planner.space import enumerate_strategies

__all__ = ["DeviceSplit", "MetisPartitioner", "device_splits"]

Index = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Largest weight of an edge; METIS takes integers.
_HEAVIEST = 10_000
#: Strategies to simulate over all splits without an evaluation budget.
_SIMULATED = 128
#: Splits whose strategies are simulated: the best by closed forms.
_SEARCHED = 6
#: Share of the time for pricing splits by closed forms.
_TRYING = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSplit:
    """An order of devices and the degrees that suit it.

    Attributes:
        order: Device id by rank. Shape [n].
        pins: Degrees, in addition to the request's pins.
    """

    order: Index
    pins: dict[str, int]


class MetisPartitioner:
    """Cuts the device graph by METIS, then searches the orders of its parts.

    Closed forms price the whole space of every order; the strategies of the most
    promising orders are cut exactly and simulated.

    It needs pymetis (``pip install 'meshwright[metis]'``).
    """

    name = "metis"

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`.

        Raises:
            MeshwrightError: If pymetis is not installed.
        """
        spending = Budget(request)
        tried: list[_Tried] = []
        for split in device_splits(request):
            if tried and spending.is_late(_TRYING):
                break
            tried.append(_Tried(request, split, spending))
        tried.sort(key=lambda one: one.best)
        best = tried[:_SEARCHED]
        candidates: list[Candidate] = []
        left = request.evaluation_budget or _SIMULATED
        for waiting, one in zip(range(len(best), 0, -1), best, strict=True):
            if left <= 0 or (candidates and spending.is_late()):
                break
            candidates += search_order(
                one.request, one.model, -(-left // waiting), spending.until
            )
            left -= one.model.evaluations["simulated"]
        models = [one.model for one in tried]
        return finish(self.name, request, models, candidates, spending.started)


class _Tried:
    """A split and its best score by closed forms; infinite if no strategy fits."""

    def __init__(self, request: Request, split: DeviceSplit, spending: Budget) -> None:
        self.request = replace(request, pins={**request.pins, **split.pins})
        self.model = CostModel(replace(request.context, order=split.order))
        self.best = math.inf
        for table in enumerate_strategies(
            self.request.facts, num_devices=len(split.order), pins=self.request.pins
        ):
            costs = self.model.table(table)
            lowest = scores_of(costs, table, request.objective).min()
            self.best = min(self.best, float(lowest))
            if math.isfinite(self.best) and spending.is_late(_TRYING):
                break


def device_splits(request: Request) -> list[DeviceSplit]:
    """Return the orders to search, each with the degrees that suit it.

    Devices are those of the exhaustive search: all free ones, or as many as a legal
    strategy can use, and each type alone. For each number of stages into which they
    divide, their hosts are cut into as many parts (into single hosts if there are
    fewer). For each number of replicas they are cut likewise, and a stage then takes
    its devices from every part.

    Raises:
        MeshwrightError: If pymetis is not installed.
    """
    splits = [
        split
        for devices in _device_sets(request)
        for split in _splits_of(_Hosts(request, devices), request.facts.num_units)
    ]
    allowed = [
        split
        for split in splits
        if all(
            request.pins.get(axis, size) == size for axis, size in split.pins.items()
        )
    ]
    limits = request.launcher_limits
    if limits is not None:
        # Cuts of the device graph seldom number ranks as a launcher does.
        plain = [DeviceSplit(order=order, pins={}) for order in device_orders(request)]
        expressible = [split for split in allowed if limits.allows_order(split.order)]
        allowed = [*expressible, *plain]
    unique = {(*s.pins.items(), *s.order.tolist()): s for s in allowed}
    return list(unique.values())


def _device_sets(request: Request) -> list[Index]:
    """The devices that exhaustive search would use, each set once, ids ascending."""
    found = {tuple(sorted(order.tolist())) for order in device_orders(request)}
    largest_first = sorted(found, key=lambda ids: (-len(ids), ids))
    return [np.array(ids, dtype=np.int64) for ids in largest_first]


def _splits_of(hosts: _Hosts, units: int) -> Iterator[DeviceSplit]:
    count = sum(len(members) for members in hosts.members)
    for parts in range(1, count + 1):
        if count % parts:
            continue
        if parts <= units:
            yield DeviceSplit(order=hosts.order(parts), pins={"pp": parts})
        yield from _replicated(hosts, count, parts, units)


def _replicated(
    hosts: _Hosts, count: int, parts: int, units: int
) -> Iterator[DeviceSplit]:
    """Each part a pipeline: ranks go through the parts, then along them."""
    if parts == 1 or parts > len(hosts.members):
        return
    for block in {1, hosts.block}:
        stages = count // (parts * block)
        if count % (parts * block) == 0 and 1 < stages <= units:
            grid = hosts.order(parts).reshape(parts, stages, block)
            order = grid.transpose(1, 0, 2).reshape(-1)
            yield DeviceSplit(order=order, pins={"pp": stages, "tp": block})


class _Hosts:
    """Hosts that have some of the devices, and the bandwidth between them.

    Attributes:
        members: Devices of each.
        block: Largest number by which the devices of every host divide.
    """

    def __init__(self, request: Request, devices: Index) -> None:
        cluster = request.context.cluster
        host = np.asarray(cluster.host_of_device)[devices]
        self.members = [devices[host == name] for name in np.unique(host)]
        self.block = math.gcd(*(len(members) for members in self.members))
        first = np.array([members[0] for members in self.members])
        there, _ = cluster.topology.links(first[:, None], first[None, :])
        self._bandwidth = np.minimum(there, there.T)
        self._metis = _pymetis()
        self._seed = request.seed % 2**31

    def order(self, parts: int) -> Index:
        """Devices part by part, neighbouring parts as well joined as can be found."""
        groups = self._cut(min(parts, len(self.members)))
        along = [groups[i] for i in _chain(self._between(groups))]
        return np.concatenate([self.members[host] for group in along for host in group])

    def _cut(self, parts: int) -> list[list[int]]:
        """Hosts of each part; parts that METIS left empty are left out."""
        count = len(self.members)
        if parts in {1, count}:
            every = range(count)
            return [[h] for h in every] if parts > 1 else [list(every)]
        off = ~np.eye(count, dtype=bool)
        top = self._bandwidth[off].max()
        weights = np.maximum(1, np.rint(self._bandwidth[off] / top * _HEAVIEST))
        adjacency = self._metis.CSRAdjacency(
            np.arange(0, count * (count - 1) + 1, count - 1),
            np.broadcast_to(np.arange(count), (count, count))[off],
        )
        found = self._metis.part_graph(
            parts,
            adjacency,
            eweights=weights.astype(np.int64),
            vweights=np.array([len(members) for members in self.members]),
            options=self._metis.Options(seed=self._seed),
        )
        part = np.asarray(found.vertex_part)
        return [np.flatnonzero(part == p).tolist() for p in np.unique(part)]

    def _between(self, groups: list[list[int]]) -> Floats:
        """Seconds a byte takes between two parts on their best link. Shape [p, p]."""
        slow = 1.0 / self._bandwidth
        rows = np.stack([slow[group].min(axis=0) for group in groups])
        return np.stack([rows[:, group].min(axis=1) for group in groups], axis=1)


def _chain(distance: Floats) -> list[int]:
    """A short open path through all points: nearest neighbour, from the best start."""
    count = len(distance)
    best: tuple[float, list[int]] = (math.inf, [])
    for start in range(count):
        left = distance.copy()
        left[:, start] = np.inf
        path, length = [start], 0.0
        for _ in range(count - 1):
            step = int(left[path[-1]].argmin())
            length += float(left[path[-1], step])
            left[:, step] = np.inf
            path.append(step)
        if length < best[0]:
            best = (length, path)
    return best[1]


def _pymetis() -> Any:
    try:
        return importlib.import_module("pymetis")
    except ImportError as error:
        raise MeshwrightError(
            "partitioner 'metis' needs pymetis, which is not installed; "
            "pip install 'meshwright[metis]' or choose another partitioner"
        ) from error
