"""Cutting one row under one order of devices exactly, and simulating it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.search.base import Candidate, Request
from planner.search.refine import candidates_of_row
from planner.space import StrategyTable, legal

__all__ = ["ExactPricer"]

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ExactPricer:
    """Cuts and simulates for one request.

    Attributes:
        request: The question.
        model: Counts the simulations.
        local: Cost models of the orders that were simulated, by their bytes.
    """

    request: Request
    model: CostModel
    local: dict[bytes, CostModel] = field(default_factory=dict)

    def candidates(
        self, row: Mapping[str, int], ids: Index, *, cuts: int = 1, spare: int = 0
    ) -> list[Candidate]:
        """A row's cuts, simulated.

        Args:
            row: Of the strategy table; legal.
            ids: Device id by rank. Shape [devices].
            cuts: Most cuts to try, the exact one first.
            spare: As many more while none of them fits.
        Returns:
            Those that are legal, whether they fit or not.
        """
        # Finalists share few orders, and those of one order the prices of units.
        key = ids.tobytes()
        if key not in self.local:
            self.local[key] = CostModel(self.request.setting.reordered(ids))
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
        # The row is legal; with other recomputation than its own it may not be.
        if (table.recompute == row["recompute"]).all():
            return found
        kept = np.flatnonzero(legal(table, self.request.facts))
        return [found[at] for at in kept.tolist()]
