"""Table, closed form and simulator must agree where all three are exact."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from planner.cost import PARTS, CostModel, Recipe
from planner.cost.table.cuts import balanced_bounds
from planner.errors import StrategyError
from planner.schema import AXES, Strategy
from planner.schema.schedules import schedule_name, schedule_names, schedule_spec
from planner.space import StrategyTable, build_strategy
from tests.cost.made import device, hosts, real_graph, row, setting_for, uniform_graph
from tests.simulate.cases import violation

NODE = hosts((1, 8, device()), inside=1e11)
SLOW = hosts((8, 1, device()), between=2e9)


def pipelines(units: int) -> list[dict[str, int]]:
    """Every schedule x pp x virtual stages x microbatches that cuts evenly."""
    cases = itertools.product(schedule_names(), (2, 4, 8), (1, 2, 4), (2, 4, 8, 32))
    return [
        row(
            pp=pp,
            schedule=schedule_spec(name).code,
            virtual_stages=virtual,
            num_microbatches=many,
            recompute=0 if schedule_spec(name).splits_backward else many % 3,
            dp_shard=8 // pp,
            zero_stage=2 if pp < 8 else 0,
        )
        for name, pp, virtual, many in cases
        if violation(name, pp, virtual, many) is None and units % (pp * virtual) == 0
    ]


def even(model: CostModel, values: dict[str, int]) -> Strategy:
    names = model.context.graph.unit_names
    stages = values["pp"] * values["virtual_stages"]
    return build_strategy(
        values,
        unit_names=names,
        bounds=[i * len(names) // stages for i in range(stages + 1)],
        sharding=model.context.graph.sharding,
    )


def timed_cut(model: CostModel, values: dict[str, int]) -> list[int]:
    """Stages of equal time, as the table cuts them; on devices of one type."""
    one = np.ones(1, dtype=np.int64)
    costs = model.unit_costs(tp=1, cp=1, ep=1, microbatch=1, sequence_parallel=False)
    stages = values["pp"] * values["virtual_stages"]
    work = costs.forward_s + costs.backward_s
    types = np.zeros((1, stages), dtype=np.int64)
    cut = balanced_bounds(work, 0 * one, types, np.array([stages]))[0]
    return [int(bound) for bound in cut]


def table_of(rows: list[dict[str, int]]) -> StrategyTable:
    return StrategyTable.from_columns(**{k: [r[k] for r in rows] for k in rows[0]})


@pytest.mark.parametrize(
    ("cluster", "schedules"),
    [(NODE, schedule_names()), (SLOW, ("GPipe", "1F1B"))],
    ids=["node", "network"],
)
def test_all_three_agree_on_even_pipelines(
    cluster: Any, schedules: tuple[str, ...]
) -> None:
    # A unit's forward takes 12 us; a transfer 10 us inside a node, 0.5 ms outside.
    graph = uniform_graph(32)
    model = CostModel(setting_for(graph, cluster))
    rows = [r for r in pipelines(32) if schedule_name(r["schedule"]) in schedules]
    assert {schedule_name(r["schedule"]) for r in rows} == set(schedules)
    table = model.table(table_of(rows))
    for index, values in enumerate(rows):
        strategy = even(model, values)
        exact = model.cost(strategy)
        closed = model.cost(strategy, "analytic")
        want = pytest.approx(exact.step_time_s, rel=0.01)
        assert table.step_time_s[index] == want, strategy.label()
        assert closed.step_time_s == want, strategy.label()


#: How much more than the exact order the table may say. A V with few microbatches is
#: bounded by one with many.
SLACK = {"ZBVZeroBubble": 1.3, "DualPipeV": 1.15}


@pytest.mark.parametrize(
    ("backend", "keeps_graph"), [("nccl", True), ("nccl", False), ("gloo", True)]
)
def test_the_table_never_promises_memory_that_is_not_there(
    backend: str, keeps_graph: bool
) -> None:
    cluster = hosts((1, 8, device(backend=backend)), inside=1e11)
    recipe = Recipe(name="other", keeps_graph=keeps_graph)
    model = CostModel(setting_for(uniform_graph(32), cluster, recipe=recipe))
    rows = pipelines(32)
    table = model.table(table_of(rows))
    for index, values in enumerate(rows):
        exact = model.cost(even(model, values))
        name = schedule_name(values["schedule"])
        assert table.memory_bytes[index] >= exact.peak_memory_bytes * (1 - 1e-9)
        slack = SLACK.get(name, 1.05)
        assert table.memory_bytes[index] <= exact.peak_memory_bytes * slack
        assert table.excess_bytes[index] == pytest.approx(
            table.memory_bytes[index] - exact.limit_bytes.min()
        )


@pytest.mark.parametrize("small", [(4,), (5, 6), (4, 7), (6,)], ids=str)
def test_the_table_sees_small_devices_wherever_they_are(small: tuple[int, ...]) -> None:
    sizes = np.full(8, 24e9)
    sizes[list(small)] = np.array([4e9, 6e9])[: len(small)]
    kinds = [(1, 1, device(f"of {size:.0e}", memory_bytes=size)) for size in sizes]
    model = CostModel(setting_for(uniform_graph(32), hosts(*kinds, between=1e11)))
    rows = pipelines(32)
    table = model.table(table_of(rows))
    behind = set()
    for index, values in enumerate(rows):
        exact = model.cost(even(model, values))
        lacks = exact.memory.total - exact.limit_bytes
        behind.add(1 < int(lacks.argmax()) < values["pp"] - 1)
        slack = SLACK.get(schedule_name(values["schedule"]), 1.05) - 1.0
        least = lacks.max() - 1e-9 * exact.peak_memory_bytes
        most = lacks.max() + slack * exact.peak_memory_bytes
        assert least <= table.excess_bytes[index] <= most, exact
    assert any(behind)


@pytest.mark.parametrize("keeps_graph", [True, False])
def test_the_table_bounds_random_strategies_of_a_real_model(keeps_graph: bool) -> None:
    # Embedding, head and norms make stages uneven, a tied weight lies on two of them.
    graph = real_graph("gpt2-xl")
    random = np.random.default_rng(5)
    cluster = hosts((1, 8, device(backend="gloo")), inside=1e11)
    recipe = Recipe(name="other", keeps_graph=keeps_graph)
    model = CostModel(setting_for(graph, cluster, recipe=recipe))
    ratios = []
    for _ in range(60):
        name = str(random.choice(schedule_names()))
        pp, many = int(random.choice([2, 4, 8])), int(random.choice([16, 32]))
        single = schedule_spec(name).single_stage
        values = row(
            pp=pp,
            schedule=schedule_spec(name).code,  # type: ignore[arg-type]
            virtual_stages=1 if single else 2,
            num_microbatches=many,
            recompute=0
            if schedule_spec(name).splits_backward
            else int(random.choice([0, 2])),
            dp_shard=8 // pp,
            zero_stage=int(random.choice([1, 2])) if pp < 8 else 0,
        )
        cut = timed_cut(model, values)
        strategy = build_strategy(
            values,
            unit_names=graph.unit_names,
            bounds=cut,
            sharding={},
        )
        exact = model.cost(strategy).peak_memory_bytes
        ratios.append(model.table(table_of([values])).memory_bytes[0] / exact)
    assert min(ratios) >= 0.95
    assert max(ratios) <= 1.35


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"tp": 8, "sequence_parallel": 1},
        {"dp_replicate": 8},
        {"dp_shard": 8, "zero_stage": 1},
        {"dp_shard": 8, "zero_stage": 2},
        {"dp_shard": 4, "dp_replicate": 2, "zero_stage": 3},
        {"cp": 2, "dp_shard": 4, "zero_stage": 3},
        {"pp": 2, "tp": 2, "dp_shard": 2, "zero_stage": 3, "schedule": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("recompute", [0, 1, 2])
def test_all_three_agree_on_every_axis(axes: dict[str, int], recompute: int) -> None:
    values = row(**axes, recompute=recompute, microbatch_size=2, num_microbatches=4)
    strategy_devices = np.prod([values[a] for a in AXES])
    cluster = hosts((1, int(strategy_devices), device()), inside=1e10)
    model = CostModel(setting_for(uniform_graph(8), cluster))
    exact = model.cost(even(model, values))
    table = model.table(table_of([values]))
    assert table.step_time_s[0] == pytest.approx(exact.step_time_s, rel=0.01)
    assert table.memory_bytes[0] == pytest.approx(exact.peak_memory_bytes, rel=0.01)
    closed = model.cost(even(model, values), "analytic")
    assert closed.step_time_s == pytest.approx(exact.step_time_s, rel=0.01)


def test_breakdowns_sum_to_the_step() -> None:
    cluster = hosts((2, 4, device(backend="gloo")), slots=2.0)
    model = CostModel(setting_for(uniform_graph(32), cluster, grad_clip_norm=1.0))
    rows = pipelines(32)[::5]
    table = model.table(table_of(rows))
    assert table.parts_s.sum(axis=1) == pytest.approx(table.step_time_s)
    assert (table.parts_s >= 0).all()
    for values in rows:
        cost = model.cost(even(model, values))
        assert tuple(cost.breakdown_s) == PARTS
        assert sum(cost.breakdown_s.values()) == pytest.approx(cost.step_time_s)
        assert min(cost.breakdown_s.values()) >= -1e-12


def test_a_row_priced_alone_costs_what_it_costs_in_a_table() -> None:
    model = CostModel(setting_for(real_graph("llama3-8b"), hosts((2, 8, device()))))
    rows = [
        row(tp=tp, dp_shard=16 // tp, zero_stage=zero, recompute=r, num_microbatches=m)
        for tp in (1, 2, 8)
        for zero in (1, 2, 3)
        for r in (0, 1, 2)
        for m in (1, 4)
    ]
    together = model.table(table_of(rows))
    for index, values in enumerate(rows):
        alone = model.table(table_of([values]))
        assert alone.step_time_s[0] == pytest.approx(together.step_time_s[index])
        assert alone.memory_bytes[0] == pytest.approx(together.memory_bytes[index])


def test_evaluations_are_counted_by_fidelity() -> None:
    model = CostModel(setting_for(uniform_graph(8), NODE))
    rows = pipelines(8)
    model.table(table_of(rows))
    model.cost(even(model, rows[0]))
    model.cost(even(model, rows[0]), "analytic")
    assert model.evaluations == {"analytic": len(rows) + 1, "simulated": 1}


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (["layers.0"], "missing 'layers.1'"),
        (["layers.0", "layers.9", "layers.1"], "unknown 'layers.9'"),
        (["layers.1", "layers.0"], "the order differs"),
    ],
)
def test_stages_that_are_not_the_units_are_refused(
    modules: list[str], words: str
) -> None:
    model = CostModel(setting_for(uniform_graph(2), hosts((1, 1, device()))))
    given = Strategy.from_data({"stages": [{"rank": 0, "modules": modules}]})
    with pytest.raises(StrategyError, match=words):
        model.cost(given)


@pytest.mark.parametrize(
    ("pp", "shared"),
    # Two cores for four ranks. Replicas compute at once, each at half speed; ranks of
    # a pipeline take turns, and the bubble is the others' time on the cores.
    [(1, 1.0), (2, None), (4, None)],
)
def test_waiting_for_shared_cores_is_no_bubble(pp: int, shared: float | None) -> None:
    values = row(pp=pp, dp_replicate=4 // pp, num_microbatches=8, schedule=1)
    graph = uniform_graph(8)
    alone = CostModel(setting_for(graph, hosts((1, 4, device()))))
    # Messages that wait for their receiver's turn are part of the transfers.
    prompt = Recipe(name="prompt", core_wait_s=0.0)
    shared_host = hosts((1, 4, device()), slots=2.0)
    crowded = CostModel(setting_for(graph, shared_host, recipe=prompt))
    free, found = alone.cost(even(alone, values)), crowded.cost(even(crowded, values))
    for part in PARTS[: PARTS.index("shared_cores")]:
        assert found.breakdown_s[part] == pytest.approx(free.breakdown_s[part])
    assert free.breakdown_s["shared_cores"] == 0
    waited = found.breakdown_s["shared_cores"]
    if shared is not None:
        assert found.breakdown_s["pipeline_bubble"] == 0
        assert waited == pytest.approx(shared * free.breakdown_s["compute"])
    assert waited > 0
    table = crowded.table(table_of([values]))
    assert table.parts_s[0, PARTS.index("shared_cores")] == pytest.approx(waited)
