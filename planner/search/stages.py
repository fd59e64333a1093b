"""Exact cuts of the model into stages, with recomputation chosen stage by stage.

Dynamic program over (stage, first unit): the smallest possible bottleneck under every
device's memory limit, then among the cuts that reach it the one with the least total
time, because 1F1B takes sum + (M - 1) max. Source: Narayanan et al. 2019, PipeDream,
section 3.1, with memory and recomputation added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from planner.cost import PricingContext
from planner.cost.strategy.memory import memory_parts
from planner.cost.units import UnitCosts
from planner.schema import Recompute, Strategy
from planner.simulate import ActionTable, peak_counts, peak_in_flight
from planner.simulate.compiled import compiled
from planner.space.table import RECOMPUTE_NAMES

__all__ = ["Cut", "best_cut"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Stage boundaries and what each stage recomputes.

    Attributes:
        bounds: Unit at which each stage starts, then the number of units.
        recompute: Per stage.
    """

    bounds: tuple[int, ...]
    recompute: tuple[Recompute, ...]


@compiled
def _cheapest_kind(
    fixed: Array, kept: Array, held: float, limit: float, i: int, j: int
) -> int:
    """Fastest recompute kind of units i .. j - 1 that fits; -1 if none does."""
    for kind in range(fixed.shape[0]):
        if fixed[kind, i, j] + kept[kind, i, j] * held <= limit:
            return kind
    return -1


@compiled
def _solve(
    time: Array,
    fixed: Array,
    kept: Array,
    types: Index,
    held: Array,
    limit: Array,
    bottleneck: float,
    choice: Index,
) -> float:
    """Bottleneck DP if ``bottleneck`` is infinite, else least sum under it."""
    stages, units = len(types), fixed.shape[1]
    best = np.full((stages + 1, units + 1), np.inf)
    best[stages, units] = 0.0
    for s in range(stages - 1, -1, -1):
        for i in range(s, units - (stages - s) + 1):
            for j in range(i + 1, units - (stages - s - 1) + 1):
                rest = best[s + 1, j]
                if rest == np.inf:
                    continue
                kind = _cheapest_kind(fixed, kept, held[s], limit[s], i, j)
                if kind < 0:
                    continue
                here = time[types[s], kind, i, j]
                if np.isinf(bottleneck):
                    total = max(here, rest)
                else:
                    if here > bottleneck:
                        continue
                    total = here + rest
                if total < best[s, i]:
                    best[s, i] = total
                    choice[s, i, 0] = j
                    choice[s, i, 1] = kind
    found: float = best[0, 0]
    return found


def _intervals(values: Array) -> Array:
    """Sum of values[..., i:j] for all i < j. Shape [..., U, U + 1]."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return np.asarray(sums[..., None, :] - sums[..., :-1, None])


def _interval_max(values: Array) -> Array:
    """Greatest of values[..., i:j] for all i < j. Shape [..., U, U + 1]."""
    units = values.shape[-1]
    result = np.zeros((*values.shape[:-1], units, units + 1))
    for i in range(units):
        np.maximum.accumulate(values[..., i:], axis=-1, out=result[..., i, i + 1 :])
    return result


def _interval_times(costs: UnitCosts) -> Array:
    """Forward and backward of units i .. j - 1. Shape [T, kinds, U, U + 1]."""
    shared = 2 * costs.tp_s[0] + costs.cp_s[0] + 2 * costs.ep_s[0]
    work = costs.forward_s[:, 0] + costs.backward_s[:, 0] + shared
    again = costs.tp_again_s[0] + costs.ep_s[0] + costs.cp_s[0] * costs.cp_forward
    kinds = np.stack(
        [
            work,
            work + costs.selective_s[:, 0] + costs.tp_again_s[0],
            work + costs.full_s[:, 0] + again,
        ],
        axis=1,
    )
    return _intervals(kinds)


def _interval_memory(
    setting: PricingContext, strategy: Strategy, costs: UnitCosts
) -> tuple[Array, Array]:
    """Fixed bytes, and bytes per microbatch in flight. Shapes [kinds, U, U + 1]."""
    dense, expert = costs.dense_parameters[0], costs.expert_parameters[0]
    trained, trained_experts = costs.trained_dense[0], costs.trained_experts[0]
    mesh = strategy.mesh
    ways = mesh.dp_shard * mesh.cp if strategy.zero_stage else 1
    left = mesh.ep / max(ways, mesh.ep)
    cut = np.zeros(len(dense) + 1)
    cut[1:-1] = costs.sent_bytes[0]
    # As planner.cost counts: a received tensor is a buffer, a sent one is held.
    shared = np.zeros((len(dense), 1))
    shared[1:, 0] = costs.shared_bytes[0]
    sent = np.broadcast_to(cut, (len(dense), len(cut))).copy()
    sent[:, -1] = costs.output_bytes[0]
    kept = np.maximum(_intervals(costs.saved_bytes[:, 0]) + sent - shared, 0.0)
    fixed = memory_parts(
        parameters=_intervals(dense + expert),
        sharded=_intervals(dense / ways + expert * left),
        largest_unit=_interval_max(dense + expert),
        trained=_intervals(trained + trained_experts),
        trained_sharded=_intervals(trained / ways + trained_experts * left),
        largest_trained=_interval_max(trained + trained_experts),
        zero_stage=strategy.zero_stage,
        pp=mesh.pp,
        num_microbatches=strategy.num_microbatches,
        kept_bytes=0.0,
        transient_bytes=_interval_max(costs.transient_bytes[:, 0]),
        receive_bytes=cut[:-1, None] + cut[None, :],
        precision=setting.precision,
        optimizer=setting.optimizer,
        recipe=setting.recipe,
        on_gpu=setting.on_gpu,
    ).total
    slope = 1 + (setting.recipe.fragmentation if setting.on_gpu else 0.0)
    return np.ascontiguousarray(fixed), kept * slope


def best_cut(
    setting: PricingContext,
    skeleton: Strategy,
    costs: UnitCosts,
    table: ActionTable,
    *,
    kinds: tuple[int, ...] = (0, 1, 2),
) -> Cut | None:
    """The exact cut for a strategy without stages.

    With several virtual stages on a rank each gets an equal part of the rank's memory;
    the caller checks the whole.

    Args:
        setting: The request.
        skeleton: Everything but the stages.
        costs: Units priced for its combination alone (C = 1).
        table: Its schedule.
        kinds: Recompute kinds that may be chosen, as indices into
            :data:`planner.space.RECOMPUTE_NAMES`, fastest first.
    Returns:
        None if no cut fits.
    """
    stages = skeleton.mesh.pp * skeleton.virtual_stages
    rank = np.array([skeleton.rank_of_stage(s) for s in range(stages)])
    time = _interval_times(costs)[:, list(kinds)]
    fixed, kept = (
        part[list(kinds)] for part in _interval_memory(setting, skeleton, costs)
    )
    types = setting.types_of_ranks(skeleton.mesh.pp)[rank].astype(np.int64)
    limit = setting.limits_of_ranks(skeleton.mesh.pp)[rank] / skeleton.virtual_stages
    if setting.on_gpu:
        # The reserve is there once a rank, not once a virtual stage.
        limit += setting.recipe.reserve_bytes * (1 - 1 / skeleton.virtual_stages)
    held = peak_in_flight(table).astype(np.float64)
    # What waits between the halves of a backward holds more, in proportion.
    saved = max(float(costs.saved_bytes[0, 0].sum()), 1.0)
    more = float(costs.weight_grad_bytes[0].sum()) / saved
    waiting = peak_counts(table).split[rank] / skeleton.virtual_stages
    held[1:] += waiting[1:] * more
    choice = np.zeros((stages, fixed.shape[1] + 1, 2), dtype=np.int64)
    problem = (
        np.ascontiguousarray(time),
        np.ascontiguousarray(fixed),
        np.ascontiguousarray(kept),
        types,
        held,
        limit,
    )
    bottleneck = _solve(*problem, np.inf, choice)
    if np.isinf(bottleneck):
        return None
    _solve(*problem, bottleneck * (1 + 1e-9), choice)
    bounds, names, unit = [0], [], 0
    for stage in range(stages):
        unit, kind = (int(x) for x in choice[stage, unit])
        bounds.append(unit)
        names.append(cast("Recompute", RECOMPUTE_NAMES[kinds[kind]]))
    return Cut(bounds=tuple(bounds), recompute=tuple(names))
