"""The exact cut against every cut with every choice of recomputation."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.cost import CostModel, PricingContext
from planner.cost.strategy.stages import Stages
from planner.cost.units import UnitCosts
from planner.graph import ModelGraph
from planner.schema import Strategy
from planner.schema.schedules import schedule_spec
from planner.search.stages import best_cut
from planner.simulate import actions
from planner.space import RECOMPUTE_NAMES, build_strategy, skeleton
from tests.cost.made import device, hosts, row, setting_for, uniform_graph


def uneven_graph(units: int, seed: int) -> ModelGraph:
    """Units of 1 to 5 layers' work that keep 0.2 to 2 times a layer's bytes."""
    rng = np.random.default_rng(seed)
    graph = uniform_graph(units)
    blocks = []
    for block in graph.blocks:
        count, share = int(rng.integers(1, 6)), float(rng.uniform(0.2, 2))
        kernels = tuple(replace(k, count=count) for k in block.kernels)
        names = ("saved_bytes", "saved_tensor_bytes", "saved_selective_bytes")
        kept = {name: getattr(block, name) * share for name in names}
        kept["saved_selective_tensor_bytes"] = 0.0
        blocks.append(replace(block, repeat="", kernels=kernels, **kept))
    return replace(graph, blocks=tuple(blocks))


def unit_costs(context: PricingContext) -> UnitCosts:
    return CostModel(context).unit_costs(
        tp=1, cp=1, ep=1, microbatch=1, sequence_parallel=False
    )


def work(context: PricingContext, costs: UnitCosts, strategy: Strategy) -> np.ndarray:
    times = Stages(context=context, strategy=strategy, costs=costs).times
    return times.forward + times.backward


def brute_force(
    model: CostModel, costs: UnitCosts, values: dict[str, int]
) -> tuple[float, float] | None:
    """Least bottleneck of all that fit, and the least sum that reaches it."""
    names = model.context.graph.unit_names
    units, stages = len(names), values["pp"]
    found = []
    for cut in itertools.combinations(range(1, units), stages - 1):
        for kinds in itertools.product(RECOMPUTE_NAMES, repeat=stages):
            strategy = build_strategy(
                values,
                unit_names=names,
                bounds=(0, *cut, units),
                recompute=kinds,  # type: ignore[arg-type]
            )
            if model.cost(strategy).fits:
                seconds = work(model.context, costs, strategy)
                found.append((float(seconds.max()), float(seconds.sum())))
    if not found:
        return None
    bottleneck = min(found)[0]
    return bottleneck, min(s for b, s in found if b <= bottleneck * (1 + 1e-9))


UNIFORM = hosts((3, 1, device(memory_bytes=3e9)))
MIXED = hosts(
    (2, 1, device(memory_bytes=3e9)),
    (1, 1, device("slow", peak_flops_per_s={"bfloat16": 4e13}, memory_bytes=2e9)),
)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("cluster", [UNIFORM, MIXED], ids=["uniform", "mixed"])
@pytest.mark.parametrize("share", [1.0, 0.52, 0.515, 0.5], ids=str)
def test_no_cut_beats_it(seed: int, cluster: Cluster, share: float) -> None:
    # 1.5 GB are reserve; from roomy over tight to hopeless.
    context = setting_for(uneven_graph(4, seed), cluster, memory_fraction=share)
    model, costs = CostModel(context), unit_costs(context)
    values = row(pp=3, schedule=schedule_spec("1F1B").code, num_microbatches=6)
    best = brute_force(model, costs, values)
    cut = best_cut(context, skeleton(values), costs, actions("1F1B", 3, 1, 6))
    if best is None:
        assert cut is None
        return
    assert cut is not None
    strategy = build_strategy(
        values,
        unit_names=context.graph.unit_names,
        bounds=cut.bounds,
        recompute=cut.recompute,
    )
    assert model.cost(strategy).fits
    seconds = work(context, costs, strategy)
    assert (seconds.max(), seconds.sum()) == pytest.approx(best, rel=1e-6)


def test_the_memory_limits_cover_roomy_tight_and_hopeless() -> None:
    kinds = set()
    for share in (1.0, 0.52, 0.515, 0.5):
        context = setting_for(uneven_graph(4, 0), UNIFORM, memory_fraction=share)
        values = row(pp=3, schedule=schedule_spec("1F1B").code, num_microbatches=6)
        costs = unit_costs(context)
        cut = best_cut(context, skeleton(values), costs, actions("1F1B", 3, 1, 6))
        kinds.add("hopeless" if cut is None else "+".join(sorted(set(cut.recompute))))
    assert {"none", "hopeless"} < kinds, kinds


def test_only_the_kinds_that_are_allowed_are_chosen() -> None:
    context = setting_for(uneven_graph(4, 0), UNIFORM)
    values = row(pp=3, schedule=schedule_spec("1F1B").code, num_microbatches=6)
    table = actions("1F1B", 3, 1, 6)
    costs = unit_costs(context)
    cut = best_cut(context, skeleton(values), costs, table, kinds=(2,))
    assert cut is not None
    assert set(cut.recompute) == {"full"}


def test_a_faster_device_gets_more_units() -> None:
    slow = device("slow", peak_flops_per_s={"bfloat16": 2e13})
    context = setting_for(uniform_graph(24), hosts((1, 1, device()), (1, 1, slow)))
    values = row(pp=2, schedule=schedule_spec("1F1B").code, num_microbatches=8)
    table = actions("1F1B", 2, 1, 8)
    cut = best_cut(context, skeleton(values), unit_costs(context), table)
    assert cut is not None
    first, second = np.diff(cut.bounds)
    assert first > 3 * second


def test_as_many_stages_as_units() -> None:
    context = setting_for(uniform_graph(4), hosts((1, 4, device())))
    values = row(pp=4, schedule=schedule_spec("1F1B").code, num_microbatches=4)
    table = actions("1F1B", 4, 1, 4)
    cut = best_cut(context, skeleton(values), unit_costs(context), table)
    assert cut is not None
    assert cut.bounds == (0, 1, 2, 3, 4)
