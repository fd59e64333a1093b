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


def _by_rank(strategy: Strategy, stages: Array) -> Array:
    """Sum [k, stages] within pp ranks. Shape [k, pp]."""
    rank, pp = ranks_of_stages(strategy), strategy.mesh.pp
    return np.stack([by_rank(row, rank, pp) for row in stages])


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
    many, axes = strategy.num_microbatches, ("cp", "tp", "ep")
    units = np.stack([costs.cp_bytes[0], costs.tp_bytes[0], costs.ep_bytes[0]])
    sums = _by_rank(strategy, stage_sums(units, bounds))
    sent = {
        # Of two ranks that sum, each sends as much as there is.
        "pp": float(
            (_sent_by_rank(strategy, costs, bounds) * many + tied.reduced_bytes).max()
        ),
        "dp": float(traffic.sent_bytes.max()),
        **dict(zip(axes, (sums.max(axis=1) * many).tolist(), strict=True)),
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
    many, codes = strategy.num_microbatches, recompute_codes(strategy)
    anything, everything = (codes > 0).astype(float), (codes == 2).astype(float)
    exchanged = 2 * costs.ep_payload[0] + costs.cp_payload[0]
    units = np.stack(
        [
            *costs.tp_payload[:, :, 0].reshape(-1, exchanged.shape[-1]),
            costs.summed_parameters[0],
            exchanged,
        ]
    )
    sums = stage_sums(units, bounds)
    # Of tp's calls by kind: what every step has, and what recomputing repeats.
    sums[1:-2:2] *= anything
    sums[-1] *= 2.0 + everything
    *tensor, summed, exchanged = _by_rank(strategy, sums)
    by_kind = {
        kind: (tensor[2 * i] + tensor[2 * i + 1]) * many
        for i, kind in enumerate(TP_KINDS)
    }
    ways = strategy.mesh.dp_shard * strategy.mesh.cp if strategy.zero_stage else 1
    size = dtype_bytes(strategy.precision.parameter) / ways
    payload = {
        "all_reduce": traffic.reduced_bytes
        + tied.reduced_bytes
        + by_kind["all_reduce"]
        + summed * size,
        "all_gather": traffic.gathered_bytes + by_kind["all_gather"],
        "reduce_scatter": traffic.scattered_bytes + by_kind["reduce_scatter"],
        "all_to_all": many * exchanged,
        "send": _sent_by_rank(strategy, costs, bounds) * many,
    }
    most = {kind: float(values.max()) for kind, values in payload.items()}
    return {kind: value for kind, value in most.items() if value > 0}
