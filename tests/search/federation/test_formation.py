"""Formation of members: the paper's algorithm, and exact cuts of orders."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planner import Cluster
from planner.cluster import device_type
from planner.errors import ClusterError
from planner.request import PlanOptions, make_request
from planner.search.base import GroupOrderer, get_partitioner
from planner.search.federation import (
    Nodes,
    SegmentPricer,
    balance,
    best_divisions,
    cut_evenly,
    divide,
    genetic_search,
    spread_of,
)
from planner.search.federation.genetic import fitness_of
from planner.search.federation.segments import _OrderSearch, _plain_orders
from tests.plans import gpt2_graph

GB = 1024


def _nodes(count: int, seed: int) -> Nodes:
    random = np.random.default_rng(seed)
    return Nodes(
        ram_mb=random.choice([8, 12, 16, 24, 48, 80], count) * GB,
        bandwidth_mbit_per_s=random.choice([10, 50, 100, 500, 1000, 10_000], count),
    )


# -- The genetic algorithm -------------------------------------------------------------


def test_the_fitness_is_that_of_the_paper() -> None:
    """Two clusters of three; cluster 2 has no node and counts for nothing."""
    nodes = Nodes(
        ram_mb=np.array([1000, 2000, 700]),
        bandwidth_mbit_per_s=np.array([3, 100, 200]),
    )
    genes = np.array([[0, 0, 1], [0, 0, 0]])
    # Seconds 1000 // 3 + 2000 // 100 and 700 // 200; the second lacks 300 MB.
    expected = [100 * 300 + (333 + 20) - 3, 0]
    assert fitness_of(genes, nodes, 1000, 3).tolist() == expected


def test_the_best_of_all_generations_is_kept_and_seeded() -> None:
    nodes = _nodes(10, 1)
    long = genetic_search(nodes, 20 * GB, seed=3, generations=60)
    again = genetic_search(nodes, 20 * GB, seed=3, generations=60)
    short = genetic_search(nodes, 20 * GB, seed=3, generations=5)
    assert long.cluster.tolist() == again.cluster.tolist()
    assert long.fitness <= short.fitness
    found = fitness_of(long.cluster[None], nodes, 20 * GB, 5)
    assert found.tolist() == [long.fitness]
    assert sorted(i for one in long.clusters for i in one) == [*range(10)]


def test_it_finds_the_best_of_few_nodes() -> None:
    nodes = _nodes(5, 2)
    every = np.array(list(itertools.product(range(3), repeat=5)))
    least = fitness_of(every, nodes, 90 * GB, 3).min()
    found = genetic_search(nodes, 90 * GB, most_clusters=3, generations=100)
    assert found.fitness == least


def test_nodes_without_a_connection_are_refused() -> None:
    with pytest.raises(ClusterError, match="node 1 has a bandwidth of 0 Mb/s"):
        Nodes(ram_mb=np.array([8, 8]), bandwidth_mbit_per_s=np.array([1, 0]))


@pytest.mark.parametrize("seed", range(6))
def test_balanced_clusters_are_no_further_apart_than_the_papers(seed: int) -> None:
    nodes = _nodes(9 + seed, seed)
    paper = genetic_search(nodes, 24 * GB, seed=seed)
    count = len(paper.clusters)
    mine = balance(nodes, 24 * GB, count, seed=seed)
    assert sorted(set(mine.tolist())) == [*range(count)]
    for cluster in range(count):
        assert nodes.ram_mb[mine == cluster].sum() >= 24 * GB
    assert spread_of(mine, nodes) <= spread_of(paper.cluster, nodes)


# -- Segments --------------------------------------------------------------------------


def _brute(
    rate: np.ndarray, exchange_s: np.ndarray, batch: int, period: int, members: int
) -> float:
    count, least = len(rate), np.inf
    pairs = list(itertools.combinations(range(count + 1), 2))
    for cuts in itertools.combinations(pairs, members):
        apart = all(a[1] <= b[0] for a, b in itertools.pairwise(cuts))
        if not apart or any(rate[cut] == 0 for cut in cuts):
            continue
        slowest = max(exchange_s[cut] for cut in cuts)
        share = 2 * (members - 1) / members / period
        total = sum(rate[cut] for cut in cuts)
        least = min(least, batch / total + share * slowest)
    return least


@pytest.mark.parametrize("seed", range(8))
def test_cuts_are_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = 6
    rate = random.random((count, count + 1)) * (random.random((count, count + 1)) > 0.4)
    exchange_s = random.choice([1.0, 20.0, 300.0], size=rate.shape)
    upper = np.triu(np.ones((count, count + 1), dtype=bool), 1)
    rate = np.where(upper, rate, 0.0)
    found = best_divisions(rate, exchange_s, batch=8, period=4, most=3)
    for members in (1, 2, 3):
        least = _brute(rate, exchange_s, 8, 4, members)
        if np.isinf(least):
            assert members not in found
            continue
        seconds, cuts = found[members]
        assert seconds == pytest.approx(least)
        assert len(cuts) == members
        assert all(rate[cut] > 0 for cut in cuts)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(cuts))


def test_no_segment_that_fits_gives_no_division() -> None:
    rate = np.zeros((3, 4))
    assert best_divisions(rate, rate, batch=8, period=4, most=3) == {}


def _fleet(kinds: list[str], mbit: list[float]) -> Cluster:
    speed = np.minimum.outer(mbit, mbit) * 1.25e5
    wait = np.full(speed.shape, 0.01)
    return Cluster.from_matrices(speed, wait, [device_type(kind) for kind in kinds])


def _pricer(fleet: Cluster, batch: int = 64) -> SegmentPricer:
    return SegmentPricer(
        make_request(gpt2_graph(), fleet, PlanOptions(global_batch=batch))
    )


def test_segments_that_lack_memory_have_no_rate() -> None:
    fleet = _fleet(["rtx4090-24", "t4-16"], [1000, 1000])
    tight = fleet.document.model_copy(
        update={
            "device_types": tuple(
                kind.model_copy(update={"memory_bytes": 2.5e9 + 20e9 * (i == 0)})
                for i, kind in enumerate(fleet.document.device_types)
            )
        }
    )
    pricer = _pricer(Cluster.from_document(tight))
    assert pricer.of((1,))[0] == 0
    assert pricer.of((0,))[0] > 0
    (first, *_) = divide(pricer, period=8, most=4)
    assert first.members == ((0,),)


def test_a_slow_connection_leaves_a_host_out() -> None:
    """It would take longer to exchange with than it brings."""
    kinds = ["rtx3090-24", "rtx3090-24", "t4-16"]
    slow, fast = [1000.0, 1000.0, 0.1], [1000.0] * 3
    found = divide(_pricer(_fleet(kinds, slow)), period=8, most=4)
    assert found[0].members == ((0,), (1,))
    found = divide(_pricer(_fleet(kinds, fast)), period=8, most=4)
    assert found[0].members == ((0,), (1,), (2,))


def test_divisions_are_seeded_and_sorted() -> None:
    kinds = ["rtx3090-24", "t4-16", "rtx4090-24", "t4-16", "a100-80"]
    fleet = _fleet(kinds, [50, 100, 20, 1000, 500])
    one = divide(_pricer(fleet), period=16, most=4, seed=1)
    assert one == divide(_pricer(fleet), period=16, most=4, seed=1)
    seconds = [each.step_time_s for each in one]
    assert seconds == sorted(seconds)
    for each in one:
        hosts = [host for member in each.members for host in member]
        assert len(set(hosts)) == len(hosts)


def test_changed_orders_are_no_worse_than_those_of_rules() -> None:
    """Six hosts of which no one holds the model alone."""
    fleet = _fleet(
        ["t4-16", "rtx3090-24", "l4-24", "rtx4090-24", "t4-16", "a40-48"],
        [100, 1000, 250, 500, 2000, 50],
    )
    types = tuple(
        kind.model_copy(update={"memory_bytes": 3.6e9})
        for kind in fleet.document.device_types
    )
    tight = fleet.document.model_copy(update={"device_types": types})
    pricer = _pricer(Cluster.from_document(tight), batch=32)
    search = _OrderSearch(pricer, period=8, most=3)
    search.try_orders(_plain_orders(pricer))
    plain = min(one.step_time_s for one in search.found.values())
    found = divide(pricer, period=8, most=3)
    assert found[0].step_time_s <= plain
    assert all(len(member) > 1 for one in found for member in one.members)


def test_orders_that_improve_are_returned_and_others_are_not() -> None:
    kinds = ["rtx3090-24", "t4-16", "a100-80"]
    search = _OrderSearch(_pricer(_fleet(kinds, [1000.0] * 3)), period=8, most=2)
    first, again = np.array([1, 0, 2]), np.array([0, 1, 2])
    assert search.try_orders([first]) is first
    assert search.try_orders([again, first]) is None


# -- Orders that a partitioner draws ---------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_even_cuts_of_an_order_have_the_least_spread_of_all(seed: int) -> None:
    nodes = _nodes(8, seed)
    order = np.random.default_rng(seed).permutation(8)
    found = cut_evenly(order, nodes, 24 * GB, 3)
    least = None
    for cuts in itertools.combinations(range(1, 8), 2):
        cluster = np.empty(8, dtype=np.int64)
        for number, part in enumerate(np.split(order, cuts)):
            cluster[part] = number
        ram = np.bincount(cluster, weights=nodes.ram_mb)
        if (ram >= 24 * GB).all():
            spread = spread_of(cluster, nodes)
            least = spread if least is None else min(least, spread)
    if found is None:
        assert least is None
        return
    assert (np.bincount(found, weights=nodes.ram_mb) >= 24 * GB).all()
    assert spread_of(found, nodes) == least


def test_an_order_that_holds_too_few_models_is_not_cut() -> None:
    nodes = _nodes(5, 0)
    assert cut_evenly(np.arange(5), nodes, int(nodes.ram_mb.max()) + 1, 5) is None


def test_given_orders_alone_are_cut_without_changes() -> None:
    kinds = ["t4-16", "rtx3090-24", "l4-24", "rtx4090-24", "t4-16"]
    fleet = _fleet(kinds, [100, 1000, 250, 500, 2000])
    types = tuple(
        kind.model_copy(update={"memory_bytes": 3.6e9})
        for kind in fleet.document.device_types
    )
    tight = fleet.document.model_copy(update={"device_types": types})
    pricer = _pricer(Cluster.from_document(tight), batch=32)
    order = np.array([4, 1, 0, 3, 2])
    found = divide(pricer, period=8, most=3, keep=99, orders=[order], rounds=0)
    places = {host: place for place, host in enumerate(order.tolist())}
    for one in found:
        for member in one.members:
            at = sorted(places[host] for host in member)
            assert at == [*range(at[0], at[-1] + 1)]


def test_the_pointer_draws_whole_orders_of_the_hosts() -> None:
    kinds = ["t4-16", "rtx3090-24", "l4-24", "rtx4090-24", "t4-16"]
    pricer = _pricer(_fleet(kinds, [100, 1000, 250, 500, 2000]))
    learned = get_partitioner("learned")
    assert isinstance(learned, GroupOrderer)
    assert not isinstance(get_partitioner("expert"), GroupOrderer)
    orders = learned.group_orders(pricer.request, 24)
    assert 1 < len(orders) <= 24
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)
    for order in orders:
        assert sorted(order.tolist()) == [*range(5)]
    again = learned.group_orders(pricer.request, 24)
    assert [o.tolist() for o in again] == [o.tolist() for o in orders]
