"""DT-FM's scheduling as a partitioner: stages over devices by communication alone.

Source: Yuan et al. 2022, "Decentralized Training of Foundation Models in Heterogeneous
    Environments", DT-FM (2206.01288), section 3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.search.base import Candidate, Request, SearchResult, finish, scores_of
from planner.search.budget import SIMULATIONS, Budget
from planner.search.dtfm.cost import Communication, place
from planner.search.dtfm.search import memetic_search
from planner.search.exhaustive import search_order
from planner.search.orders import device_orders
from planner.space import enumerate_strategies
from planner.units import dtype_bytes

__all__ = ["DtfmPartitioner", "communication_between", "stage_bytes"]

Index = NDArray[np.int64]

#: Divisions that the search begins with, and children, as published.
_POPULATION, _OFFSPRING = 100, 4900
#: Degrees of the paper's grid of stages and replicas; pins may ask for others.
_GRID = {"tp": 1, "cp": 1, "ep": 1}
#: Share of a time budget for the genetic algorithm; the rest is for prices.
_DIVIDING = 0.7
#: Most pieces that are divided; of more devices, neighbours stay together.
_MOST_PIECES = 128


class DtfmPartitioner:
    """Divides devices into stages by DT-FM's genetic algorithm, as a baseline.

    The published scheduler knows links alone: it minimises the seconds in which the
    slowest stage adds up its gradients, plus those of the shortest open tour through
    the stages. The number of stages is given to it. Here every number is tried that
    divides the devices, and cuts, microbatches, schedule, ZeRO and recomputation are
    searched under the order that it gives, as the exhaustive partitioner does. All
    devices are used, without tp, cp and ep unless pins ask for them.
    """

    name = "dtfm"

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`."""
        spending = Budget(request)
        rng = np.random.default_rng(request.seed)
        tried: list[_Tried] = []
        # Some pins have no legal row without tp, cp or ep: the first that has one.
        grids = list(_grids(request, _GRID)) or list(_grids(request, {}))
        for done, grid in enumerate(grids):
            if tried and spending.is_late(_DIVIDING):
                break
            # An equal part of what is left of the time for each grid.
            until = None
            if request.time_budget_s is not None:
                now, end = time.perf_counter(), request.time_budget_s * _DIVIDING
                until = now + (spending.started + end - now) / (len(grids) - done)
            tried.append(_Tried(request, grid, _divided(request, grid, rng, until)))
        tried.sort(key=lambda one: one.best)
        candidates: list[Candidate] = []
        left = request.evaluation_budget or SIMULATIONS
        for waiting, one in zip(range(len(tried), 0, -1), tried, strict=True):
            if left <= 0 or (candidates and spending.is_late()):
                break
            candidates += search_order(
                one.request, one.model, -(-left // waiting), spending.until
            )
            left -= one.model.evaluations["simulated"]
        models = [one.model for one in tried]
        return finish(self.name, request, models, candidates, spending.started)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Devices that are used, and the degrees that are laid over them.

    Attributes:
        devices: Device ids. Shape [ranks].
        pins: Columns of the strategy table that are fixed, pp among them.
        row: A legal row with these degrees.
    """

    devices: Index
    pins: Mapping[str, int]
    row: Mapping[str, int]


class _Tried:
    """A grid over divided devices, and its best score by closed forms.

    Args:
        request: The question.
        grid: Degrees.
        order: Device of each rank. Shape [ranks].
    """

    def __init__(self, request: Request, grid: _Grid, order: Index) -> None:
        self.request = replace(request, pins=grid.pins)
        self.model = CostModel(request.context.reordered(order))
        self.best = math.inf
        for table in enumerate_strategies(
            request.facts, num_devices=len(order), pins=grid.pins
        ):
            scores = scores_of(self.model.table(table), table, request.objective)
            self.best = min(self.best, float(scores.min()))


def _grids(request: Request, degrees: Mapping[str, int]) -> Iterator[_Grid]:
    """Yield every number of stages over every set of devices that has a legal row.

    Args:
        request: The question.
        degrees: Those that are fixed where it pins none.
    """
    fixed = {**degrees, **request.pins}
    seen = set()
    for order in device_orders(request):
        devices = np.sort(order) if request.launcher_limits is None else order
        if devices.tobytes() in seen:
            continue
        seen.add(devices.tobytes())
        for pp in range(1, min(request.facts.num_units, len(order)) + 1):
            pins = {**fixed, "pp": pp}
            if len(order) % pp or request.pins.get("pp", pp) != pp:
                continue
            tables = enumerate_strategies(
                request.facts, num_devices=len(order), pins=pins
            )
            for table in tables:
                row = table.row(0)
                pins |= {axis: row[axis] for axis in _GRID}
                yield _Grid(devices=devices, pins=pins, row=row)
                break


def _divided(
    request: Request, grid: _Grid, rng: np.random.Generator, until: float | None
) -> Index:
    """Return the device of each rank with the least communication that was found."""
    row, devices = grid.row, grid.devices
    if row["pp"] == 1:
        return devices
    stage = len(devices) // row["pp"]
    size = next(
        size
        for size in range(row["tp"] * row["cp"], stage + 1)
        if stage % size == 0
        and size % (row["tp"] * row["cp"]) == 0
        and (len(devices) // size <= _MOST_PIECES or size == stage)
    )
    pieces = devices.reshape(-1, size)
    dp_bytes, pp_bytes = stage_bytes(CostModel(request.context.reordered(devices)), row)
    made = communication_between(
        request, pieces, dp_bytes=dp_bytes, pp_bytes=pp_bytes, groups=row["pp"]
    )
    if stage == size:
        best = place(made, np.arange(row["pp"], dtype=np.int64))
    else:
        best = memetic_search(
            made,
            population=_POPULATION,
            offspring=_OFFSPRING,
            seed=rng,
            until=until,
        ).best
    order = np.ascontiguousarray(pieces[best.grid.reshape(-1)].reshape(-1))
    limits = request.launcher_limits
    return order if limits is None or limits.allows_order(order) else devices


# -- Bytes and seconds of a grid -------------------------------------------------


def stage_bytes(model: CostModel, row: Mapping[str, int]) -> tuple[float, float]:
    """Return the bytes of a stage's gradients, and those it sends on in a step.

    Args:
        model: Cost model of the devices.
        row: A row of a :class:`planner.space.StrategyTable`.
    Returns:
        Mean bytes of the stages' gradients; mean bytes between neighbouring stages of
        one pipeline, forward, over all microbatches.
    """
    costs = model.unit_costs(
        tp=row["tp"],
        cp=row["cp"],
        ep=row["ep"],
        microbatch=row["microbatch_size"],
        sequence_parallel=bool(row["sequence_parallel"]),
    )
    scalars = float((costs.trained_dense + costs.trained_experts).sum()) / row["pp"]
    sent = float(costs.sent_bytes.mean()) if costs.sent_bytes.size else 0.0
    reduced = dtype_bytes(model.context.precision.reduce)
    return scalars * reduced, sent * row["num_microbatches"]


def communication_between(
    request: Request,
    pieces: Index,
    *,
    dp_bytes: float,
    pp_bytes: float,
    groups: int,
) -> Communication:
    """Compute the seconds between pieces, over the slowest link of each two.

    Args:
        request: The question, with its machines.
        pieces: Device ids of each piece. Shape [pieces, devices of a piece].
        dp_bytes: Bytes of the gradients of one stage.
        pp_bytes: Bytes that a device sends on in a step.
        groups: Number of stages.
    """
    topology = request.context.cluster.topology
    links = topology.links(pieces[:, None, :], pieces[None, :, :])
    return Communication.between(
        np.where(np.isinf(links[0]), 1e30, links[0]).min(axis=-1),
        links[1].max(axis=-1),
        dp_bytes=dp_bytes,
        pp_bytes=pp_bytes,
        groups=groups,
    )
