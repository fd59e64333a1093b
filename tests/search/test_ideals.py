"""Cuts along ideals against every order of the units, cut everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from planner.cost import CostModel
from planner.errors import StrategyError
from planner.graph import ModelGraph
from planner.schema.schedules import schedule_spec
from planner.search.exhaustive import ExhaustivePartitioner
from planner.search.ideals import best_chain, ideals_of
from planner.search.race import race
from planner.space import RECOMPUTE_NAMES, build_strategy, skeleton
from tests.cost.made import device, hosts, request_for, row, setting_for, uniform_graph
from tests.search.test_stages import uneven_graph, unit_costs, work


def towers(*sizes: int, seed: int | None = None) -> ModelGraph:
    """Chains side by side, and a last unit that reads the end of each."""
    units = sum(sizes) + 1
    graph = uniform_graph(units) if seed is None else uneven_graph(units, seed)
    edge, pairs = graph.edges[0], []
    for size, start in zip(sizes, np.cumsum([0, *sizes]).tolist(), strict=False):
        pairs += [(i, i + 1) for i in range(start, start + size - 1)]
        pairs += [(start + size - 1, units - 1)]
    edges = tuple(
        replace(edge, source=a, target=b, identities=(a,), sent=(edge.bytes,))
        for a, b in sorted(pairs)
    )
    return replace(graph, edges=edges)


def orders(graph: ModelGraph) -> Iterator[tuple[str, ...]]:
    """Every order in which the units may run."""
    for order in itertools.permutations(range(len(graph.units))):
        place = {unit: at for at, unit in enumerate(order)}
        if all(place[a] < place[b] for b, r in enumerate(graph.unit_reads) for a in r):
            yield tuple(graph.unit_names[unit] for unit in order)


@pytest.mark.parametrize("sizes", [(3, 2), (4, 4), (2, 2, 2)], ids=str)
def test_towers_have_as_many_ideals_as_pairs_of_prefixes(
    sizes: tuple[int, ...],
) -> None:
    ideals = ideals_of(towers(*sizes))
    assert ideals is not None
    # All units are one more than all towers.
    assert len(ideals.bits) == np.prod([size + 1 for size in sizes]) + 1
    assert not ideals.bits[0].any()
    assert ideals.bits[-1].all()


def test_chains_and_models_of_too_many_ideals_have_none() -> None:
    assert ideals_of(uniform_graph(8)) is None
    assert ideals_of(towers(*[1] * 12)) is None


def test_what_is_read_later_crosses_every_boundary_between() -> None:
    graph = towers(2, 2)
    size = graph.edges[0].bytes
    assert graph.cut_bytes.tolist() == [size, size, 2 * size, 2 * size]
    turned = graph.reordered([f"layers.{i}" for i in (0, 2, 1, 3, 4)])
    assert turned.cut_bytes.tolist() == [size, 2 * size, 2 * size, 2 * size]
    assert turned.reordered(graph.unit_names) == graph


def test_a_unit_before_one_that_it_reads_is_refused() -> None:
    names = [f"layers.{i}" for i in (0, 3, 2, 1, 4)]
    with pytest.raises(StrategyError, match=r"'layers.3' stands before 'layers.2'"):
        towers(2, 2).reordered(names)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.further) for n in (2, 3))]
)
@pytest.mark.parametrize("share", [1.0, 0.517, 0.5], ids=str)
def test_no_cut_of_any_order_beats_it(seed: int, share: float) -> None:
    cluster = hosts((2, 1, device(memory_bytes=3e9)))
    context = setting_for(towers(3, 2, seed=seed), cluster, memory_fraction=share)
    model, costs = CostModel(context), unit_costs(context)
    values = row(pp=2, schedule=schedule_spec("1F1B").code, num_microbatches=6)
    found = []
    for names in orders(context.graph):
        for cut in range(1, len(names)):
            for kinds in itertools.product(RECOMPUTE_NAMES, repeat=2):
                strategy = build_strategy(
                    values,
                    unit_names=names,
                    bounds=(0, cut, len(names)),
                    recompute=kinds,  # type: ignore[arg-type]
                )
                if model.cost(strategy).fits:
                    graph = context.graph.reordered(names)
                    turned = replace(context, graph=graph)
                    seconds = work(turned, unit_costs(turned), strategy)
                    found.append((float(seconds.max()), float(seconds.sum())))
    ideals = ideals_of(context.graph)
    assert ideals is not None
    bare = skeleton(values)
    chosen = best_chain(context, ideals, bare, costs, below_s=1e9)
    if not found:
        assert chosen is None
        return
    assert chosen is not None
    chain, recompute = chosen
    units = [
        np.flatnonzero(ideals.bits[b] & ~ideals.bits[a])
        for a, b in itertools.pairwise(chain)
    ]
    names = tuple(context.graph.unit_names[u] for part in units for u in part)
    strategy = build_strategy(
        values,
        unit_names=names,
        bounds=(0, len(units[0]), len(names)),
        recompute=[RECOMPUTE_NAMES[kind] for kind in recompute],  # type: ignore[misc]
    )
    assert model.cost(strategy).fits
    turned = replace(context, graph=context.graph.reordered(names))
    seconds = work(turned, unit_costs(turned), strategy)
    least = min(bottleneck for bottleneck, _ in found)
    total = min(s for b, s in found if b <= least * (1 + 1e-9))
    assert (seconds.max(), seconds.sum()) == pytest.approx((least, total), rel=1e-6)


def test_towers_share_stages_where_that_is_faster() -> None:
    # Works of 3 3 3 3 1 1 1 1 1: a line in four stages has one of 6, else 5 is enough.
    graph = towers(4, 4)
    heavy = tuple(
        replace(
            block,
            repeat="heavy",
            kernels=tuple(replace(k, count=3) for k in block.kernels),
        )
        if block.index < 4
        else block
        for block in graph.blocks
    )
    graph = replace(graph, blocks=heavy)
    cluster = hosts((1, 4, device()))
    pins = {"pp": 4, "schedule": schedule_spec("1F1B").code, "num_microbatches": 32}
    asked = request_for(graph, cluster, 32, pins=pins)
    found = ExhaustivePartitioner().search(asked).candidates
    steps = {}
    for one in reversed(found):
        listed = tuple(name for stage in one.strategy.stages for name in stage.modules)
        steps[listed == graph.unit_names] = one.cost.step_time_s
    assert steps[False] < 0.98 * steps[True]
    assert steps[False] == found[0].cost.step_time_s
    raced = race(asked, [ExhaustivePartitioner()])[0].candidates
    assert raced[0].cost.step_time_s == found[0].cost.step_time_s
    for target in ("megatron", "torchtitan"):
        for one in (
            ExhaustivePartitioner().search(replace(asked, target=target)).candidates
        ):
            listed = [name for stage in one.strategy.stages for name in stage.modules]
            assert tuple(listed) == graph.unit_names
