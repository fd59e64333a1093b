"""Devices by host: their ids, their links, and orders of them."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.search.device_order.groups import DeviceGroups, group_devices
from tests.cost.made import device, hosts, setting_for, uniform_graph
from tests.search.device_order.made import far_sites, mixed_hosts


def _groups(cluster: Cluster) -> DeviceGroups:
    return group_devices(setting_for(uniform_graph(4), cluster))


def test_groups_are_the_free_devices_of_each_host() -> None:
    cluster = mixed_hosts().with_occupied([0, 5, 8, 9])
    groups = _groups(cluster)
    free = {}
    for one in cluster.free:
        free.setdefault(int(cluster.host_of_device[one]), []).append(int(one))
    members = np.split(groups.ids, groups.starts[1:-1])
    assert [part.tolist() for part in members] == [free[host] for host in sorted(free)]
    # The host whose devices are all taken is no group.
    assert groups.sizes.tolist() == [3, 3, 3]
    types = np.asarray(cluster.type_index)
    assert groups.kinds.tolist() == [types[part[0]] for part in members]


def test_many_hosts_of_a_kind_and_a_place_are_one_group() -> None:
    fast, slow = device("fast", peak_flops_per_s={"bfloat16": 4e14}), device("slow")
    # Racks of 40 hosts; kinds change in the middle of the second.
    made = hosts((60, 2, fast), (60, 2, slow), (40, 4, slow)).document
    (network,) = made.levels
    levels = (network.model_copy(update={"name": "rack", "hosts": 40}), network)
    cluster = Cluster.from_document(made.model_copy(update={"levels": levels}))
    context = setting_for(uniform_graph(4), cluster.with_occupied([0, 250]))
    apart, groups = group_devices(context), group_devices(context, join=True)
    assert len(apart) == 160
    assert apart.hosts.tolist() == [1] * 160
    # At most three hosts a group, and what is left over of each kind in each rack.
    assert 54 <= len(groups) <= 64
    assert groups.hosts.max() == 3
    assert sorted(groups.ids.tolist()) == sorted(context.order.tolist())
    host = np.asarray(cluster.host_of_device)
    racks = []
    for group, part in enumerate(np.split(groups.ids, groups.starts[1:-1])):
        owners, sizes = np.unique(host[part], return_counts=True)
        assert len(owners) == groups.hosts[group]
        assert set(sizes.tolist()) == {groups.host_sizes[group]}
        assert len(set(np.asarray(cluster.type_index)[part].tolist())) == 1
        racks.append(len(np.unique(owners // 40)))
    assert set(racks) == {1}
    few = setting_for(uniform_graph(4), mixed_hosts())
    assert group_devices(few, join=True).ids.tolist() == group_devices(few).ids.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_orders_are_the_devices_of_the_groups_in_turn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = _groups(mixed_hosts().with_occupied([1, 12]))
    members = np.split(groups.ids, groups.starts[1:-1])
    sequences = np.stack([rng.permutation(len(groups)) for _ in range(6)])
    most = int(groups.sizes.sum())
    for count in (1, 4, 7, most):
        orders = groups.orders(sequences, count)
        for sequence, order in zip(sequences, orders, strict=True):
            whole = np.concatenate([members[group] for group in sequence])
            assert order.tolist() == whole[:count].tolist()


def test_orders_end_where_a_sequence_does() -> None:
    groups = _groups(mixed_hosts())
    orders = groups.orders(np.array([[2, 3, -1, -1]]), 5)
    assert orders.tolist() == [[8, 9, 10, 11, 12]]
    # What is missing is told apart from device 0.
    assert groups.orders(np.array([[2, -1, -1, -1]]), 3).tolist() == [[8, 9, -1]]


@pytest.mark.parametrize("seed", range(3))
def test_a_sequence_comes_back_from_its_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = _groups(mixed_hosts().with_occupied([3]))
    sequence = rng.permutation(len(groups))
    order = groups.orders(sequence[None, :], int(groups.sizes.sum()))[0]
    assert groups.sequence_of(order).tolist() == sequence.tolist()
    # Of a part of the devices, the groups that they are of.
    owner = np.repeat(np.arange(len(groups)), groups.sizes)
    of_device = dict(zip(groups.ids.tolist(), owner.tolist(), strict=True))
    part = order[: int(rng.integers(1, len(order)))]
    met = list(dict.fromkeys(of_device[one] for one in part.tolist()))
    assert groups.sequence_of(part).tolist() == met


def test_links_between_groups_are_those_of_their_devices() -> None:
    cluster = hosts((1, 1, device()), (2, 3, device()), inside=1e11, between=1e10)
    groups = _groups(cluster)
    rate, wait = cluster.topology.links(np.arange(7)[:, None], np.arange(7)[None, :])
    of = np.repeat(np.arange(3), groups.sizes)
    for a in range(3):
        for b in range(3):
            ids = [
                (i, j)
                for i in np.flatnonzero(of == a)
                for j in np.flatnonzero(of == b)
                if i != j
            ]
            if ids:
                assert groups.bandwidth[a, b] == min(rate[i, j] for i, j in ids)
                assert groups.latency[a, b] == max(wait[i, j] for i, j in ids)
    off = ~np.eye(3, dtype=bool)
    assert set(groups.bandwidth[off].tolist()) == {1e10}
    assert groups.bandwidth[1, 1] == groups.bandwidth[2, 2] == 1e11


def test_the_slower_direction_of_a_link_counts() -> None:
    rate = np.array([[1e10, 2e9, 3e9], [1e9, 1e10, 5e9], [4e9, 6e9, 1e10]])
    wait = np.array([[1e-6, 1e-3, 2e-3], [5e-3, 1e-6, 1e-3], [1e-3, 3e-3, 1e-6]])
    groups = _groups(Cluster.from_matrices(rate, wait, device()))
    off = ~np.eye(3, dtype=bool)
    assert (groups.bandwidth == np.minimum(rate, rate.T))[off].all()
    assert (groups.latency == np.maximum(wait, wait.T))[off].all()


@pytest.mark.parametrize("seed", range(3))
def test_by_links_takes_vertices_as_a_minimum_spanning_tree_does(seed: int) -> None:
    groups = _groups(far_sites(9, 3, seed))
    seconds = groups.seconds()
    assert seconds == pytest.approx(groups.latency + 16e6 / groups.bandwidth)
    usable = np.arange(9) % 4 != 3
    start = 4
    taken, left = [start], [g for g in np.flatnonzero(usable).tolist() if g != start]
    while left:
        chosen = min(left, key=lambda g: min(seconds[g, one] for one in taken))
        left.remove(chosen)
        taken.append(chosen)
    assert groups.by_links(start, usable).tolist() == taken
    assert sorted(groups.by_links(start).tolist()) == list(range(9))


def test_by_links_goes_through_a_site_before_the_next() -> None:
    cluster = far_sites(12, 3, seed=5)
    groups = _groups(cluster)
    near = groups.latency < 1e-3
    site = np.array(
        [np.flatnonzero(row | (np.arange(12) == i))[0] for i, row in enumerate(near)]
    )
    met = site[groups.by_links(7)]
    assert int((np.diff(met) != 0).sum()) == len(set(site.tolist())) - 1
