"""Candidates of a row of the strategy table: exact cuts, priced by the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel, PricingContext
from planner.cost.table.cuts import balanced_bounds
from planner.cost.traffic.layers import context_algorithms
from planner.cost.units import UnitCosts
from planner.schema import Recompute, Strategy
from planner.schema.schedules import schedule_name, schedule_spec
from planner.schema.strategy_parts import ContextAlgorithm
from planner.search.base import Candidate, Request
from planner.search.launcher_limits import LauncherLimits, rank_ranges
from planner.search.stages import Cut, best_cut
from planner.simulate import actions
from planner.space import (
    RECOMPUTE_NAMES,
    StrategyTable,
    build_strategy,
    legal,
    skeleton,
)

__all__ = ["ExactPricer", "candidates_of_row", "schedule_variants"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Most units for exact cuts: the tables of all runs of units grow with their square.
#: Models that are captured have at most 256 units; profiles may have thousands.
_MOST_UNITS = 512


def _even_cut(
    context: PricingContext, bare: Strategy, costs: UnitCosts, kind: int
) -> Cut:
    """Return the cut into stages of equal time, with the same recomputation.

    Where ranks have several stages, those of a rank take as long as those of another.
    """
    stages = bare.mesh.pp * bare.virtual_stages
    rank = np.array(bare.stage_ranks)
    types = context.types_of_ranks(bare.mesh.pp)[rank]
    work = _seconds(costs)
    bounds = balanced_bounds(
        work, np.zeros(1, dtype=np.int64), types[None, :], np.array([stages])
    )[0]
    if bare.virtual_stages > 1:
        seconds = work[types, 0]
        bounds = _evened_ranks(bounds, np.cumsum(seconds, axis=1), rank)
    name: Recompute = RECOMPUTE_NAMES[kind]
    return Cut(bounds=tuple(int(b) for b in bounds), recompute=(name,) * stages)


def _seconds(costs: UnitCosts) -> Array:
    """Return the seconds of forward and backward of units. Shape [types, 1, units]."""
    shared = 2 * costs.tp_s + costs.cp_s + 2 * costs.ep_s
    return costs.forward_s + costs.backward_s + shared


def _evened_ranks(bounds: Index, sums: Array, rank: Index) -> Index:
    """Move units between stages as long as the slowest rank gets faster.

    A move takes a unit from a stage of the slowest rank to one of the fastest: all
    boundaries between them shift by one.

    Args:
        bounds: Unit at which each stage starts, then the number of units.
        sums: Seconds of the units up to each, on each stage's device.
            Shape [stages, units].
        rank: Rank of each stage. Shape [stages].
    """
    stage = np.arange(len(rank))
    sums = np.concatenate([np.zeros((len(rank), 1)), sums], axis=1)

    def loads(cut: Index) -> Array:
        seconds = sums[stage, cut[1:]] - sums[stage, cut[:-1]]
        return np.bincount(rank, seconds).astype(np.float64)

    best = loads(bounds)
    while True:
        slow, fast = (np.flatnonzero(rank == r) for r in (best.argmax(), best.argmin()))
        moved = [_shifted(bounds, int(a), int(b)) for a in slow for b in fast]
        moved = [cut for cut in moved if (np.diff(cut) > 0).all()]
        found = [loads(cut) for cut in moved]
        if not found:
            return bounds
        least = min(range(len(found)), key=lambda at: float(found[at].max()))
        if found[least].max() >= best.max() * (1 - 1e-9):
            return bounds
        bounds, best = moved[least], found[least]


def _shifted(bounds: Index, source: int, target: int) -> Index:
    """Return the cut with one unit less in a stage and one more in another."""
    cut = bounds.copy()
    if source < target:
        cut[source + 1 : target + 1] -= 1
    else:
        cut[target + 1 : source + 1] += 1
    return cut


def _cuts(
    model: CostModel,
    row: Mapping[str, int],
    costs: UnitCosts,
    *,
    free_recompute: bool,
    limits: LauncherLimits | None,
) -> Iterator[Cut]:
    """Yield the exact cut, the evenly timed one, and for launchers the even layers."""
    bare, context = skeleton(row), model.context
    seen = set()
    even = _even_cut(context, bare, costs, row["recompute"])
    found = [even]
    if row["pp"] > 1 and len(context.graph.units) <= _MOST_UNITS:
        table = actions(
            schedule_name(row["schedule"]),
            row["pp"],
            row["virtual_stages"],
            row["num_microbatches"],
        )
        mixed = free_recompute and not bare.schedule_spec.splits_backward
        if limits is not None:
            mixed = mixed and limits.mixes_recompute
        kinds = (0, 1, 2) if mixed else (row["recompute"],)
        # A split backward goes with no recomputation on torch (selective raises, full
        # runs several times): stages are not mixed under those schedules.
        exact = best_cut(context, bare, costs, table, kinds=kinds)
        found = [exact, even] if exact else [even]
    if row["pp"] > 1 and limits is not None:
        known = limits.even_bounds(row["pp"] * row["virtual_stages"])
        layers = [Cut(bounds=known, recompute=even.recompute)] if known else []
        found = layers if limits.target.even_layers else [*found, *layers]
    for cut in found:
        key = (cut.bounds, cut.recompute)
        if key not in seen:
            seen.add(key)
            yield cut


def candidates_of_row(
    model: CostModel,
    row: Mapping[str, int],
    *,
    free_recompute: bool = True,
    most: int = 2,
    spare: int = 0,
    limits: LauncherLimits | None = None,
) -> list[Candidate]:
    """Price a row with its exact cut and, if different, the evenly timed one.

    For a launcher the cut into equally many layers comes after them, or alone. Where cp
    divides the sequence, all cuts are priced with the algorithm under which the units
    take less time, and then with the other one.

    Args:
        model: Cost model under the order of devices; counts the evaluations.
        row: A row of a :class:`planner.space.StrategyTable`.
        free_recompute: Whether each stage may choose its own recomputation.
        most: Most candidates to price.
        spare: Further candidates to price while none of them fits.
        limits: Limits of the request's launcher; other cuts are left out.

    Returns:
        Empty if the launcher cannot express any cut, or not these devices.
    """
    context = model.context
    if limits is not None and not limits.allows_order(context.order):
        return []
    units = {
        algorithm: model.unit_costs(
            tp=row["tp"],
            cp=row["cp"],
            ep=row["ep"],
            microbatch=row["microbatch_size"],
            sequence_parallel=bool(row["sequence_parallel"]),
            context_algorithm=algorithm,
        )
        for algorithm in context_algorithms(context.graph, cp=row["cp"], tp=row["tp"])
    }
    types = np.unique(context.types_of_ranks(row["pp"]))
    algorithms = sorted(units, key=lambda one: float(_seconds(units[one])[types].sum()))
    costs = units[algorithms[0]]
    cuts = list(_cuts(model, row, costs, free_recompute=free_recompute, limits=limits))
    pairs = ((cut, one) for one in algorithms for cut in cuts)
    every = (one for pair in pairs for one in _priced(model, row, *pair, limits))
    found = list(islice(every, most))
    for _ in range(spare):
        if any(one.cost.fits for one in found):
            break
        found += islice(every, 1)
    return found


def _priced(
    model: CostModel,
    row: Mapping[str, int],
    cut: Cut,
    algorithm: ContextAlgorithm,
    limits: LauncherLimits | None,
) -> Iterator[Candidate]:
    """Yield a cut's candidate under an algorithm, if the launcher can express it."""
    context = model.context
    strategy = build_strategy(
        row,
        unit_names=context.graph.unit_names,
        bounds=cut.bounds,
        recompute=cut.recompute,
        sharding=context.graph.sharding,
        precision=context.precision,
        optimizer=context.optimizer,
        grad_clip_norm=context.grad_clip_norm,
        regime=context.regime,
        device_ranges=rank_ranges(context.order),
        context=algorithm,
        spatial=context.graph.spatial,
    )
    if limits is None or not limits.violations(strategy):
        yield Candidate(strategy=strategy, cost=model.cost(strategy))


def schedule_variants(
    row: Mapping[str, int], num_units: int, schedules: Sequence[str]
) -> list[dict[str, int]]:
    """Return the row under other schedules that torch accepts.

    The table holds one representative of the schedules that differ only in their
    bubbles; the simulator distinguishes them.
    """
    variants = []
    for name in schedules:
        spec = schedule_spec(name)
        least, most = spec.virtual_stages
        virtual = least if most == least else max(2, row["virtual_stages"])
        if spec.code == row["schedule"] or row["pp"] * virtual > num_units:
            continue
        if spec.violation(row["pp"], virtual, row["num_microbatches"]) is None:
            variants.append({**row, "schedule": spec.code, "virtual_stages": virtual})
    return variants


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ExactPricer:
    """Cuts rows exactly under orders of devices, and simulates them.

    Attributes:
        request: The question.
        model: Cost model that counts the simulations.
        local: Cost models of the orders that were simulated, by their bytes.
    """

    request: Request
    model: CostModel
    local: dict[bytes, CostModel] = field(default_factory=dict)

    def candidates(
        self, row: Mapping[str, int], ids: Index, *, cuts: int = 1, spare: int = 0
    ) -> list[Candidate]:
        """Cut a row exactly under an order of devices, and simulate it.

        Args:
            row: A legal row of the strategy table.
            ids: Device id by rank. Shape [devices].
            cuts: Most cuts to try, the exact one first.
            spare: Further cuts to try while none of them fits.
        Returns:
            The legal candidates, whether they fit or not.
        """
        # Finalists share few orders; those with one order share the prices of units.
        key = ids.tobytes()
        if key not in self.local:
            self.local[key] = CostModel(self.request.context.reordered(ids))
        local = self.local[key]
        before = local.evaluations["simulated"]
        found = candidates_of_row(
            local,
            row,
            free_recompute="recompute" not in self.request.pins,
            most=cuts,
            spare=spare,
            limits=self.request.launcher_limits,
        )
        self.model.evaluations["simulated"] += local.evaluations["simulated"] - before
        if not found:
            return []
        table = StrategyTable.from_strategies([one.strategy for one in found])
        # The row is legal; with another recomputation it may not be.
        if (table.recompute == row["recompute"]).all():
            return found
        kept = np.flatnonzero(legal(table, self.request.facts))
        return [found[at] for at in kept.tolist()]
