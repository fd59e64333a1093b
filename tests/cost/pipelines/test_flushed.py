"""Links that are slower than the stages between them: transfers wait for each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.cost import CostModel
from planner.cost.pipelines.flushed import queues
from planner.schema import Strategy
from planner.schema.schedules import schedule_names, schedule_spec
from planner.space import StrategyTable, build_strategy
from tests.cost.made import device, hosts, row, setting_for, uniform_graph

#: A stage of 4 units computes for .05 and .1 ms, a transfer takes 5 ms.
SLOW = hosts((8, 1, device()), between=2e8)
FAST = hosts((1, 8, device()), inside=1e11)


def _plan(
    cluster: Any, schedule: str, many: int, *, virtual: int = 1, pp: int = 4
) -> tuple[CostModel, dict[str, int], Strategy]:
    model = CostModel(setting_for(uniform_graph(32), cluster))
    values = row(
        pp=pp,
        schedule=schedule_spec(schedule).code,
        virtual_stages=virtual,
        num_microbatches=many,
    )
    names = model.context.graph.unit_names
    stages = pp * virtual
    bounds = [i * len(names) // stages for i in range(stages + 1)]
    sharding = model.context.graph.sharding
    return (
        model,
        values,
        build_strategy(values, unit_names=names, bounds=bounds, sharding=sharding),
    )


def _send_s(model: CostModel, strategy: Strategy) -> float:
    return float(model.timeline(strategy).send_s.max())


def _pipeline_s(model: CostModel, strategy: Strategy) -> float:
    parts = model.cost(strategy).breakdown_s
    return parts["compute"] + parts["pipeline_bubble"] + parts["pipeline_transfer"]


@pytest.mark.parametrize(
    ("schedule", "virtual", "crossings"), [("GPipe", 1, 1), ("LoopedBFS", 2, 2)]
)
def test_a_link_carries_one_transfer_after_the_other(
    schedule: str, virtual: int, crossings: int
) -> None:
    model, _, strategy = _plan(SLOW, schedule, 32, virtual=virtual)
    send = _send_s(model, strategy)
    # All activations, then all gradients, over every link that has them.
    least = 2 * 32 * crossings * send
    assert least < _pipeline_s(model, strategy) < 1.2 * least


@pytest.mark.parametrize("many", [8, 64])
@pytest.mark.parametrize(
    ("schedule", "virtual", "off"),
    [("GPipe", 1, 0.01), ("1F1B", 1, 0.01), ("LoopedBFS", 2, 0.1)],
)
def test_the_table_knows_of_slow_links(
    schedule: str, virtual: int, off: float, many: int
) -> None:
    model, values, strategy = _plan(SLOW, schedule, many, virtual=virtual)
    table = StrategyTable.from_columns(**{k: [v] for k, v in values.items()})
    exact = pytest.approx(model.cost(strategy).step_time_s, rel=off)
    assert model.table(table).step_time_s[0] == exact
    assert model.cost(strategy, "analytic").step_time_s == exact


@pytest.mark.parametrize("boundary", [0, 1, 2])
def test_two_microbatches_pass_a_slow_boundary_in_a_trip(boundary: int) -> None:
    """In 1F1B, wherever it is: a rank is one forward ahead of the next."""
    many = 64
    sizes = [2 * (boundary + 1), 2 * (3 - boundary)]
    groups = tuple((1, size, device()) for size in sizes)
    cluster = hosts(*groups, inside=1e12, between=2e8)
    model, values, strategy = _plan(cluster, "1F1B", many)
    values |= {"dp_replicate": 2}
    names = model.context.graph.unit_names
    strategy = build_strategy(
        values,
        unit_names=names,
        bounds=[8 * i for i in range(5)],
        sharding=model.context.graph.sharding,
    )
    send = _send_s(model, strategy)
    assert _pipeline_s(model, strategy) == pytest.approx(many * send, rel=0.15)
    table = StrategyTable.from_columns(**{k: [v] for k, v in values.items()})
    exact = pytest.approx(model.cost(strategy).step_time_s, rel=0.05)
    assert model.table(table).step_time_s[0] == exact


@pytest.mark.parametrize("schedule", [s for s in schedule_names() if "V" not in s])
def test_quick_links_keep_nobody_waiting(schedule: str) -> None:
    virtual = 1 if schedule_spec(schedule).single_stage else 2
    model, _, strategy = _plan(FAST, schedule, 8, virtual=virtual)
    stages = model.stages(strategy)
    assert queues(stages, stages.times) is None
    assert np.all(stages.times.send > 0)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "LoopedBFS", "DualPipeV"])
def test_the_timeline_waits_as_the_step_does(schedule: str) -> None:
    virtual = 1 if schedule_spec(schedule).single_stage else 2
    model, _, strategy = _plan(SLOW, schedule, 16, virtual=virtual)
    step = model.timeline(strategy)
    assert step.step_time_s == pytest.approx(model.cost(strategy).step_time_s)
