"""What it takes to keep copies of a tied weight alike: a sum of their gradients.

Every stage that reads a tied weight trains a copy of its own; after the last backward
the ranks that hold one sum the gradients up, one all-reduce a weight, and nothing hides
that. Copies on one rank are summed without sending. A weight that three ranks hold is
priced as two sums of two, which is no less than one of three.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.owned import stages_of_links
from planner.cost.setting import Setting
from planner.cost.stage_times import ranks_of_stages
from planner.cost.unit_costs import UnitCosts
from planner.schema import Strategy
from planner.units import dtype_bytes

__all__ = ["TiedTraffic", "tied_traffic"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedTraffic:
    """What one device of each pp rank spends and moves per step. Shapes [pp].

    Attributes:
        exposed_s: Seconds of the sums that the rank takes part in.
        reduced_bytes: Their payload.
    """

    exposed_s: Array
    reduced_bytes: Array


def tied_traffic(
    setting: Setting, strategy: Strategy, costs: UnitCosts, bounds: Index
) -> TiedTraffic:
    """Of one strategy, rank by rank."""
    mesh, rank = strategy.mesh, ranks_of_stages(strategy)
    ways = mesh.dp_shard * mesh.cp if strategy.zero_stage else 1
    size = dtype_bytes(setting.precision.parameter) / ways
    first, second = (rank[stage] for stage in stages_of_links(costs, bounds))
    apart = (first != second) & (costs.tied_trained[0] > 0)
    payload, sums = np.zeros((2, mesh.pp))
    for ends in (first[apart], second[apart]):
        np.add.at(payload, ends, costs.tied_trained[0, apart] * size)
        np.add.at(sums, ends, 1.0)
    seconds = np.zeros(mesh.pp)
    if sums.any():
        fixed, per_byte = setting.pair_line(mesh.pp)
        seconds = fixed * sums + per_byte * payload
    return TiedTraffic(exposed_s=seconds, reduced_bytes=payload)
