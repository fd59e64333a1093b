"""Strategies written by hand: read from a file, completed where they are silent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel, PricingContext
from planner.cost.traffic.layers import context_algorithms
from planner.errors import StrategyError
from planner.reading import parse_json, read_text
from planner.schema import Strategy
from planner.search.refine import candidates_of_row
from planner.space import StrategyTable, patterns_for
from planner.yaml_reading import parse_yaml

__all__ = ["complete_strategy", "read_strategy"]


def read_strategy(
    source: Strategy | Mapping[str, Any] | str | os.PathLike[str],
) -> Strategy:
    """A Strategy from an object, its fields, or a JSON or YAML file.

    A plan file is taken too: its strategy counts.

    Raises:
        PlanFileError: If the file cannot be read or a field is wrong.
    """
    if isinstance(source, Strategy):
        return source
    if isinstance(source, Mapping):
        return Strategy.from_data(dict(source), where="strategy")
    path = Path(source)
    text = read_text(path, "strategy", pipe=True)
    as_yaml = path.suffix.lower() in {".yaml", ".yml"}
    parse = parse_yaml if as_yaml else parse_json
    data = parse(text, str(path), "strategy")
    if isinstance(data, dict) and "strategy" in data:
        data = data["strategy"]
    return Strategy.from_data(data, where=str(path))


def complete_strategy(
    given: Strategy, context: PricingContext
) -> tuple[Strategy, NDArray[np.int64]]:
    """Fill in stages and sharding, and the device of every rank.

    Stages without modules say what is recomputed, and leave the cut to the planner.

    Returns:
        The strategy, and device ids by rank.
    Raises:
        StrategyError: If it names devices that are not free.
    """
    count = given.mesh.num_devices
    order = (
        np.array(given.device_ids(), dtype=np.int64)
        if given.device_ranges
        else context.order[:count]
    )
    taken = sorted(set(order.tolist()) - set(context.order.tolist()))
    if taken:
        raise StrategyError(
            f"device_ranges name device {taken[0]}, which is occupied or does not "
            f"exist; free devices are {context.order[0]} to {context.order[-1]}"
        )
    _check_heads(given, context)
    if any(stage.modules for stage in given.stages):
        return _with_sharding(given, context), order
    row = StrategyTable.from_strategies([given]).row(0)
    model = CostModel(replace(context, order=order))
    found = candidates_of_row(model, row, free_recompute=False)
    best = min(found, key=lambda c: (not c.cost.fits, c.cost.step_time_s))
    full = given.model_copy(
        update={
            "stages": best.strategy.stages,
            "device_ranges": best.strategy.device_ranges,
        }
    )
    return _with_sharding(full, context), order


def _check_heads(given: Strategy, context: PricingContext) -> None:
    """Refuse ranks that trade a sequence for heads that they do not divide.

    Raises:
        StrategyError: Naming the degrees and the numbers of heads.
    """
    mesh, graph = given.mesh, context.graph
    if mesh.cp == 1 or given.context_algorithm != "all_to_all":
        return
    if "all_to_all" in context_algorithms(graph, cp=mesh.cp, tp=mesh.tp):
        return
    heads = sorted(
        {
            kernel.batch // graph.batch
            for block in graph.blocks
            for kernel in block.kernels
            if kernel.kind == "attention"
        }
    )
    raise StrategyError(
        f"context_algorithm=all_to_all with cp={mesh.cp} x tp={mesh.tp}: "
        f"{mesh.cp * mesh.tp} ranks do not divide the "
        f"{', '.join(map(str, heads)) or 'missing'} heads of attention that they trade "
        f"the sequence for; use degrees that do, or context_algorithm=ring"
    )


def _with_sharding(strategy: Strategy, context: PricingContext) -> Strategy:
    if strategy.sharding.patterns:
        return strategy
    patterns = patterns_for(strategy.mesh, context.graph.sharding, context.regime)
    sharding = strategy.sharding.model_copy(update={"patterns": patterns})
    return strategy.model_copy(update={"sharding": sharding})
