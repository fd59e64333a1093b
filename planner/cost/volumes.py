"""How many bytes a strategy moves in a step, by axis and by kind of call."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.data_parallel import ReplicaTraffic
from planner.cost.stage_times import (
    by_rank,
    ranks_of_stages,
    recompute_codes,
    stage_sums,
)
from planner.cost.tied import TiedTraffic
from planner.cost.unit_costs import UnitCosts
from planner.schema import Strategy

__all__ = ["collective_bytes", "link_bytes"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


def _sent_by_rank(strategy: Strategy, costs: UnitCosts, bounds: Index) -> Array:
    """Activations and gradients that each pp rank sends for a microbatch. [pp]."""
    rank = ranks_of_stages(strategy)
    cut = costs.cut_bytes[0, bounds[1:-1] - 1]
    # Neighbouring stages of a V's turning point lie on one rank.
    cut = np.where(rank[1:] == rank[:-1], 0.0, cut)
    both = np.concatenate([cut, [0.0]]) + np.concatenate([[0.0], cut])
    return by_rank(both, rank, strategy.mesh.pp)


def link_bytes(
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    traffic: ReplicaTraffic,
    tied: TiedTraffic,
) -> dict[str, float]:
    """Bytes that the busiest sender of each axis sends per step."""
    rank, pp = ranks_of_stages(strategy), strategy.mesh.pp
    many = strategy.num_microbatches

    def most(values: Array) -> float:
        return float(by_rank(stage_sums(values[0], bounds), rank, pp).max() * many)

    sent = {
        # Of two ranks that sum, each sends as much as there is.
        "pp": float(
            (_sent_by_rank(strategy, costs, bounds) * many + tied.reduced_bytes).max()
        ),
        "dp": float(traffic.sent_bytes.max()),
        "cp": most(costs.cp_bytes),
        "tp": most(costs.tp_bytes),
        "ep": most(costs.ep_bytes),
    }
    return {axis: value for axis, value in sent.items() if value > 0}


def collective_bytes(
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    traffic: ReplicaTraffic,
    tied: TiedTraffic,
) -> dict[str, float]:
    """Payload per step by kind of call, each kind on its busiest rank."""
    rank, pp = ranks_of_stages(strategy), strategy.mesh.pp
    many = strategy.num_microbatches
    passes = np.where(recompute_codes(strategy) == 2, 3.0, 2.0)

    def per_rank(payload: Array) -> Array:
        return by_rank(stage_sums(payload[0], bounds) * passes, rank, pp) * many

    tensor, routed = per_rank(costs.tp_payload), 2 * per_rank(costs.ep_payload)
    split = strategy.sharding.sequence_parallel
    payload = {
        "all_reduce": traffic.reduced_bytes
        + tied.reduced_bytes
        + (0 if split else tensor),
        "all_gather": traffic.gathered_bytes
        + by_rank(stage_sums(costs.gather_payload[0], bounds), rank, pp) * many
        + (tensor if split else 0),
        "reduce_scatter": traffic.scattered_bytes + (tensor if split else 0),
        "all_to_all": routed,
        "send": _sent_by_rank(strategy, costs, bounds) * many,
    }
    return {k: float(np.max(v)) for k, v in payload.items() if np.max(v) > 0}
