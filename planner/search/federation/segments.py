"""Members as segments of an order of hosts, cut by an exact dynamic program.

A member trains ``rate`` samples a second if its share of the batch suits it, so that a
step of all members takes B / sum of rates, and an exchange every H steps

T = B / sum_m rate_m + 2 (C - 1)/C max_m owned_m / bandwidth_m / H

for C members that own ``owned`` bytes of weights a device. For one order of the hosts
the least T is found exactly: over each limit on the second part the best sum of rates
of C segments is a dynamic program. A host may be left out. Orders come from rules (ids,
links, speed, memory, connections), or from whoever asks, and are then improved by swaps
and moves.

Rates are those of closed forms (:meth:`planner.cost.CostModel.table_in_orders`), for
all segments of many orders at once; whoever asks plans the best divisions exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.search.base import Request, scores_of
from planner.search.device_order.groups import group_devices
from planner.search.device_order.screening import few_rows
from planner.space import StrategyTable, enumerate_meshes
from planner.units import dtype_bytes

__all__ = ["Division", "SegmentPricer", "best_divisions", "divide"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]
#: Hosts, ascending.
Segment = tuple[int, ...]

#: Stages a rank of the rows that stand for a segment.
_VIRTUAL = (1, 2)
#: Most limits on the exchange that are tried; with more values some are left out.
_LIMITS = 128
#: Rounds in which the best order is changed, and changes tried in each.
_ROUNDS, _CHANGES = 12, 12
#: Rows that are priced in one call.
_AT_ONCE = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Members of a fleet, by estimates.

    Attributes:
        members: Hosts of each, ascending; the member with the first host first.
        rates: Samples a second of each.
        step_time_s: A mean step, exchange included.
    """

    members: tuple[Segment, ...]
    rates: tuple[float, ...]
    step_time_s: float


class SegmentPricer:
    """Rate and exchange of segments by closed forms, each priced once.

    Args:
        request: Question about the whole fleet; its batch is that of all members.
        others: Pricer of segments with a host of ``lacking``, in another precision.
        lacking: Hosts whose devices do not compute in the request's.

    Attributes:
        request: The same.
        groups: Hosts with their free devices.
    """

    def __init__(
        self,
        request: Request,
        others: SegmentPricer | None = None,
        lacking: Collection[int] = (),
    ) -> None:
        self.request, self._context = request, request.context
        self._others, self._lacking = others, frozenset(lacking)
        self.groups = group_devices(request.context)
        self._model = CostModel(request.context)
        self._rows: dict[tuple[int, int], StrategyTable] = {}
        self._asked: dict[int, Request] = {}
        self._known: dict[Segment, tuple[float, float]] = {}
        context = request.context
        kinds = np.asarray(context.cluster.type_index)[self.groups.ids]
        self._peak = np.add.reduceat(
            context.facts.speed[kinds], self.groups.starts[:-1]
        )
        trained = sum(p.numel for p in context.graph.parameters if p.trainable)
        self._weight_bytes = trained * dtype_bytes(context.precision.parameter)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def batch(self) -> int:
        """Samples of a step over all members."""
        return self.request.global_batch

    def price(self, segments: Iterable[Segment]) -> None:
        """Price those of some segments that are not known yet."""
        new = [one for one in dict.fromkeys(segments) if one not in self._known]
        if self._others is not None:
            lacking = [one for one in new if self._lacking.intersection(one)]
            self._others.price(lacking)
            self._known.update((one, self._others.of(one)) for one in lacking)
            new = [one for one in new if one not in self._known]
        batch: list[tuple[Segment, StrategyTable]] = []
        size = 0
        for one in new:
            rows = self._rows_of(one)
            if not len(rows):
                self._known[one] = (0.0, np.inf)
                continue
            batch.append((one, rows))
            size += len(rows)
            if size > _AT_ONCE:
                self._price_rows(batch)
                batch, size = [], 0
        if batch:
            self._price_rows(batch)

    def of(self, segment: Segment) -> tuple[float, float]:
        """Samples a second, 0 if it does not hold the model; seconds of its exchange.

        The latter without the factor 2 (C - 1)/C, which depends on the others.
        """
        if segment not in self._known:
            self.price([segment])
        return self._known[segment]

    def _share(self, segment: Segment) -> int:
        """Samples that are about a segment's share, a power of two."""
        wanted = self.batch * self._peak[list(segment)].sum() / self._peak.sum()
        return int(min(2 ** round(np.log2(max(wanted, 1.0))), self.batch))

    def _rows_of(self, segment: Segment) -> StrategyTable:
        count = int(self.groups.sizes[list(segment)].sum())
        key = (count, self._share(segment))
        if key not in self._rows:
            samples = key[1]
            asked = self._asked.setdefault(
                samples, replace(self.request, global_batch=samples)
            )
            mesh = enumerate_meshes(asked.facts, count, asked.pins)
            parts = [few_rows(asked, mesh, virtual) for virtual in _VIRTUAL]
            self._rows[key] = StrategyTable.concatenate(parts)
        return self._rows[key]

    def _price_rows(self, batch: Sequence[tuple[Segment, StrategyTable]]) -> None:
        table = StrategyTable.concatenate([rows for _, rows in batch])
        counts = np.array([len(rows) for _, rows in batch])
        sizes = [int(self.groups.sizes[list(one)].sum()) for one, _ in batch]
        ids = np.full((len(batch), max(sizes)), -1, dtype=np.int64)
        for row, (segment, _) in enumerate(batch):
            ids[row, : sizes[row]] = self._order(segment)
        which = np.repeat(np.arange(len(batch)), counts)
        costs = self._model.table_in_orders(table, ids, which)
        score = scores_of(costs, table, "throughput")
        best = np.minimum.reduceat(score, np.cumsum(counts) - counts)
        for (segment, _), seconds in zip(batch, best.tolist(), strict=True):
            rate = self._share(segment) / seconds if np.isfinite(seconds) else 0.0
            self._known[segment] = (rate, self._exchange_s(segment))

    def _order(self, segment: Segment) -> Index:
        """Devices of a segment, hosts that are close to each other side by side."""
        groups, usable = self.groups, np.zeros(len(self.groups), dtype=bool)
        usable[list(segment)] = True
        seconds = groups.seconds()[np.ix_(segment, segment)]
        first = segment[int(seconds.sum(axis=1).argmin())]
        sequence = groups.by_links(first, usable)
        count = int(groups.sizes[list(segment)].sum())
        return np.asarray(groups.orders(sequence[None], count)[0])

    def _exchange_s(self, segment: Segment) -> float:
        """Seconds in which a device sends its part of the weights out of a segment."""
        outside = np.ones(len(self.groups), dtype=bool)
        outside[list(segment)] = False
        if not outside.any():
            return 0.0
        fastest = self.groups.bandwidth[list(segment)][:, outside].max(axis=1)
        devices = int(self.groups.sizes[list(segment)].sum())
        return float(self._weight_bytes / devices / fastest.min())


def best_divisions(
    rate: Array, exchange_s: Array, *, batch: int, period: int, most: int
) -> dict[int, tuple[float, tuple[tuple[int, int], ...]]]:
    """Cut an order into segments; the best cuts for each number of them, exactly.

    Args:
        rate: Samples a second of the segment from i up to, not including, j; 0 if it
            does not hold the model. Shape [n, n + 1].
        exchange_s: Seconds in which it sends its part of the weights. Shape [n, n + 1].
        batch: Samples of a step.
        period: Steps from one exchange to the next.
        most: Largest number of segments.

    Returns:
        Number of segments to the seconds of a mean step, and the segments in order.
        Places of the order that no segment has are left out. Empty if none fits.
    """
    count = len(rate)
    usable = rate > 0
    if not usable.any():
        return {}
    limits = np.unique(exchange_s[usable])
    if len(limits) > _LIMITS:
        limits = limits[np.linspace(0, len(limits) - 1, _LIMITS).round().astype(int)]
    gain = np.where(usable & (exchange_s <= limits[:, None, None]), rate, -np.inf)
    most = min(most, count)
    best = np.full((len(limits), most + 1, count + 1), -np.inf)
    best[:, 0] = 0.0
    start = np.full(best.shape, -1, dtype=np.int64)
    for stop in range(1, count + 1):
        reached = best[:, :-1, :stop] + gain[:, None, :stop, stop]
        first = reached.argmax(axis=2)
        value = np.take_along_axis(reached, first[:, :, None], axis=2)[:, :, 0]
        kept = best[:, 1:, stop - 1]
        best[:, 1:, stop] = np.maximum(kept, value)
        start[:, 1:, stop] = np.where(value > kept, first, -1)
    found = {}
    for members in range(1, most + 1):
        total = best[:, members, count]
        share = 2 * (members - 1) / members / period
        seconds = np.where(total > 0, batch / np.maximum(total, 1e-30), np.inf)
        seconds = seconds + share * limits
        row = int(seconds.argmin())
        if np.isfinite(seconds[row]):
            cuts = _cuts(start[row], members, count)
            found[members] = (float(seconds[row]), cuts)
    return found


def _cuts(start: Index, members: int, count: int) -> tuple[tuple[int, int], ...]:
    """Follow the choices back from the end."""
    cuts = []
    stop = count
    while members:
        first = int(start[members, stop])
        if first < 0:
            stop -= 1
            continue
        cuts.append((first, stop))
        members, stop = members - 1, first
    return tuple(reversed(cuts))


def divide(
    pricer: SegmentPricer,
    *,
    period: int,
    most: int,
    keep: int = 6,
    seed: int = 0,
    orders: Sequence[Index] | None = None,
    rounds: int = _ROUNDS,
) -> list[Division]:
    """Find divisions of a fleet into members, by estimates.

    Args:
        pricer: Of the fleet's hosts.
        period: Steps from one exchange to the next.
        most: Largest number of members.
        keep: Divisions to return at most.
        seed: Of the changes of orders.
        orders: Orders of all hosts to begin with; None for those of rules.
        rounds: Rounds of changes to the best order.

    Returns:
        The best, by their mean step; empty if no part of the fleet holds the model.
    """
    search = _OrderSearch(pricer, period=period, most=most)
    best = search.try_orders(_plain_orders(pricer) if orders is None else orders)
    random = np.random.default_rng(seed)
    for _ in range(rounds if len(pricer.groups) > 2 else 0):
        if best is None:
            break
        better = search.try_orders(_changed(best, random))
        best = best if better is None else better
    ranked = sorted(search.found.values(), key=lambda one: one.step_time_s)
    return ranked[:keep]


class _OrderSearch:
    """Divisions that were found in orders so far.

    Args:
        pricer: Of the fleet's hosts.
        period: Steps from one exchange to the next.
        most: Largest number of members.
    """

    def __init__(self, pricer: SegmentPricer, *, period: int, most: int) -> None:
        self._pricer, self._period, self._most = pricer, period, most
        self._least = np.inf
        self.found: dict[tuple[Segment, ...], Division] = {}

    def try_orders(self, orders: Sequence[Index]) -> Index | None:
        """Cut some orders; return the best, if it is better than all before."""
        self._pricer.price(segment for order in orders for segment in _segments(order))
        better = None
        for order in orders:
            seconds = self._cut(order)
            if seconds < self._least:
                better, self._least = order, seconds
        return better

    def _cut(self, order: Index) -> float:
        """Note the best division of each number of members; seconds of the best."""
        count = len(order)
        rate = np.zeros((count, count + 1))
        exchange_s = np.full((count, count + 1), np.inf)
        for start in range(count):
            for stop in range(start + 1, count + 1):
                segment = tuple(sorted(order[start:stop].tolist()))
                rate[start, stop], exchange_s[start, stop] = self._pricer.of(segment)
        least = np.inf
        cut = best_divisions(
            rate,
            exchange_s,
            batch=self._pricer.batch,
            period=self._period,
            most=self._most,
        )
        for seconds, cuts in cut.values():
            least = min(least, seconds)
            members = sorted(
                (tuple(sorted(order[a:b].tolist())), float(rate[a, b])) for a, b in cuts
            )
            key = tuple(segment for segment, _ in members)
            if key not in self.found or seconds < self.found[key].step_time_s:
                self.found[key] = Division(
                    members=key,
                    rates=tuple(each for _, each in members),
                    step_time_s=seconds,
                )
        return least


def _segments(order: Index) -> Iterable[Segment]:
    for start in range(len(order)):
        for stop in range(start + 1, len(order) + 1):
            yield tuple(sorted(order[start:stop].tolist()))


def _plain_orders(pricer: SegmentPricer) -> list[Index]:
    """Orders by rules: ids, links, and what hosts have most of."""
    groups = pricer.groups
    count = len(groups)
    types = pricer._context.cluster.device_types
    memory = np.array([kind.memory_bytes for kind in types])[groups.kinds]
    seconds = groups.seconds()
    off = np.where(np.eye(count, dtype=bool), 0.0, groups.bandwidth)
    central = int(seconds.sum(axis=1).argmin())
    found = [
        np.arange(count),
        groups.by_links(central),
        np.argsort(-pricer._peak, kind="stable"),
        np.argsort(-memory * groups.sizes, kind="stable"),
        np.argsort(-off.max(axis=1), kind="stable"),
        np.lexsort((-pricer._peak, -np.round(np.log10(off.max(axis=1) + 1.0)))),
    ]
    unique = {tuple(order.tolist()): order for order in found}
    return [np.asarray(order, dtype=np.int64) for order in unique.values()]


def _changed(order: Index, random: np.random.Generator) -> list[Index]:
    """Orders in which two places are swapped, or one moves."""
    changed = []
    for number in range(_CHANGES):
        one, other = random.choice(len(order), size=2, replace=False).tolist()
        if number % 2:
            new = np.insert(np.delete(order, one), other, order[one])
        else:
            new = order.copy()
            new[[one, other]] = new[[other, one]]
        changed.append(new)
    return changed
