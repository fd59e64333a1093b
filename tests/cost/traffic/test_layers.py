"""Exposed time and traffic across hosts of the exchanges of layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.recipes import RECIPES
from planner.cost.traffic.layers import exposed_exchanges
from planner.cost.units import UnitCosts
from planner.graph import ModelGraph
from tests.cost.made import HIDDEN, device, hosts, setting_for, uniform_graph
from tests.cost.test_units import priced, with_blocks

ONE = np.ones((1, 1))


@pytest.mark.parametrize(
    ("share", "exchanged", "exposed"),
    [
        (0.0, 2.0, 2.0),
        (0.5, 2.0, 1.0),
        # No more hides than there is compute: 1 and 2 seconds beside two exchanges.
        (0.9, 4.0, 2.5),
    ],
)
def test_exchanges_hide_as_long_as_there_is_compute(
    share: float, exchanged: float, exposed: float
) -> None:
    recipe = replace(RECIPES["torch"], expert_overlap=share)
    found = exposed_exchanges(recipe, exchanged * ONE, ONE, 2 * ONE)
    assert found == pytest.approx(exposed * ONE)


def _routed() -> ModelGraph:
    return replace(
        with_blocks(
            uniform_graph(2), expert_bytes=1e9, expert_parameter_count=HIDDEN * HIDDEN
        ),
        num_experts=16,
    )


def _priced(ep: int, *, kind: str = "other", **facts: float) -> UnitCosts:
    graph = with_blocks(_routed(), kind=kind)
    recipe = replace(RECIPES["torch"], **facts)
    setting = setting_for(graph, hosts((2, 8, device())), recipe=recipe)
    return priced(graph, setting, ep=ep)


def test_a_token_that_goes_to_a_host_once_spares_the_network() -> None:
    every, once = (_priced(16, routed_share=share).ep_s for share in (1.0, 0.5))
    assert (once < every).all()
    # Inside a host nothing is spared.
    inside = [_priced(8, routed_share=share).ep_s for share in (1.0, 0.5)]
    assert (inside[0] == inside[1]).all()


def test_all_wait_for_the_busiest_experts() -> None:
    even, uneven = (
        _priced(16, kind="expert", imbalance=imbalance) for imbalance in (1.0, 1.5)
    )
    assert uneven.ep_s == pytest.approx(1.5 * even.ep_s)
    assert uneven.forward_s == pytest.approx(1.5 * even.forward_s)
    assert (uneven.ep_bytes == even.ep_bytes).all()


def test_shards_of_a_sequence_have_experts_of_their_own() -> None:
    """Megatron-LM: ep counts ranks side by side, those of one tp group among them."""
    graph = _routed()
    seconds = {}
    for on_shards in (False, True):
        recipe = replace(RECIPES["torch"], experts_on_shards=on_shards)
        setting = setting_for(graph, hosts((4, 8, device())), recipe=recipe)
        for split in (0, 1):
            found = priced(graph, setting, tp=2, ep=8, sequence_parallel=split)
            seconds[on_shards, split] = found.ep_s.sum()
    # Eight ranks side by side share a host, eight every other rank do not.
    assert seconds[True, 1] < seconds[False, 1] / 2
    assert seconds[True, 0] == seconds[False, 0]
