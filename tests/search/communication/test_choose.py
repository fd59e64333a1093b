"""Orders, parts and algorithms of sums are the best ones on their links."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.cluster.network import network_of
from planner.errors import StrategyError, TopologyError
from planner.schema.send_tables import direct, hierarchy, ring, tree
from planner.search.communication import (
    balanced_fractions,
    balanced_parts,
    candidates,
    choose,
    ring_order,
    slowest_link_s,
)
from planner.search.communication.orders import _good_tour
from planner.simulate.send_tables import Network, SharedLinks, table_seconds


def _even(ranks: int, latency_s: float = 0.0) -> Network:
    return Network(
        bandwidth=np.full((ranks, ranks), 1e9),
        latency=np.full((ranks, ranks), latency_s),
    )


def _uneven(ranks: int, seed: int) -> Network:
    rng = np.random.default_rng(seed)
    return Network(
        bandwidth=10 ** rng.uniform(8, 10, (ranks, ranks)),
        latency=10 ** rng.uniform(-5, -3, (ranks, ranks)),
    )


def test_a_ring_takes_what_the_formula_says() -> None:
    """2 (p - 1) (α + n / p β)."""
    seconds = table_seconds(ring(range(8)), _even(8, 1e-4), [1e3, 1e8])
    np.testing.assert_allclose(
        seconds, [14 * (1e-4 + 1e3 / 8e9), 14 * (1e-4 + 1e8 / 8e9)]
    )


def test_messages_of_a_host_share_its_interface() -> None:
    host = np.array([0, 0, 1, 1])
    links = SharedLinks(domain=host, capacity=np.array([1e9, 1e9]))
    network = Network(
        bandwidth=np.full((4, 4), 1e9), latency=np.zeros((4, 4)), shared=(links,)
    )
    # Each rank sends a quarter to each other: 4 quarters leave a host at once.
    seconds = table_seconds(direct([0.25] * 4), network, 1e9)
    assert seconds == pytest.approx(2 * 4 * 0.25)


def test_messages_that_take_turns_add_up() -> None:
    network = Network(
        bandwidth=np.full((4, 4), 1e9),
        latency=np.zeros((4, 4)),
        shared=(SharedLinks(domain=np.arange(4)),),
    )
    seconds = table_seconds(direct([0.25] * 4), network, 1e9)
    assert seconds == pytest.approx(2 * 3 * 0.25)


@pytest.mark.parametrize("ranks", [3, 5, 7])
@pytest.mark.parametrize("seed", range(5))
def test_the_ring_is_the_best_of_all(ranks: int, seed: int) -> None:
    network = _uneven(ranks, seed)
    seconds = network.latency + 1e6 / network.bandwidth
    best = min(
        slowest_link_s([0, *rest], seconds)
        for rest in itertools.permutations(range(1, ranks))
    )
    assert slowest_link_s(ring_order(network, 1e6), seconds) == best


@pytest.mark.parametrize("seed", range(20))
def test_grown_tours_come_near_the_best_where_that_is_known(seed: int) -> None:
    network = _uneven(10, seed)
    seconds = network.latency + 1e6 / network.bandwidth
    best = slowest_link_s(ring_order(network, 1e6), seconds)
    assert slowest_link_s(_good_tour(seconds), seconds) <= 1.3 * best


def test_a_ring_of_many_ranks_is_no_worse_than_their_order() -> None:
    network = _uneven(40, 0)
    seconds = network.latency + 1e6 / network.bandwidth
    order = ring_order(network, 1e6)
    assert sorted(order) == list(range(40))
    assert slowest_link_s(order, seconds) < slowest_link_s(list(range(40)), seconds)


def test_even_links_keep_the_order() -> None:
    assert ring_order(_even(12), 1e6) == list(range(12))


def _vectors() -> list[list[object]]:
    folder = os.environ.get("MESHWRIGHT_DATA")
    if folder is None:
        return []
    path = Path(folder) / "misc" / "hivemind_load_balance_vectors.json"
    return json.loads(path.read_text())["cases"] if path.exists() else []


@pytest.mark.skipif(not _vectors(), reason="set MESHWRIGHT_DATA")
def test_parts_are_those_of_hivemind() -> None:
    """Source: learning-at-home/hivemind, tests/test_averaging.py (MIT)."""
    for size, bandwidth, smallest, parts in _vectors():
        assert list(balanced_parts(size, bandwidth, smallest)) == parts  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(10))
def test_no_other_parts_are_faster(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0.1, 1.0, 6)
    parts = balanced_fractions(rates.tolist())
    assert parts.sum() == pytest.approx(1.0)
    slowest = ((1 + 4 * parts) / rates).max()
    for _ in range(200):
        other = rng.dirichlet(np.ones(6) * rng.uniform(0.2, 5))
        assert ((1 + 4 * other) / rates).max() >= slowest * (1 - 1e-12)


def test_parts_need_someone_to_sum() -> None:
    with pytest.raises(StrategyError, match="no rank can sum"):
        balanced_fractions([0.0, 0.0])
    with pytest.raises(StrategyError, match="0 or more"):
        balanced_fractions([1.0, -1.0])


@pytest.mark.parametrize("text", ["dgx-h100:2", "dtfm-5", "local:4"])
@pytest.mark.parametrize("size", [1e4, 1e8])
def test_the_choice_is_the_fastest_candidate_and_right(text: str, size: float) -> None:
    cluster = Cluster.parse(text)
    devices = np.arange(min(cluster.num_devices, 16))
    network = network_of(cluster.topology, devices)
    domains = [level[devices] for level in cluster.topology.domains]
    chosen = choose(network, domains, size)
    chosen.table.check()
    for one in candidates(network, domains, size):
        table = one.table(network.ranks)
        table.check()
        assert chosen.seconds <= float(table_seconds(table, network, size))


def test_short_messages_take_fewer_steps_than_long_ones() -> None:
    network = _even(16, 1e-3)
    short = choose(network, [], 1e2).table
    long = choose(network, [], 1e12).table
    assert short.steps < long.steps or short == long


def test_two_hosts_sum_inside_first_on_slow_links_between() -> None:
    cluster = Cluster.parse("dgx-a100:2")
    network = network_of(cluster.topology, np.arange(16))
    hosts = cluster.topology.domains[0].tolist()
    flat = table_seconds(direct([1 / 16] * 16), network, 1e9)
    inside_first = table_seconds(hierarchy(range(16), [hosts]), network, 1e9)
    assert inside_first < flat


def test_networks_are_checked() -> None:
    with pytest.raises(TopologyError, match="no bandwidth from rank 0 to rank 1"):
        Network(bandwidth=np.array([[1.0, 0.0], [1.0, 1.0]]), latency=np.zeros((2, 2)))
    with pytest.raises(TopologyError, match="for 3 ranks on a network of 4"):
        table_seconds(tree(range(3)), _even(4), 1.0)
