"""A weight that two stages read: held twice, its gradients summed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost import CostModel
from planner.cost.kernels.blocks import count_parameters
from planner.graph import ModelGraph
from planner.schema import Precision
from planner.schema.schedules import schedule_spec
from planner.space import build_strategy
from tests.cost.made import (
    HIDDEN,
    device,
    hosts,
    real_graph,
    row,
    setting_for,
    table_of,
    uniform_graph,
)

FULL = Precision(compute="float32")
#: A made-up model whose first weight the last unit reads, too.
WEIGHT = HIDDEN**2


def tied_graph(*, readers: tuple[int, ...] = (0, 7)) -> ModelGraph:
    graph = uniform_graph(8)
    first, *rest = graph.parameters
    tied = replace(first, aliases=("head.weight",), readers=readers)
    return replace(graph, parameters=(tied, *rest))


def test_gpt2_has_one_tie_between_its_ends() -> None:
    graph = real_graph("gpt2-xl")
    ties = count_parameters(graph).ties
    head = graph.unit_names.index("lm_head")
    assert (ties.first.tolist(), ties.second.tolist()) == ([0], [head])
    assert ties.scalars.tolist() == ties.trained.tolist() == [50257 * 1600]


@pytest.mark.parametrize(
    ("schedule", "virtual", "apart"),
    # A V has the first and the last stage on one rank: two copies, nothing to send.
    [("1F1B", 1, True), ("Interleaved1F1B", 2, True), ("ZBVZeroBubble", 2, False)],
)
@pytest.mark.parametrize("zero", [0, 2])
def test_copies_take_memory_and_a_sum(
    schedule: str, virtual: int, apart: bool, zero: int
) -> None:
    shards = 2 if zero else 1
    values = row(
        pp=2,
        dp_shard=shards,
        dp_replicate=2 // shards,
        zero_stage=zero,
        schedule=schedule_spec(schedule).code,  # type: ignore[arg-type]
        virtual_stages=virtual,
        num_microbatches=4,
    )
    stages = 2 * virtual
    cluster = hosts((4, 1, device(backend="gloo")), between=1e7)
    costs, tables = [], []
    for graph in (uniform_graph(8), tied_graph()):
        model = CostModel(setting_for(graph, cluster, precision=FULL))
        strategy = build_strategy(
            values,
            unit_names=graph.unit_names,
            bounds=[8 * i // stages for i in range(stages + 1)],
            sharding={},
            precision=FULL,
        )
        costs.append(model.cost(strategy))
        tables.append(model.table(table_of(values)))
    before, after = costs
    holder = 1 if apart else 0
    states = after.memory.optimizer - before.memory.optimizer
    assert states[holder] == pytest.approx(8 * WEIGHT / shards)
    assert states[1 - holder] == 0
    more = after.memory.parameters - before.memory.parameters
    assert more[holder] > 0
    payload = 4.0 * WEIGHT / shards
    reduced = [cost.collective_bytes.get("all_reduce", 0.0) for cost in costs]
    sent = [cost.link_bytes["pp"] for cost in costs]
    seconds = after.step_time_s - before.step_time_s
    in_table = tables[1].step_time_s[0] - tables[0].step_time_s[0]
    if apart:
        assert sent[1] - sent[0] == pytest.approx(payload)
        assert reduced[1] > reduced[0]
        # Two ranks exchange all of it over 10 MB/s, after everything else.
        assert seconds >= payload / 1e7 * (1 - 1e-9)
        assert in_table == pytest.approx(payload / 1e7, rel=0.01)
    else:
        assert sent[1] == sent[0]


def test_a_stage_that_has_both_readers_has_one_copy() -> None:
    cluster = hosts((2, 1, device()))
    values = row(pp=2, schedule=1, num_microbatches=4)
    found = []
    for graph in (uniform_graph(8), tied_graph(readers=(0, 3))):
        model = CostModel(setting_for(graph, cluster, precision=FULL))
        strategy = build_strategy(
            values, unit_names=graph.unit_names, bounds=[0, 4, 8], sharding={}
        )
        found.append(model.cost(strategy))
    assert np.array_equal(found[0].memory.total, found[1].memory.total)
    assert found[0].collective_bytes == found[1].collective_bytes
