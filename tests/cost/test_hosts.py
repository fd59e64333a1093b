"""Price of launching kernels, exposed and hidden."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.constants import Calibration, DeviceConstants
from planner.cost.recipes import RECIPES
from planner.cost.units import UnitCosts
from planner.graph import Block, ModelGraph
from tests.cost.made import device, hosts, setting_for, uniform_graph
from tests.cost.test_units import priced, with_blocks


def _under(graph: ModelGraph, **facts: float) -> UnitCosts:
    """Its units where a launch takes a microsecond, under a recipe's facts."""
    cluster = hosts((2, 8, device(kernel_overhead_s=1e-6)))
    recipe = replace(RECIPES["torch"], **facts)
    return priced(graph, setting_for(graph, cluster, recipe=recipe))


def test_a_host_hides_behind_kernels_that_take_longer() -> None:
    graph = uniform_graph(2)
    cluster = hosts((2, 8, device(kernel_overhead_s=1e-6)))
    times = {
        launch: priced(
            graph,
            setting_for(
                graph, cluster, recipe=replace(RECIPES["torch"], launch=launch)
            ),
        )
        for launch in (1.0, 4.0, 1000.0)
    }
    # Three kernels a unit: two products and one of memory; backward has two a product.
    assert (times[4.0].forward_s == times[1.0].forward_s).all()
    assert times[1000.0].forward_s == pytest.approx(np.full((1, 1, 2), 3e-3))
    assert times[1000.0].backward_s == pytest.approx(np.full((1, 1, 2), 5e-3))


def test_experts_wait_for_the_host() -> None:
    graph = with_blocks(uniform_graph(2), kind="expert")
    once, often = (_under(graph, launch=launch) for launch in (1.0, 5.0))
    assert often.forward_s == pytest.approx(once.forward_s + 3 * 4e-6)


def test_a_queue_hides_a_host_behind_kernels_of_other_blocks() -> None:
    many = uniform_graph(2)
    first, second = many.blocks
    longer = tuple(
        replace(k, forward_flops=1e3 * k.forward_flops) for k in second.kernels
    )
    blocks = (first, replace(second, kernels=longer, repeat="long"))
    joined = tuple(replace(block, layer=first.layer) for block in blocks)
    cluster = hosts((2, 8, device(kernel_overhead_s=1e-6)))

    def forward_s(blocks: tuple[Block, ...], launch: float) -> float:
        recipe = replace(RECIPES["torch"], launch=launch)
        graph = replace(many, blocks=blocks)
        costs = priced(graph, setting_for(graph, cluster, recipe=recipe))
        return float(costs.forward_s.sum())

    # A launch takes longer than the first block's kernels, not than the second's.
    assert forward_s(blocks, 500.0) > forward_s(blocks, 1.0) + 1e-3
    assert forward_s(joined, 500.0) == forward_s(joined, 1.0)


def test_graphs_play_launches_back() -> None:
    plain, routed = uniform_graph(2), with_blocks(uniform_graph(2), kind="expert")
    cluster = hosts((2, 8, device(kernel_overhead_s=1e-6)))

    def forward_s(graph: ModelGraph, **facts: float) -> np.ndarray:
        recipe = replace(RECIPES["torch"], **{"launch": 1000.0, **facts})
        return priced(graph, setting_for(graph, cluster, recipe=recipe)).forward_s

    device_s = forward_s(plain, launch=0.0)
    assert (forward_s(plain, captured=1.0) == device_s).all()
    assert (forward_s(routed, captured=1.0) == forward_s(routed)).all()
    half = forward_s(routed, captured_routing=0.5)
    assert half == pytest.approx(forward_s(routed) - 1.5e-3)
    # Nobody waits for routing once all of it is in a graph.
    assert (forward_s(routed, captured_routing=1.0) == device_s).all()


def test_layers_in_pieces_have_more_launches() -> None:
    graph = with_blocks(uniform_graph(2), kind="expert")
    once, more = (
        _under(graph, launch=10.0, launches=launches) for launches in (1.0, 1.5)
    )
    assert more.forward_s == pytest.approx(once.forward_s + 3 * 5e-6)


def test_a_blocking_host_waits_for_every_kernel() -> None:
    graph, recipe = uniform_graph(2), replace(RECIPES["torch"], launch=2.0)
    cluster = hosts((2, 8, device(kernel_overhead_s=1e-6)))
    free, blocked = (
        priced(graph, setting_for(graph, cluster, recipe=replace(recipe, blocking=b)))
        for b in (False, True)
    )
    assert blocked.forward_s == pytest.approx(free.forward_s + 3 * 2e-6)
    assert blocked.backward_s == pytest.approx(free.backward_s + 5 * 2e-6)


def test_some_devices_stand_in_slower_hosts() -> None:
    graph = with_blocks(uniform_graph(2), kind="expert")
    cluster = hosts((1, 8, device(kernel_overhead_s=1e-6)))
    recipe = replace(RECIPES["torch"], launch=2.0)

    def forward_s(overhead: float) -> np.ndarray:
        constants = DeviceConstants(
            matmul_efficiency=1.0, attention_efficiency=1.0, host_overhead=overhead
        )
        fitted = Calibration(name="made", default=constants)
        setting = setting_for(graph, cluster, recipe=recipe, calibration=fitted)
        return priced(graph, setting).forward_s

    assert forward_s(3.0) == pytest.approx(forward_s(1.0) + 2 * 3 * 2e-6)
