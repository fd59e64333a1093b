"""Weights averaged with a few copies a step, against closed forms and a simulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.cost import Cost, PricingContext
from planner.cost.replicas.gossip import run_s
from planner.schema import Precision
from planner.schema.methods.gossip import Gossip, rounds_of
from planner.space import Regime
from tests.cost.made import (
    device,
    hosts,
    price_both_ways,
    setting_for,
    uniform_graph,
)

LONELY = hosts((8, 1, device()), between=1e8)
#: 4 copies on each of 2 hosts, at 1 GB/s inside and 0.1 GB/s a device between.
PAIRED = hosts((2, 4, device()), inside=1e9, between=1e8)
WEIGHTS = 4.0 * 16 * 512**2
FULL = Precision(compute="float32")
TOPOLOGIES = ("complete", "ring", "exponential", "exponential_ring")
EVERYWHERE = pytest.mark.parametrize("topology", TOPOLOGIES)


def context_of(regime: Regime, cluster: Any) -> PricingContext:
    return setting_for(uniform_graph(8), cluster, regime=regime, precision=FULL)


def priced(
    pin: str, cluster: Any = LONELY, **degrees: int
) -> tuple[Cost, dict[str, float], float]:
    """See :func:`price_both_ways`."""
    regime = Regime.from_pins({"synchronisation": pin})
    return price_both_ways(context_of(regime, cluster), **degrees)


def exchanges_s(topology: Any) -> list[float]:
    """Seconds of each round of 8 copies on 2 hosts, at 2 (G - 1)/G W over links."""
    inside, between = WEIGHTS / 1e9, WEIGHTS / 1e8
    # Host by host, then 4 parts between hosts at once: faster than one ring of 8.
    both = 2 * 3 / 4 * inside + between / 4
    assert both < 2 * 7 / 8 * between / 4
    return {
        "complete": [both],
        # In every other round two of the pairs cross, at one device each.
        "ring": [inside, between],
        "exponential": [inside, inside, between],
        "exponential_ring": [2 * 3 / 4 * inside, both],
    }[topology]


@EVERYWHERE
def test_a_mean_step_pays_what_compute_does_not_hide(topology: Any) -> None:
    cost, parts, _ = priced(f"gossip:topology={topology}", PAIRED, dp_replicate=8)
    compute = cost.breakdown_s["compute"]
    exposed = np.mean([max(0.0, t - compute) for t in exchanges_s(topology)])
    assert cost.breakdown_s["data_parallel"] == pytest.approx(exposed, rel=1e-9)
    assert parts["data_parallel"] == pytest.approx(exposed, rel=1e-9)


@pytest.mark.parametrize(
    ("topology", "sizes"),
    [
        ("complete", [8]),
        ("ring", [2]),
        ("exponential", [2]),
        ("exponential_ring", [4, 8]),
    ],
)
def test_bytes_are_those_of_all_reduces_over_the_groups(
    topology: str, sizes: list[int]
) -> None:
    cost, *_ = priced(f"gossip:topology={topology}", PAIRED, dp_replicate=8)
    assert cost.collective_bytes == {"all_reduce": WEIGHTS}
    sent = np.mean([2 * (size - 1) / size for size in sizes]) * WEIGHTS
    assert cost.link_bytes["dp"] == pytest.approx(sent)
    expected = Gossip().expected_traffic(gradients=0.0, weights=WEIGHTS)
    assert expected == {"all_reduce": WEIGHTS}


@EVERYWHERE
def test_an_exchange_hides_under_a_longer_step(topology: str) -> None:
    fast = hosts((2, 4, device()), inside=1e12, between=1e12)
    cost, parts, _ = priced(f"gossip:topology={topology}", fast, dp_replicate=8)
    assert cost.breakdown_s["data_parallel"] == 0 == parts["data_parallel"]


@EVERYWHERE
@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_replicate": 8},
        {"dp_replicate": 4, "dp_shard": 2, "zero_stage": 3},
        {"dp_replicate": 4, "pp": 2, "num_microbatches": 4},
        {"dp_replicate": 4, "tp": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("cluster", [LONELY, PAIRED], ids=["lonely", "paired"])
def test_a_table_prices_it_as_a_strategy_is_priced(
    topology: str, degrees: dict[str, int], cluster: Any
) -> None:
    cost, parts, _ = priced(f"gossip:topology={topology}", cluster, **degrees)
    found = cost.breakdown_s["data_parallel"]
    # Between lonely hosts tp takes so long that exchanges hide under it.
    assert (found > 0) != ("tp" in degrees and cluster is LONELY)
    assert parts["data_parallel"] == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("shard", [1, 2])
def test_what_is_sent_lies_beside_the_weights(shard: int) -> None:
    degrees = {"dp_replicate": 8 // shard, "dp_shard": shard}
    degrees |= {"zero_stage": 3} if shard > 1 else {}
    plain, _, plain_memory = priced("local_steps", **degrees)
    for pin, copies in (("gossip", 1), ("gossip:commit_every=4", 2)):
        cost, _, memory = priced(pin, **degrees)
        kept = copies * WEIGHTS / shard
        assert cost.memory.gradients - plain.memory.gradients == pytest.approx(kept)
        assert memory - plain_memory == pytest.approx(kept, abs=1.0)


# -- Copies of unlike speed ------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("exchange", [0.25, 1.5])
def test_copies_of_one_speed_take_what_is_priced(
    topology: Any, exchange: float
) -> None:
    rounds = rounds_of(topology, 8, 4)
    found = run_s(np.ones((60, 8)), exchange, rounds)
    assert found == pytest.approx(60 * max(1.0, exchange))


@EVERYWHERE
@pytest.mark.parametrize("exchange", [0.1, 0.5])
def test_a_copy_that_is_late_for_once_costs_less_than_half(
    topology: Any, exchange: float
) -> None:
    """In each step one of 8 copies takes twice as long: all-reduce waits for it."""
    compute = np.ones((400, 8))
    compute[np.arange(400), np.random.default_rng(0).integers(8, size=400)] = 2
    lost = compute.max(axis=1).sum() - 400
    assert lost == 400
    rounds = rounds_of(topology, 8, 4)
    assert run_s(compute, exchange, rounds).max() - 400 < 0.5 * lost


def test_lateness_reaches_neighbours_first() -> None:
    """A ring of 8 copies, of which the third is late by 2 steps in the first."""
    compute = np.ones((3, 8))
    compute[0, 2] = 3
    rounds = rounds_of("ring", 8)
    ends = [run_s(compute[:steps], 0.5, rounds).tolist() for steps in (1, 2, 3)]
    # Its partners of the second round and of the third wait for what it sends.
    assert ends[0] == [1, 1, 3, 1, 1, 1, 1, 1]
    assert ends[1] == [2, 3.5, 4, 2, 2, 2, 2, 2]
    assert ends[2] == [4, 4.5, 5, 4.5, 3, 3, 3, 3]


@EVERYWHERE
def test_a_copy_that_is_always_slow_slows_all(topology: Any) -> None:
    compute = np.ones((200, 8))
    compute[:, 0] = 2
    found = run_s(compute, 0.1, rounds_of(topology, 8))
    assert found.min() >= 2 * 200 - 16
