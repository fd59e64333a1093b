"""The cost model: one interface over both fidelities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import Combinations, PricingContext
from planner.cost.result import Cost, CostTable
from planner.cost.strategy.stages import Stages
from planner.cost.strategy.step import (
    Fidelity,
    StepTimeline,
    price_strategy,
    step_timeline,
    time_step,
)
from planner.cost.table.orders import Orders
from planner.cost.table.step import price_table
from planner.cost.units import UnitCosts, price_units
from planner.schema import Strategy
from planner.schema.strategy_parts import ContextAlgorithm
from planner.space.table import StrategyTable

__all__ = ["CostModel"]


class CostModel:
    """Price of strategies in one context, with a count of those priced.

    Attributes:
        context: Model, machines and recipe.
        evaluations: Strategies priced so far, by fidelity.
    """

    def __init__(self, context: PricingContext) -> None:
        self.context = context
        self.evaluations = {"analytic": 0, "simulated": 0}
        self._units: dict[tuple[int | str | None, ...], UnitCosts] = {}
        self._reordered: dict[tuple[str, ...], CostModel] = {}

    def table(self, table: StrategyTable) -> CostTable:
        """Price many strategies by closed forms; stages are cut evenly by time."""
        self.evaluations["analytic"] += len(table)
        costs = price_table(self.context, table)
        return replace(costs, caution=self.context.cautions(table))

    def table_in_orders(
        self, table: StrategyTable, ids: NDArray[np.int64], order: NDArray[np.int64]
    ) -> CostTable:
        """Price many strategies by closed forms, each under an order of its own.

        Args:
            table: Legal rows.
            ids: Device id of each rank, -1 after the last. Shape [orders, most ranks].
            order: Row of ``ids`` that each strategy is priced under; it has as many
                devices as the strategy. Shape [n].
        """
        self.evaluations["analytic"] += len(table)
        if len(ids) == 1:
            alone = self.context.reordered(ids[0, ids[0] >= 0])
            costs = price_table(alone, table)
        else:
            orders = Orders(context=self.context, ids=ids)
            costs = price_table(self.context, table, orders, order)
        return replace(costs, caution=self.context.cautions(table))

    def unit_costs(
        self,
        *,
        tp: int,
        cp: int,
        ep: int,
        microbatch: int,
        sequence_parallel: bool,
        context_algorithm: ContextAlgorithm = "ring",
        depth: int | None = None,
    ) -> UnitCosts:
        """Every unit under one combination (C = 1); kept, as finalists share a few.

        Args:
            tp: Tensor parallel degree.
            cp: Context parallel degree.
            ep: Expert parallel degree.
            microbatch: Samples per microbatch.
            sequence_parallel: Whether tp also splits the stream between layers.
            context_algorithm: How attention sees a sequence that cp divides.
            depth: Equal residual blocks that a copy computes; None for all.
        """
        degrees = (tp, cp, ep, microbatch, int(sequence_parallel))
        key = (*degrees, context_algorithm, depth)
        if key not in self._units:

            def one(value: int) -> NDArray[np.int64]:
                return np.array([value], dtype=np.int64)

            combos = Combinations(
                tp=one(tp),
                cp=one(cp),
                ep=one(ep),
                microbatch=one(microbatch),
                sequence_parallel=one(int(sequence_parallel)),
                depth=None if depth is None else one(depth),
            )
            self._units[key] = price_units(
                self.context,
                combos,
                self.context.layer_lines(combos),
                context_algorithm=context_algorithm,
            )
        return self._units[key]

    def cost(self, strategy: Strategy, fidelity: Fidelity = "simulated") -> Cost:
        """Price one strategy with its own stages.

        Raises:
            StrategyError: If its stages are not the model's units, or list a unit
                before one that it reads.
        """
        self.evaluations[fidelity] += 1
        cost = price_strategy(self.stages(strategy), fidelity)
        caution = self.context.cautions(StrategyTable.from_strategies([strategy]))
        return replace(cost, caution=float(np.max(caution)))

    def breakdown(
        self, strategy: Strategy, fidelity: Fidelity = "simulated"
    ) -> dict[str, float]:
        """Seconds of its step by part: :meth:`cost` without memory, in half the time.

        Raises:
            StrategyError: If its stages are not the model's units, or list a unit
                before one that it reads.
        """
        self.evaluations[fidelity] += 1
        return time_step(self.stages(strategy), fidelity).breakdown_s

    def timeline(self, strategy: Strategy) -> StepTimeline:
        """Actions of each pp rank in the step that :meth:`cost` prices.

        Raises:
            StrategyError: If its stages are not the model's units, or list a unit
                before one that it reads.
        """
        self.evaluations["simulated"] += 1
        return step_timeline(self.stages(strategy))

    def stages(self, strategy: Strategy) -> Stages:
        """Stages of a strategy, in the order in which it lists the units.

        Raises:
            StrategyError: If a unit is listed before one that it reads.
        """
        graph = self.context.graph
        listed = tuple(name for stage in strategy.stages for name in stage.modules)
        model = self
        if listed != graph.unit_names and sorted(listed) == sorted(graph.unit_names):
            if listed not in self._reordered:
                context = replace(self.context, graph=graph.reordered(listed))
                self._reordered[listed] = CostModel(context)
            model = self._reordered[listed]
        mesh, synchronisation = strategy.mesh, strategy.synchronisation
        depth = None
        if synchronisation.of_blocks:
            blocks = int(model.context.facts.residual_blocks.sum())
            depth = synchronisation.depth(mesh.dp_replicate, blocks)
        costs = model.unit_costs(
            tp=synchronisation.ways(mesh.tp, mesh.dp_replicate),
            cp=mesh.cp,
            ep=mesh.ep,
            microbatch=strategy.microbatch_size,
            sequence_parallel=strategy.sharding.sequence_parallel,
            context_algorithm=strategy.context_algorithm if mesh.cp > 1 else "ring",
            depth=depth,
        )
        return Stages(context=model.context, strategy=strategy, costs=costs)
