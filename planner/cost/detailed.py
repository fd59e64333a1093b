"""One strategy with its own stages, priced exactly: what ranks the finalists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.compression import compress
from planner.cost.held import held_bytes
from planner.cost.memory import MemoryParts, memory_parts
from planner.cost.owned import OwnedScalars
from planner.cost.result import Cost
from planner.cost.setting import Setting
from planner.cost.stage_times import ranks_of_stages, recompute_codes, unit_ranges
from planner.cost.step import is_compressed, schedule_of, time_step
from planner.cost.unit_costs import UnitCosts
from planner.cost.volumes import collective_bytes, link_bytes
from planner.schema import Strategy
from planner.simulate import ActionTable
from planner.units import dtype_bytes

__all__ = ["detailed_breakdown", "detailed_cost"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


def _memory(
    setting: Setting,
    strategy: Strategy,
    costs: UnitCosts,
    bounds: Index,
    owned: OwnedScalars,
    table: ActionTable | None,
) -> MemoryParts:
    """Peak memory of one device of each pp rank. Shapes [pp]."""
    pp, rank = strategy.mesh.pp, ranks_of_stages(strategy)
    codes = recompute_codes(strategy)
    transient, largest, most_trained = np.zeros((3, pp))
    scalars = costs.dense_parameters[0] + costs.expert_parameters[0]
    trained = costs.trained_dense[0] + costs.trained_experts[0]
    working = np.maximum.reduceat(costs.transient_bytes[:, 0], bounds[:-1], axis=1)
    np.maximum.at(transient, rank, working[codes, np.arange(len(rank))])
    np.maximum.at(largest, rank, np.maximum.reduceat(scalars, bounds[:-1]))
    np.maximum.at(most_trained, rank, np.maximum.reduceat(trained, bounds[:-1]))
    held = held_bytes(
        strategy,
        costs,
        bounds,
        table,
        keeps_sent=not setting.on_gpu,
        keeps_graph=setting.recipe.keeps_graph,
    )
    parts = memory_parts(
        parameters=owned.whole,
        sharded=owned.shard,
        largest_unit=largest,
        trained=owned.trained,
        trained_sharded=owned.trained_shard,
        largest_trained=most_trained,
        zero_stage=strategy.zero_stage,
        pp=pp,
        num_microbatches=strategy.num_microbatches,
        kept_bytes=held.activations,
        transient_bytes=transient,
        receive_bytes=held.received,
        precision=setting.precision,
        optimizer=setting.optimizer,
        recipe=setting.recipe,
        on_gpu=setting.on_gpu,
    )
    if not is_compressed(strategy):
        return parts
    size = dtype_bytes(setting.precision.reduce)
    found = compress(setting.graph, strategy.gradient_compression, size)
    # Activations are gone when the last gradients are exchanged.
    return replace(
        parts,
        gradients=parts.gradients + found.kept_bytes,
        activations=np.maximum(parts.activations, found.working_bytes),
    )


def detailed_breakdown(
    setting: Setting, strategy: Strategy, costs: UnitCosts, fidelity: str = "simulated"
) -> dict[str, float]:
    """Seconds of a step by part, without memory; arguments as :func:`detailed_cost`."""
    bounds = unit_ranges(setting, strategy)
    table = None if fidelity == "analytic" else schedule_of(strategy)
    found = time_step(setting, strategy, costs, bounds, table, fidelity)
    return found.breakdown_s


def detailed_cost(
    setting: Setting, strategy: Strategy, costs: UnitCosts, fidelity: str = "simulated"
) -> Cost:
    """Time and memory of a strategy whose stages are given.

    Args:
        setting: The request.
        strategy: With stages that list all units of the model in order.
        costs: Units under its one combination (C = 1).
        fidelity: ``simulated`` runs the schedule's exact order, ``analytic`` takes its
            closed form.
    Raises:
        StrategyError: If the stages are not the model's units.
    """
    bounds = unit_ranges(setting, strategy)
    table = schedule_of(strategy)
    step = time_step(setting, strategy, costs, bounds, table, fidelity)
    pp, tail = strategy.mesh.pp, step.tail
    return Cost(
        step_time_s=float(sum(step.breakdown_s.values())),
        breakdown_s=step.breakdown_s,
        memory=_memory(setting, strategy, costs, bounds, tail.owned, table),
        limit_bytes=setting.limits_of_ranks(pp),
        device_type=setting.types_of_ranks(pp),
        link_bytes=link_bytes(strategy, costs, bounds, tail.traffic, tail.tied),
        collective_bytes=collective_bytes(
            strategy, costs, bounds, tail.traffic, tail.tied
        ),
        fidelity="simulated" if fidelity == "simulated" else "analytic",
    )
