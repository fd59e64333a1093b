"""A practitioner's rules of thumb as an ordered list of strategies.

Tensor parallelism inside a host and no further, as little of it as fits; a pipeline
across hosts only if sharding alone does not fit; all remaining devices data parallel,
ZeRO-sharded; recomputation only when memory asks for it; the largest microbatch that
keeps a pipeline's bubble small. Sources: Narayanan et al. 2021 (2104.04473),
takeaways 1 to 3; torchtitan and Megatron-LM example configurations.

Pins come first, the rules complete them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.schema.schedules import schedule_name, schedule_spec
from planner.search.base import Candidate, Request, SearchResult, finish
from planner.search.campaign import Campaign
from planner.search.moves import Solution
from planner.search.orders import device_orders
from planner.search.refine import candidates_of_row
from planner.space import (
    StrategyTable,
    enumerate_strategies,
    legal,
    with_expressible_streams,
    zero_fits,
)

__all__ = ["ExpertPartitioner", "ladder"]

_MOST_TRIES = 200
#: Rows over the memory limit that are tried, too: the closed form that excludes them is
#: not exact.
_OVER = 4
#: Rows of the whole space that are tried if no rule of thumb fits.
_WIDENED = 32

Index = NDArray[np.int64]
_RowsOf = Callable[[Request, CostModel], StrategyTable | None]
#: Microbatch sizes that are tried, largest first.
_SIZES = (8, 4, 2, 1)
#: Microbatches a stage that keep the bubble of a pipeline small.
_FILL = 4


class ExpertPartitioner:
    """Chooses the first strategy by rules of thumb that fits, and the few after it.

    Where no strategy of :func:`ladder` is legal and fits, the strategies of the whole
    space that depart least from the rules are tried, so that it finds a strategy
    whenever there is one.

    Args:
        keep: Fitting strategies to price before stopping.
        widen: False to leave out the whole space, which takes up to seconds and gives
            no answer half-way.
    """

    name = "expert"
    first_share = 0.03

    def __init__(self, keep: int = 3, *, widen: bool = True) -> None:
        self._keep = keep
        self._sources = (_by_the_rules, _widened) if widen else (_by_the_rules,)

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`."""
        started = time.perf_counter()
        models: list[CostModel] = []
        candidates: list[Candidate] = []
        left = request.evaluation_budget or _MOST_TRIES
        for order in device_orders(request):
            model = CostModel(replace(request.context, order=order))
            models.append(model)
            asked = replace(request, context=model.context)
            for rows in _rounds(asked, model, self._sources):
                keep = self._keep
                if request.time_budget_s is not None:
                    spent = time.perf_counter() - started
                    keep = keep if spent < request.time_budget_s else 1
                priced = _price(request, model, rows[:left], keep)
                left -= len(priced)
                candidates += priced
                if any(candidate.cost.fits for candidate in priced):
                    return finish(self.name, request, models, candidates, started)
        return finish(self.name, request, models, candidates, started)

    def contend(self, campaign: Campaign) -> Iterator[None]:
        """Take part in a race; see :class:`planner.search.race.Racer`.

        The rules of thumb alone: in a race others search the whole space.
        """
        for order in device_orders(campaign.request):
            model = campaign.model_of(order)
            asked = replace(campaign.request, context=model.context)
            table = _by_the_rules(asked, model)
            rows = [] if table is None else table.rows()
            campaign.price([Solution(order=order, row=row) for row in rows])
            yield
            fitting = 0
            for one in (Solution(order=order, row=row) for row in rows):
                if not campaign.may_fit(one) or campaign.was_simulated(one):
                    continue
                campaign.simulate(one)
                fitting += campaign.may_fit(one)
                yield
                if fitting == self._keep:
                    break
            if campaign.has_fit:
                return


def _price(
    request: Request, model: CostModel, rows: Sequence[dict[str, int]], keep: int
) -> list[Candidate]:
    """Price rows until ``keep`` of them fit."""
    priced: list[Candidate] = []
    fitting = 0
    for row in rows:
        if fitting == keep:
            break
        found = candidates_of_row(
            model, row, free_recompute=False, most=1, limits=request.launcher_limits
        )
        priced += found
        fitting += sum(one.cost.fits for one in found)
    return priced


def _rounds(
    request: Request, model: CostModel, sources: Sequence[_RowsOf]
) -> Iterator[list[dict[str, int]]]:
    """Yield rows to price: by the rules, else near the rules, else nearly fitting."""
    near_feasible: list[dict[str, int]] = []
    for rows_of in sources:
        table = rows_of(request, model)
        if table is None or not len(table):
            continue
        excess = model.table(table).excess_bytes
        yield [table.row(int(index)) for index in np.flatnonzero(excess <= 0)]
        over = np.flatnonzero(excess > 0)
        near_feasible += table[
            over[np.argsort(excess[over], kind="stable")[:_OVER]]
        ].rows()
    yield near_feasible


def _by_the_rules(request: Request, model: CostModel) -> StrategyTable | None:
    table = ladder(request, len(model.context.order))
    return table and table[np.flatnonzero(legal(table, request.facts))]


def _widened(request: Request, model: CostModel) -> StrategyTable | None:
    """Return the rows of the whole space that depart least from the rules."""
    host = _host_size(request)
    kept = [
        _least_departing(table, model, host)
        for table in enumerate_strategies(
            request.facts, num_devices=len(model.context.order), pins=request.pins
        )
    ]
    if not kept:
        return None
    return _least_departing(StrategyTable.concatenate(kept), model, host)


def _least_departing(
    table: StrategyTable, model: CostModel, host: int
) -> StrategyTable:
    """Return the rows that fit, in the order of the rules; then by their excess."""
    excess = np.maximum(model.table(table).excess_bytes, 0)
    order = np.lexsort((*reversed(_departures(table, host)), excess))
    return table[order[:_WIDENED]]


def _departures(table: StrategyTable, host: int) -> tuple[Index, ...]:
    """Measure departures of rows from the rules, the gravest first. Shapes [n]."""
    deep = table.pp > 1
    shallow = deep & (table.num_microbatches < _FILL * table.pp)
    return (
        table.cp * table.ep,
        np.maximum(table.tp // host, 1),
        table.pp * table.tp,
        table.pp,
        table.recompute,
        ((table.dp_replicate > 1) & (table.dp_shard > 1)).astype(np.int64),
        table.virtual_stages,
        table.zero_stage,
        (shallow & (table.microbatch_size > 1)).astype(np.int64),
        -table.microbatch_size,
    )


# -- The list of strategies ------------------------------------------------------


def _host_size(request: Request) -> int:
    """Return the number of devices on the request's largest host."""
    hosts = np.asarray(request.context.cluster.host_of_device)[request.context.order]
    return int(np.bincount(hosts).max())


def ladder(request: Request, devices: int) -> StrategyTable | None:
    """List strategies from the simplest to the most elaborate, legal or not.

    Args:
        request: The question; its pins hold in every row.
        devices: Number of devices to use, exactly.
    Returns:
        Rows in the order in which they are tried; None if the pinned degrees and counts
        do not divide the devices and the batch.
    """
    rows = list(_rungs(request, devices))
    if not rows:
        return None
    table = StrategyTable.from_columns(
        **{name: [row[name] for row in rows] for name in rows[0]}
    )
    if "sequence_parallel" in request.pins:
        return table
    return with_expressible_streams(table, request.facts)


def _rungs(request: Request, devices: int) -> Iterator[dict[str, int]]:
    pins, units = request.pins, request.facts.num_units
    inner = pins.get("cp", 1)
    tps = _pinned_or(pins, "tp", _divisors(devices, _host_size(request)))
    pps = _pinned_or(pins, "pp", _divisors(devices, units))
    meshes = sorted(
        ((pp, tp) for pp in pps for tp in tps if devices % (pp * tp * inner) == 0),
        key=lambda mesh: (mesh[0] * mesh[1], mesh[0]),
    )
    for pp, tp in meshes:
        for recompute in _pinned_or(pins, "recompute", [0, 1, 2]):
            for zero in _pinned_or(pins, "zero_stage", [0, 1, 2, 3]):
                replicas = _replicas(pins, devices // (pp * tp * inner), zero)
                if replicas is None:
                    continue
                for size, many in _microbatches(request, pp, replicas):
                    yield {
                        "pp": pp,
                        "dp_replicate": replicas[0],
                        "dp_shard": replicas[1],
                        "cp": inner,
                        "tp": tp,
                        "ep": pins.get("ep", 1),
                        "zero_stage": zero,
                        **_schedule(pins, pp, many),
                        "microbatch_size": size,
                        "num_microbatches": many,
                        "recompute": recompute,
                        "sequence_parallel": _sequence_parallel(request, tp),
                    }


def _divisors(number: int, limit: int) -> list[int]:
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


def _pinned_or(pins: Mapping[str, int], knob: str, values: list[int]) -> list[int]:
    return [pins[knob]] if knob in pins else values


def _replicas(
    pins: Mapping[str, int], degree: int, zero: int
) -> tuple[int, int] | None:
    """Return dp_replicate and dp_shard: all of one kind, unless a pin divides them."""
    shard = pins.get("dp_shard")
    if shard is None and "dp_replicate" in pins:
        shard = degree // pins["dp_replicate"]
    if shard is None:
        shard = degree if zero else 1
    replicate = pins.get("dp_replicate", degree // shard if shard else 0)
    fits_zero = zero_fits(zero, shard, pins.get("cp", 1))
    if replicate * shard != degree or not (fits_zero or "zero_stage" in pins):
        return None
    return replicate, shard


def _microbatches(
    request: Request, pp: int, replicas: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield size and number of microbatches, from the largest sensible size down."""
    pins = request.pins
    per_replica, rest = divmod(request.global_batch, replicas[0] * replicas[1])
    if rest:
        return
    if "num_microbatches" in pins:
        many = pins["num_microbatches"]
        size = pins.get("microbatch_size", max(1, per_replica // many))
        if size * many == per_replica:
            yield size, many
        return
    # Some models, such as those with batch norms, take nothing but whole batches.
    whole = [per_replica] if pp == 1 and per_replica not in _SIZES else []
    for size in _pinned_or(pins, "microbatch_size", [*_SIZES, *whole]):
        many = per_replica // size
        shallow = pp > 1 and many < _FILL * pp and size > 1
        if per_replica % size == 0 and ("microbatch_size" in pins or not shallow):
            yield size, many


def _schedule(pins: Mapping[str, int], pp: int, many: int) -> dict[str, int]:
    """Return 1F1B, unless another one is pinned or microbatches do not fill it."""
    virtual = pins.get("virtual_stages", 1)
    if "schedule" in pins:
        name = schedule_name(pins["schedule"])
    elif pp == 1 or (virtual == 1 and many < pp):
        name = "GPipe"
    else:
        name = "1F1B" if virtual == 1 else "Interleaved1F1B"
    spec = schedule_spec(name)
    return {
        "schedule": spec.code,
        "virtual_stages": pins.get("virtual_stages", spec.usual_virtual_stages),
    }


def _sequence_parallel(request: Request, tp: int) -> int:
    length = request.facts.seq_len
    parts = tp * request.pins.get("cp", 1)
    wanted = tp > 1 and length is not None and length % parts == 0
    wanted = wanted and request.facts.whole_stream is None
    return request.pins.get("sequence_parallel", int(wanted))
