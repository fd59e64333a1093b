"""The cost model: one interface over both fidelities."""

from __future__ import annotations

from typing import Literal

from planner.cost.analytic import analytic_costs
from planner.cost.detailed import detailed_cost
from planner.cost.result import Cost, CostTable
from planner.cost.setting import Setting
from planner.schema import Strategy
from planner.space.table import StrategyTable

__all__ = ["CostModel"]


class CostModel:
    """Prices strategies for one setting and counts how many it priced.

    Attributes:
        setting: Model, machines, recipe.
        evaluations: Strategies priced so far, by fidelity.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.evaluations = {"analytic": 0, "simulated": 0}

    def table(self, table: StrategyTable) -> CostTable:
        """Price many strategies by closed forms; stages are cut evenly by time."""
        self.evaluations["analytic"] += len(table)
        return analytic_costs(self.setting, table)

    def cost(
        self,
        strategy: Strategy,
        fidelity: Literal["analytic", "simulated"] = "simulated",
    ) -> Cost:
        """Price one strategy with its own stages.

        Raises:
            StrategyError: If its stages are not the model's units in order.
        """
        self.evaluations[fidelity] += 1
        return detailed_cost(self.setting, strategy, fidelity)
