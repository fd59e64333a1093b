"""The partitioner ``dtfm``: the published objective, on every number of stages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planner.cluster import Cluster, device_type
from planner.cost import CostModel
from planner.schema import Strategy
from planner.search import Request, SearchResult, get_partitioner
from planner.search.dtfm import Communication, memetic_search
from planner.search.dtfm.cost import seconds_of
from planner.search.dtfm.partitioner import communication_between, stage_bytes
from planner.space import StrategyTable, legal
from tests.cost.made import device, hosts, request_for, uniform_graph

#: Site of each device, out of order.
SITES = np.array([0, 1, 2, 2, 0, 1])


def sites() -> Cluster:
    """Three sites of two PCs: fast inside, slow between 0 and 2, slower to 1."""
    rate = np.array([[1e10, 1e7, 1e8], [1e7, 1e10, 1e7], [1e8, 1e7, 1e10]])
    bandwidth = rate[SITES[:, None], SITES[None, :]]
    latency = np.full((6, 6), 1e-4)
    return Cluster.from_matrices(bandwidth, latency, device_type("a100-80"))


def asked(cluster: Cluster, **options: object) -> Request:
    return request_for(uniform_graph(12), cluster, global_batch=24, **options)


def found(request: Request) -> SearchResult:
    return get_partitioner("dtfm").search(request)


def stages_of(result: SearchResult) -> np.ndarray:
    """Device ids of each stage of the best candidate. Shape [stages, replicas]."""
    strategy = result.candidates[0].strategy
    return np.array(strategy.device_ids()).reshape(strategy.mesh.pp, -1)


def network(request: Request, strategy: Strategy) -> Communication:
    """Seconds between single devices, for the bytes of a strategy's stages."""
    (row,) = StrategyTable.from_strategies([strategy]).rows()
    dp_bytes, pp_bytes = stage_bytes(CostModel(request.context), row)
    devices = np.arange(strategy.mesh.num_devices).reshape(-1, 1)
    return communication_between(
        request,
        devices,
        dp_bytes=dp_bytes,
        pp_bytes=pp_bytes,
        groups=strategy.mesh.pp,
    )


@pytest.mark.parametrize("pp", [2, 3])
def test_no_division_communicates_less(pp: int) -> None:
    request = asked(sites(), pins={"pp": pp})
    result = found(request)
    made = network(request, result.candidates[0].strategy)
    slots = np.repeat(np.arange(pp), 6 // pp).tolist()
    every = [
        seconds_of(made.dp_s, made.pp_s, np.array(division), pp)
        for division in set(itertools.permutations(slots))
    ]
    stages = stages_of(result)
    division = np.empty(6, dtype=np.int64)
    division[stages] = np.arange(pp)[:, None]
    best = seconds_of(made.dp_s, made.pp_s, division, pp)
    assert best == pytest.approx(min(every), rel=1e-9)
    assert max(every) > 1.2 * best
    # Neighbours in a pipeline are paired up as well as can be.
    sent = sum(made.pp_s[a, b].max() for a, b in itertools.pairwise(stages))
    slowest = max(made.dp_s[np.ix_(one, one)].sum(axis=1).max() for one in stages)
    assert sent + slowest == pytest.approx(best, rel=1e-9)


def test_a_chain_of_single_devices_is_the_shortest_tour() -> None:
    """Sites 0 and 2 are neighbours, and the devices of a site are."""
    order = stages_of(found(asked(sites(), pins={"pp": 6}))).reshape(-1)
    where = SITES[order].tolist()
    assert [site for site, _ in itertools.groupby(where)] in (
        [1, 0, 2],
        [1, 2, 0],
        [0, 2, 1],
        [2, 0, 1],
    )


def test_every_number_of_stages_is_tried_with_all_devices_and_no_tp() -> None:
    request = asked(hosts((2, 4, device())))
    result = found(request)
    strategies = [one.strategy for one in result.candidates]
    assert {one.mesh.pp for one in strategies} == {1, 2, 4, 8}
    assert {one.mesh.num_devices for one in strategies} == {8}
    assert {(one.mesh.tp, one.mesh.cp, one.mesh.ep) for one in strategies} == {
        (1, 1, 1)
    }
    assert legal(StrategyTable.from_strategies(strategies), request.facts).all()
    times = [one.cost.step_time_s for one in result.candidates]
    assert times == sorted(times)


def test_pins_are_kept_and_ranks_that_share_layers_stay_together() -> None:
    request = asked(hosts((2, 4, device())), pins={"pp": 2, "tp": 2})
    result = found(request)
    assert {(c.strategy.mesh.pp, c.strategy.mesh.tp) for c in result.candidates} == {
        (2, 2)
    }
    pairs = stages_of(result).reshape(-1, 2)
    assert (pairs[:, 0] % 2 == 0).all()
    assert (pairs[:, 1] == pairs[:, 0] + 1).all()


def test_the_same_request_has_the_same_answer_within_its_budget() -> None:
    request = asked(sites(), evaluation_budget=4, seed=3)
    first, second = (found(request) for _ in range(2))
    assert first.partitioner == "dtfm"
    assert [c.strategy for c in first.candidates] == [
        c.strategy for c in second.candidates
    ]
    assert 0 < first.evaluations["simulated"] <= 4


def test_a_device_that_is_taken_is_left_out() -> None:
    cluster = hosts((2, 4, device())).with_occupied([2])
    result = found(asked(cluster))
    assert result.candidates
    for one in result.candidates:
        assert 2 not in one.strategy.device_ids()


def test_a_model_that_does_not_fit_has_a_nearest_candidate() -> None:
    result = found(asked(hosts((1, 2, device(memory_bytes=1e6)))))
    assert result.candidates == ()
    assert result.nearest is not None


def test_an_order_that_a_launcher_cannot_give_is_not_proposed() -> None:
    request = asked(hosts((2, 4, device())), target="megatron")
    limits = request.launcher_limits
    assert limits is not None
    result = found(request)
    assert result.candidates
    assert all(not limits.violations(c.strategy) for c in result.candidates)


def test_a_time_limit_ends_the_search() -> None:
    made = communication_between(
        asked(sites()),
        np.arange(6).reshape(-1, 1),
        dp_bytes=1e9,
        pp_bytes=1e8,
        groups=3,
    )
    result = memetic_search(made, population=5, offspring=1000, until=0.0)
    assert result.trials == 5
    assert sorted(result.best.grid.reshape(-1).tolist()) == list(range(6))
