"""How many scalars a device of each pp rank holds, trains, and keeps under ZeRO."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.stage_times import by_rank, ranks_of_stages, stage_sums
from planner.cost.unit_costs import UnitCosts
from planner.schema import Strategy

__all__ = ["OwnedScalars", "owned_scalars", "stages_of_links"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedScalars:
    """Scalars on one device of each pp rank, copies of tied weights too. Shapes [pp].

    Attributes:
        whole: Of its stages, after tp and ep.
        shard: What ZeRO leaves of them.
        trained: Those of ``whole`` that have a gradient.
        trained_shard: Those of ``shard``.
    """

    whole: Array
    shard: Array
    trained: Array
    trained_shard: Array


def stages_of_links(costs: UnitCosts, bounds: Index) -> tuple[Index, Index]:
    """Stages on which the two ends of each tied link lie. Shapes [links]."""
    first, second = (
        np.searchsorted(bounds, units, side="right") - 1
        for units in (costs.ties.first, costs.ties.second)
    )
    return first, second


def owned_scalars(strategy: Strategy, costs: UnitCosts, bounds: Index) -> OwnedScalars:
    """Count them.

    Args:
        strategy: With its stages.
        costs: Of its one combination.
        bounds: Unit at which each stage starts. Shape [stages + 1].
    """
    mesh, rank = strategy.mesh, ranks_of_stages(strategy)
    ways = mesh.dp_shard * mesh.cp if strategy.zero_stage else 1
    left = mesh.ep / max(ways, mesh.ep)
    first, second = stages_of_links(costs, bounds)

    def of_ranks(units: Array, copies: Array) -> Array:
        sums = stage_sums(units, bounds)
        np.add.at(sums, second, np.where(first != second, copies, 0.0))
        return by_rank(sums, rank, mesh.pp)

    no_copies = np.zeros(len(costs.ties))
    dense = of_ranks(costs.dense_parameters[0], costs.tied_parameters[0])
    expert = of_ranks(costs.expert_parameters[0], no_copies)
    trained = of_ranks(costs.trained_dense[0], costs.tied_trained[0])
    trained_experts = of_ranks(costs.trained_experts[0], no_copies)
    return OwnedScalars(
        whole=dense + expert,
        shard=dense / ways + expert * left,
        trained=trained + trained_experts,
        trained_shard=trained / ways + trained_experts * left,
    )
