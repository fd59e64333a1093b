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


def test_experts_are_dealt_out_over_ranks_side_by_side() -> None:
    """Inputs of one tp group are among them, with shards of a sequence or all of it."""
    graph = _routed()
    setting = setting_for(graph, hosts((4, 8, device())))
    shards, whole, alone = (
        priced(graph, setting, tp=tp, ep=8, sequence_parallel=split).ep_s.sum()
        for tp, split in ((2, 1), (2, 0), (1, 0))
    )
    # Eight ranks share a host, whatever tp is.
    assert whole == pytest.approx(alone)
    assert shards == pytest.approx(whole / 2, rel=0.05)
