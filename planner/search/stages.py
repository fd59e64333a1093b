"""Exact cuts of the model into stages, with recomputation chosen stage by stage.

Dynamic program over (stage, first unit): the smallest possible bottleneck under every
device's memory limit, then among the cuts that reach it the one with the least total
time, because 1F1B takes sum + (M - 1) max. Source: Narayanan et al. 2019, PipeDream,
section 3.1, with memory and recomputation added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.cost import PricingContext
from planner.cost.replicas import expert_spread
from planner.cost.strategy.memory import memory_parts
from planner.cost.units import UnitCosts
from planner.schema import Recompute, Strategy
from planner.simulate import ActionTable, peak_counts, peak_in_flight
from planner.simulate.compiled import compiled, inner
from planner.space.table import RECOMPUTE_NAMES

__all__ = [
    "Cut",
    "Spans",
    "best_cut",
    "span_memory",
    "span_times",
    "stage_limits",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Stage boundaries and the recomputation of each stage.

    Attributes:
        bounds: Unit at which each stage starts, then the number of units.
        recompute: Recomputation of each stage.
    """

    bounds: tuple[int, ...]
    recompute: tuple[Recompute, ...]


@inner
def _cheapest_kind(
    fixed: Array, kept: Array, held: float, limit: float, i: int, j: int
) -> int:
    """Return the fastest recompute kind of units i .. j - 1 that fits; -1 for none."""
    for kind in range(fixed.shape[0]):
        if fixed[kind, i, j] + kept[kind, i, j] * held <= limit:
            return kind
    return -1


#: Weight of stages' squares in their sum: of cuts with equal sums the most even one.
_EVEN = 1e-6


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
    best: Array,
) -> float:
    """Find the least bottleneck if ``bottleneck`` is infinite, else the least sum.

    Of equal sums the one of the most even stages.
    """
    stages, units = len(types), fixed.shape[1]
    for s in range(stages + 1):
        for i in range(units + 1):
            best[s, i] = np.inf
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
                if bottleneck == np.inf:
                    total = max(here, rest)
                else:
                    if here > bottleneck:
                        continue
                    total = here + rest + _EVEN * here * (here / bottleneck)
                if total < best[s, i]:
                    best[s, i] = total
                    choice[s, i, 0] = j
                    choice[s, i, 1] = kind
    found: float = best[0, 0]
    return found


class Spans(Protocol):
    """Pairs of sets of units, between which a stage may lie.

    Along program order the sets are its prefixes, and a pair is an interval; along
    ideals (:mod:`planner.search.ideals`) they are all sets that contain the units that
    they read. The trailing shape of arrays over pairs depends on the implementation.
    """

    def sums(self, values: Array) -> Array:
        """Return the sum of units' values [..., U] between the sets of each pair."""

    def largest(self, values: Array) -> Array:
        """Return the greatest of units' values [..., U] between each pair of sets."""

    def starts(self, values: Array) -> Array:
        """Return the values [sets] of the first set of each pair."""

    def ends(self, values: Array) -> Array:
        """Return the values [sets] of the second set of each pair."""


class _Line:
    """Prefixes of program order. Arrays over pairs have the shape [..., U, U + 1]."""

    def sums(self, values: Array) -> Array:
        """Return the sum of values[..., i:j] for all i < j."""
        sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
        np.cumsum(values, axis=-1, out=sums[..., 1:])
        return np.asarray(sums[..., None, :] - sums[..., :-1, None])

    def largest(self, values: Array) -> Array:
        """Return the greatest of values[..., i:j] for all i < j."""
        units = values.shape[-1]
        result = np.zeros((*values.shape[:-1], units, units + 1))
        for i in range(units):
            np.maximum.accumulate(values[..., i:], axis=-1, out=result[..., i, i + 1 :])
        return result

    def starts(self, values: Array) -> Array:
        """Return the values [U + 1] by i."""
        return values[:-1, None]

    def ends(self, values: Array) -> Array:
        """Return the values [U + 1] by j."""
        return values[None, :]


def span_times(costs: UnitCosts, spans: Spans) -> Array:
    """Return forward and backward time between two sets. Shape [T, kinds, pairs]."""
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
    return spans.sums(kinds)


def span_memory(
    context: PricingContext,
    strategy: Strategy,
    costs: UnitCosts,
    spans: Spans,
    cut: Array,
    shared: Array,
) -> tuple[Array, Array]:
    """Return fixed bytes, and bytes per microbatch in flight. Shapes [kinds, pairs].

    Args:
        context: Model, machines, training recipe.
        strategy: Everything but the stages.
        costs: Units under its combination (C = 1).
        spans: Pairs of sets of units between which a stage may lie.
        cut: Bytes sent after each set; 0 for no units and for all. Shape [sets].
        shared: The part of them that the next units save unchanged. Shape [sets].
    """
    dense, expert = costs.dense_parameters[0], costs.expert_parameters[0]
    trained, trained_experts = costs.trained_dense[0], costs.trained_experts[0]
    mesh = strategy.mesh
    ways = mesh.shards if strategy.zero_stage else 1
    spread = float(expert_spread(mesh.ep, mesh.tp))
    left = spread / max(ways, spread)
    # A received tensor is a buffer, a sent one is held.
    sent = cut.copy()
    sent[-1] = costs.output_bytes[0]
    saved = spans.sums(costs.saved_bytes[:, 0])
    kept = np.maximum(saved + spans.ends(sent) - spans.starts(shared), 0.0)
    working = spans.largest(costs.transient_bytes[:, 0])
    fixed = memory_parts(
        context.scalar_bytes,
        parameters=spans.sums(dense + expert),
        sharded=spans.sums(dense / ways + expert * left),
        trained=spans.sums(trained + trained_experts),
        trained_sharded=spans.sums(trained / ways + trained_experts * left),
        zero_stage=strategy.zero_stage,
        pp=mesh.pp,
        num_microbatches=strategy.num_microbatches,
        held_bytes=(0.0, 0.0, 0.0),
        working_bytes=(working,) * 6,
        receive_bytes=spans.starts(cut) + spans.ends(cut),
    ).total
    slope = context.scalar_bytes.swell
    return np.ascontiguousarray(fixed), np.ascontiguousarray(kept * slope)


def stage_limits(
    context: PricingContext, skeleton: Strategy, costs: UnitCosts, table: ActionTable
) -> tuple[Index, Array, Array]:
    """Return device type, microbatches in flight and memory limit of each stage.

    With several virtual stages on a rank each gets an equal part of the rank's memory.
    """
    rank = np.array(skeleton.stage_ranks)
    types = context.types_of_ranks(skeleton.mesh.pp)[rank].astype(np.int64)
    limit = context.limits_of_ranks(skeleton.mesh.pp)[rank] / skeleton.virtual_stages
    # The reserve is there once a rank, not once a virtual stage.
    limit += context.scalar_bytes.reserve * (1 - 1 / skeleton.virtual_stages)
    held = peak_in_flight(table).astype(np.float64)
    # Microbatches between the halves of a split backward hold more, in proportion.
    saved = max(float(costs.saved_bytes[0, 0].sum()), 1.0)
    more = float(costs.weight_grad_bytes[0].sum()) / saved
    waiting = peak_counts(table).split[rank] / skeleton.virtual_stages
    held[1:] += waiting[1:] * more
    return types, held, limit


def best_cut(
    context: PricingContext,
    skeleton: Strategy,
    costs: UnitCosts,
    table: ActionTable,
    *,
    kinds: tuple[int, ...] = (0, 1, 2),
) -> Cut | None:
    """Return the exact cut for a strategy without stages.

    With several virtual stages on a rank each gets an equal part of the rank's memory;
    the caller checks the whole.

    Args:
        context: Model, machines, training recipe.
        skeleton: Everything but the stages.
        costs: Units priced for its combination alone (C = 1).
        table: Its schedule.
        kinds: Recompute kinds that may be chosen, as indices into
            :data:`planner.space.RECOMPUTE_NAMES`, fastest first.
    Returns:
        None if no cut fits.
    """
    stages, units = skeleton.mesh.pp * skeleton.virtual_stages, len(costs.tensors)
    cut, shared = np.zeros((2, units + 1))
    cut[1:-1], shared[1:-1] = costs.sent_bytes[0], costs.shared_bytes[0]
    line = _Line()
    time = span_times(costs, line)[:, list(kinds)]
    fixed, kept = (
        part[list(kinds)]
        for part in span_memory(context, skeleton, costs, line, cut, shared)
    )
    types, held, limit = stage_limits(context, skeleton, costs, table)
    choice = np.zeros((stages, units + 1, 2), dtype=np.int64)
    best = np.empty((stages + 1, units + 1))
    problem = (
        np.ascontiguousarray(time),
        np.ascontiguousarray(fixed),
        np.ascontiguousarray(kept),
        types,
        held,
        limit,
    )
    bottleneck = _solve(*problem, np.inf, choice, best)
    if np.isinf(bottleneck):
        return None
    _solve(*problem, bottleneck * (1 + 1e-9), choice, best)
    bounds, names, unit = [0], [], 0
    for stage in range(stages):
        unit, kind = (int(x) for x in choice[stage, unit])
        bounds.append(unit)
        names.append(RECOMPUTE_NAMES[kinds[kind]])
    return Cut(bounds=tuple(bounds), recompute=tuple(names))
