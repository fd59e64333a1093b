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
from planner.cost.tensor_traffic import TP_KINDS
from planner.cost.tied import TiedTraffic
from planner.cost.unit_costs import UnitCosts
from planner.schema import Strategy
from planner.units import dtype_bytes

__all__ = ["collective_bytes", "link_bytes"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


def _sent_by_rank(strategy: Strategy, costs: UnitCosts, bounds: Index) -> Array:
    """Activations and gradients that each pp rank sends for a microbatch. [pp]."""
    rank = ranks_of_stages(strategy)
    cut = costs.sent_bytes[0, bounds[1:-1] - 1]
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
    many, codes = strategy.num_microbatches, recompute_codes(strategy)
    anything, everything = (codes > 0).astype(float), (codes == 2).astype(float)

    def per_rank(payload: Array, times: Array | float = 1.0) -> Array:
        return by_rank(stage_sums(payload[0], bounds) * times, rank, pp)

    tensor = {
        kind: (per_rank(once) + per_rank(again, anything)) * many
        for kind, (once, again) in zip(TP_KINDS, costs.tp_payload, strict=True)
    }
    ways = strategy.mesh.dp_shard * strategy.mesh.cp if strategy.zero_stage else 1
    size = dtype_bytes(strategy.precision.parameter) / ways
    payload = {
        "all_reduce": traffic.reduced_bytes
        + tied.reduced_bytes
        + tensor["all_reduce"]
        + per_rank(costs.summed_parameters) * size,
        "all_gather": traffic.gathered_bytes + tensor["all_gather"],
        "reduce_scatter": traffic.scattered_bytes + tensor["reduce_scatter"],
        "all_to_all": many
        * per_rank(2 * costs.ep_payload + costs.cp_payload, 2.0 + everything),
        "send": _sent_by_rank(strategy, costs, bounds) * many,
    }
    return {k: float(np.max(v)) for k, v in payload.items() if np.max(v) > 0}
