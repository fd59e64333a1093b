"""Prices of arrangements against each of them priced alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.cost import CostModel
from planner.cost.pipelines.flushed import has_textbook_time
from planner.schema.schedules import schedule_name, schedule_spec
from planner.search import Request
from planner.search.base import scores_of
from planner.search.device_order.layouts import find_layouts, orders_of
from planner.search.device_order.pricer import OrderPricer, open_order_pricer
from planner.search.device_order.subsets import Choices
from planner.space import MESH_COLUMNS, StrategyTable, expand_meshes, legal
from tests.cost.made import device, hosts, uniform_graph
from tests.search.device_order.made import far_sites, mixed_hosts, opened, prepared

CASES: dict[str, tuple[Cluster, dict[str, Any]]] = {
    "mixed": (mixed_hosts(), {}),
    "per device": (
        hosts((1, 2, device()), (2, 1, device("b"))),
        {"objective": "throughput_per_device"},
    ),
    "any": (
        hosts((1, 3, device()), (1, 1, device("b", memory_bytes=1e9))),
        {"devices": "any", "objective": "memory"},
    ),
    "sites": (far_sites(6, 2), {}),
    "occupied": (mixed_hosts().with_occupied([0, 4, 5, 8]), {}),
    "tight": (hosts((3, 2, device(memory_bytes=1.725e9))), {}),
}


def _alone(
    request: Request, table: StrategyTable, ids: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Scores of rows on devices in an order, by a model of that order alone."""
    costs = CostModel(replace(request.context, order=ids)).table(table)
    return scores_of(costs, table, request.objective)


def _mesh_rows(choices: Choices, request: Request, choice: int) -> StrategyTable:
    mesh = choices.mesh[[choice]]
    table = expand_meshes(mesh, request.facts, request.pins)
    if mesh[0, 0] > 1:
        eager = {"schedule": schedule_spec("Eager1F1B").code, "virtual_stages": 1}
        more = expand_meshes(mesh, request.facts, {**request.pins, **eager})
        table = StrategyTable.concatenate([table, more])
    return table[np.flatnonzero(has_textbook_time(table))]


@pytest.mark.parametrize("name", CASES)
def test_layouts_are_what_pricing_each_row_under_each_order_gives(name: str) -> None:
    cluster, changes = CASES[name]
    request, groups, choices = prepared(cluster, **changes)
    every = np.arange(len(choices))
    model = CostModel(request.context)
    layouts = find_layouts(request, model, groups, choices, every)
    assert layouts is not None
    priced, wanted = 0, {}
    for choice in every.tolist():
        subset = choices.subsets[choices.subset[choice]]
        table = _mesh_rows(choices, request, choice)
        if not len(table):
            continue
        orders = orders_of(request, groups, subset, int(choices.mesh[choice, 0]))
        ids = groups.orders(orders, subset.count)
        scores = np.stack([_alone(request, table, order) for order in ids])
        priced += scores.size
        if np.isfinite(scores).any():
            wanted[choice] = scores
    assert model.evaluations["analytic"] == priced
    assert sorted(layouts.choice.tolist()) == sorted(wanted)
    assert (np.diff(layouts.score) >= 0).all()
    for at, choice in enumerate(layouts.choice.tolist()):
        subset = choices.subsets[choices.subset[choice]]
        best = wanted[choice].min(axis=0)
        rows = layouts.rows[slice(*layouts.starts[at : at + 2].tolist())]
        assert layouts.score[at] == pytest.approx(best.min(), rel=1e-12)
        assert layouts.count[at] == subset.count
        assert (layouts.usable[at] == subset.usable).all()
        mesh = [int(getattr(rows, column)[0]) for column in MESH_COLUMNS]
        assert mesh == choices.mesh[choice].tolist()
        # Its rows are the best of the mesh, best first, and the one of least memory.
        kept = np.sort(best[np.isfinite(best)])[:4]
        assert len(rows) in {len(kept), 5}
        orders = orders_of(request, groups, subset, mesh[0])
        ids = groups.orders(orders, subset.count)
        again = np.stack([_alone(request, rows, order) for order in ids]).min(axis=0)
        assert again[: len(kept)] == pytest.approx(kept, rel=1e-12)
        model = CostModel(replace(request.context, order=ids[0]))
        whole = _mesh_rows(choices, request, choice)[np.flatnonzero(np.isfinite(best))]
        least = model.table(whole).memory_bytes.min()
        assert model.table(rows).memory_bytes.min() == pytest.approx(least, rel=1e-12)
        ids = groups.orders(layouts.sequence[[at]], subset.count)
        assert _alone(request, rows, ids[0])[0] == pytest.approx(layouts.score[at])


def test_pipelines_within_sites_are_among_the_orders() -> None:
    """Three sites of two groups: six stages of one group, then two of three."""
    request, groups, choices = prepared(far_sites(6, 3))
    subset = choices.subsets[0]
    assert orders_of(request, groups, subset, 1) is subset.sequences
    assert orders_of(request, groups, subset, 6) is subset.sequences
    orders = orders_of(request, groups, subset, 2)
    assert (orders[:-1] == subset.sequences).all()
    first, second = orders[-1].reshape(2, 3)
    for left, right in zip(first, second, strict=True):
        others = np.delete(groups.bandwidth[left], [left, right])
        assert groups.bandwidth[left, right] > others.max()
    # On equal links it is no other order.
    request, groups, choices = prepared(mixed_hosts())
    subset = choices.subsets[0]
    assert orders_of(request, groups, subset, 2) is subset.sequences


def _drawn(pricer: OrderPricer, count: int, seed: int) -> tuple[Any, Any]:
    """Random arrangements."""
    rng = np.random.default_rng(seed)
    layouts = pricer.layouts
    layout = rng.integers(len(layouts), size=count)
    sequence = np.full((count, len(pricer.groups)), -1, dtype=np.int64)
    for row, at in enumerate(layout.tolist()):
        members = rng.permutation(np.flatnonzero(layouts.usable[at]))
        sequence[row, : len(members)] = members
    return layout, sequence


@pytest.mark.parametrize("name", CASES)
def test_prices_are_those_of_the_best_row_priced_alone(name: str) -> None:
    cluster, changes = CASES[name]
    pricer, _ = opened(cluster, **changes)
    layouts, request = pricer.layouts, pricer.request
    layout, sequence = _drawn(pricer, 60, seed=1)
    before = pricer.model.evaluations["analytic"]
    priced = pricer.price(layout, sequence)
    many = (layouts.starts[layout + 1] - layouts.starts[layout]).sum()
    assert pricer.model.evaluations["analytic"] - before == many
    for at in range(len(priced)):
        start, stop = layouts.starts[layout[at] : layout[at] + 2].tolist()
        ids = pricer.groups.orders(sequence[[at]], int(layouts.count[layout[at]]))
        scores = _alone(request, layouts.rows[start:stop], ids[0])
        assert priced.score[at] == pytest.approx(scores.min(), rel=1e-12)
        assert start <= priced.row[at] < stop
        if np.isfinite(scores.min()):
            again = scores[priced.row[at] - start]
            assert again == pytest.approx(scores.min(), rel=1e-12)
    assert (priced.layout == layout).all()
    assert (priced.sequence == sequence).all()


def test_an_order_under_which_nothing_fits_is_priced_as_infinite() -> None:
    """A slow small device fits where few microbatches are held, not in front."""
    small = device("small", memory_bytes=1.725e9)
    cluster = hosts((1, 1, device()), (1, 1, small), (1, 1, device()))
    pricer, _ = opened(cluster, pins={"pp": 3}, units=8)
    orders = np.array([[0, 1, 2], [1, 0, 2], [2, 0, 1], [0, 2, 1]])
    by_layout = [
        pricer.price(np.full(4, at), orders).score for at in range(len(pricer.layouts))
    ]
    scores = np.stack(by_layout)
    assert np.isfinite(scores).any(axis=1).all()
    assert np.isinf(scores).any()


def test_the_best_layouts_are_priced_as_among_all() -> None:
    pricer, _ = opened(mixed_hosts())
    few = pricer.with_best(3)
    assert len(few.layouts) == 3
    assert len(few.layouts.rows) == few.layouts.starts[-1]
    layout, sequence = _drawn(few, 20, seed=2)
    some, whole = few.price(layout, sequence), pricer.price(layout, sequence)
    assert (some.score == whole.score).all()
    assert (some.row == whole.row).all()
    assert len(pricer.with_best(10_000).layouts) == len(pricer.layouts)


@pytest.mark.parametrize("variants", [False, True])
@pytest.mark.parametrize("name", ["mixed", "any", "sites", "occupied"])
def test_exact_candidates_are_legal_and_keep_the_order(
    name: str, variants: bool
) -> None:
    cluster, changes = CASES[name]
    pricer, _ = opened(cluster, **changes)
    layout, sequence = _drawn(pricer, 8, seed=3)
    priced = pricer.price(layout, sequence)
    simulated = pricer.model.evaluations["simulated"]
    total = 0
    for at in np.flatnonzero(np.isfinite(priced.score)).tolist():
        found = pricer.best_row_candidates(priced, at, variants=variants)
        count = int(pricer.layouts.count[layout[at]])
        ids = pricer.groups.orders(sequence[[at]], count)[0]
        table = StrategyTable.from_strategies([one.strategy for one in found])
        assert legal(table, pricer.request.facts).all()
        model = CostModel(replace(pricer.request.context, order=ids))
        row = pricer.layouts.rows.row(int(priced.row[at]))
        for one in found:
            assert one.strategy.device_ids() == tuple(ids.tolist())
            assert one.strategy.mesh.pp == row["pp"]
            assert one.cost.fidelity == "simulated"
            alone = model.cost(one.strategy)
            assert one.cost.step_time_s == pytest.approx(alone.step_time_s, rel=1e-12)
            names = {schedule_name(row["schedule"])}
            assert variants or one.strategy.schedule in names
        total += len(found)
    assert total > 0
    assert pricer.model.evaluations["simulated"] - simulated >= total


def test_variants_are_other_schedules_unless_one_is_pinned() -> None:
    pricer, _ = opened(mixed_hosts(), pins={"pp": 2})
    priced = pricer.price(np.zeros(1, np.int64), pricer.layouts.sequence[:1])
    plain = pricer.best_row_candidates(priced, 0, variants=False)
    more = pricer.best_row_candidates(priced, 0, variants=True)
    assert len({one.strategy.schedule for one in plain}) == 1
    assert len({one.strategy.schedule for one in more}) > 1
    pinned, _ = opened(mixed_hosts(), pins={"pp": 2, "schedule": 1})
    priced = pinned.price(np.zeros(1, np.int64), pinned.layouts.sequence[:1])
    found = pinned.best_row_candidates(priced, 0, variants=True)
    assert {one.strategy.schedule for one in found} == {schedule_name(1)}


def test_nothing_that_fits_opens_no_arranger() -> None:
    request, groups, choices = prepared(hosts((2, 2, device(memory_bytes=1e6))))
    assert len(choices)
    every = np.arange(len(choices))
    assert open_order_pricer(request, choices, groups, every) is None
    assert open_order_pricer(request, choices, groups, every[:0]) is None


def test_a_model_of_one_block_has_no_pipeline() -> None:
    pricer, choices = opened(mixed_hosts(), graph=uniform_graph(1))
    assert set(choices.mesh[:, 0].tolist()) == {1}
    priced = pricer.price(np.zeros(1, np.int64), pricer.layouts.sequence[:1])
    (best,) = pricer.best_row_candidates(priced, 0, variants=True)
    assert best.strategy.mesh.pp == 1


def test_there_are_never_more_stages_than_blocks() -> None:
    pricer, choices = opened(hosts((16, 1, device())), units=3, global_batch=16)
    assert choices.mesh[:, 0].max() <= 3
    rows = pricer.layouts.rows
    assert (rows.pp * rows.virtual_stages <= 3).all()
    _, _, none = prepared(hosts((16, 1, device())), units=3, pins={"pp": 16})
    assert len(none) == 0
