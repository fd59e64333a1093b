"""Where searches begin: pools of devices, neighbours side by side, grids over them."""

from __future__ import annotations

import itertools

import numpy as np

from planner.search.starts import (
    base_orders,
    grid_orders,
    near_order,
    pools,
    tour_order,
)
from tests.cost.made import request_for, row, uniform_graph
from tests.search.made import cluster_of, matrix, request_on


def test_near_devices_are_side_by_side() -> None:
    cluster = matrix([3, 4, 2], seed=5, each=2)
    order = near_order(cluster, cluster.free)
    assert sorted(order.tolist()) == cluster.free.tolist()
    speed = [cluster.link(a, b)[0] for a, b in itertools.pairwise(order.tolist())]
    # Two ways between sites, and one fewer way between hosts than each site has.
    assert (speed.count(5e8), speed.count(1e10), speed.count(1e11)) == (2, 6, 9)


def test_each_grid_once() -> None:
    made = list(grid_orders(np.arange(12), row(pp=3, dp_shard=4, zero_stage=1)))
    contiguous, strided = np.arange(12), np.arange(12).reshape(4, 3).T.reshape(-1)
    assert {tuple(m.tolist()) for m in made} == {
        tuple(contiguous.tolist()),
        tuple(strided.tolist()),
    }
    whole = list(
        grid_orders(np.arange(24), row(pp=2, dp_replicate=3, dp_shard=2, tp=2))
    )
    assert len(whole) == 6
    for order in whole:
        assert sorted(order.tolist()) == list(range(24))
        # What shares a layer stays together.
        assert (order.reshape(-1, 2)[:, 1] - order.reshape(-1, 2)[:, 0] == 1).all()
    assert len(list(grid_orders(np.arange(8), row(dp_replicate=8)))) == 1


def test_pools_are_all_devices_or_all_of_a_type() -> None:
    request = request_on("mixed", 40)
    found = pools(request)
    assert [pool.count for pool in found] == [8, 4, 4]
    assert [pool.devices.tolist() for pool in found[1:]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    anyone = pools(request_on("mixed", 40, devices="any"))
    assert anyone[0].count == 8
    assert {pool.count for pool in anyone} == set(range(1, 9))
    assert all(len(pool.devices) == 8 for pool in anyone)


def test_base_orders_are_distinct_and_use_the_pool() -> None:
    request = request_on("mixed matrix", 12)
    for pool in pools(request):
        orders = base_orders(request.context.cluster, pool)
        assert len({tuple(order.tolist()) for order in orders}) == len(orders) > 0
        for order in orders:
            assert len(set(order.tolist())) == pool.count
            assert set(order.tolist()) <= set(pool.devices.tolist())


def test_a_tour_keeps_slow_links_out_of_stages_that_add_up_much() -> None:
    cluster = matrix([4, 4], seed=3)
    request = request_for(uniform_graph(4), cluster, 8)
    degrees = row(pp=2, dp_replicate=4)
    rng = np.random.default_rng(0)

    def crossing(dp_bytes: float, pp_bytes: float) -> list[float]:
        """Slowest link inside each stage."""
        order = tour_order(
            request,
            near_order(cluster, cluster.free),
            degrees,
            dp_bytes=dp_bytes,
            pp_bytes=pp_bytes,
            mixing_s=0.0,
            trials=60,
            rng=rng,
        )
        assert order is not None
        assert sorted(order.tolist()) == cluster.free.tolist()
        return [
            min(cluster.link(a, b)[0] for a in stage for b in stage if a != b)
            for stage in order.reshape(2, 4).tolist()
        ]

    assert crossing(1e10, 1e3) == [1e10, 1e10]
    assert crossing(1e3, 1e10) == [5e8, 5e8]


def test_a_tour_keeps_types_apart_if_mixing_costs() -> None:
    cluster = cluster_of("mixed matrix")
    request = request_on("mixed matrix", 12)
    order = tour_order(
        request,
        np.argsort(cluster.type_index, kind="stable"),
        row(pp=3, dp_replicate=4),
        dp_bytes=1e6,
        pp_bytes=1e6,
        mixing_s=10.0,
        trials=60,
        rng=np.random.default_rng(0),
    )
    assert order is not None
    kinds = cluster.type_index[order].reshape(3, 4)
    assert (kinds == kinds[:, :1]).all()


def test_nothing_to_divide_is_no_tour() -> None:
    request = request_on("matrix", 8)
    for degrees in (row(dp_replicate=8), row(pp=8)):
        found = tour_order(
            request,
            request.context.order,
            degrees,
            dp_bytes=1.0,
            pp_bytes=1.0,
            mixing_s=0.0,
            trials=10,
            rng=np.random.default_rng(0),
        )
        assert found is None
