"""A cluster seen as kinds of hosts, and the sub-clusters that jobs are priced on."""

from __future__ import annotations

import numpy as np
import pytest

from envs.stream.network import Shape, StreamNetwork, sub_cluster
from planner.cluster import Cluster, device_type
from planner.errors import ClusterError
from planner.schema.cluster import Link
from tests.envs.stream.conftest import leaf_spine


def test_shapes_are_powers_of_two_on_few_hosts_and_on_more() -> None:
    network = StreamNetwork(Cluster.from_preset("dgx-a100", 4))
    found = [(s.devices, s.hosts) for s in network.shapes(32, spread=1)]
    assert found == [
        *((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2)),
        *((16, 2), (16, 4), (32, 4)),
    ]
    packed = [(s.devices, s.hosts) for s in network.shapes(16, spread=0)]
    assert packed == [(1, 1), (2, 1), (4, 1), (8, 1), (16, 2)]
    frugal = network.shapes(4, spread=1, frugal=True)
    assert [(s.devices, s.hosts, s.frugal) for s in frugal] == [
        *((1, 1, False), (2, 1, False), (2, 2, False), (2, 2, True)),
        *((4, 1, False), (4, 2, False), (4, 2, True)),
    ]


def test_a_part_of_hosts_is_the_cluster_s_own_part() -> None:
    """Devices that share interfaces share them as they do in `Cluster.part`."""
    cluster = Cluster.from_preset("a40-pcie", 2)
    network = StreamNetwork(cluster)
    link = network.levels[0]
    for per_host in (1, 2, 4, 8):
        shape = Shape(kind=0, hosts=2, per_host=per_host)
        made = sub_cluster(network.kinds[0], shape, link)
        devices = [h * 8 + d for h in range(2) for d in range(per_host)]
        expected = cluster.part(devices)
        assert made.document.hosts[0].nics == min(2, per_host)
        factor = made.topology.lone_factor
        np.testing.assert_array_equal(factor, expected.topology.lone_factor)
        assert factor[0] == max(1.0, per_host / 2)


def test_shapes_leave_out_what_is_occupied() -> None:
    cluster = leaf_spine(hosts=4).with_occupied([0, 2])
    network = StreamNetwork(cluster)
    assert network.usable_per_host().tolist() == [1, 1, 2, 2]
    found = {(s.devices, s.hosts) for s in network.shapes(4, spread=1)}
    assert found == {(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)}
    with pytest.raises(ClusterError, match="max_degree=7"):
        network.shapes(7, spread=1)
    with pytest.raises(ClusterError, match="all 8 devices"):
        StreamNetwork(leaf_spine().with_occupied(range(8)))


def test_switches_of_every_level() -> None:
    network = StreamNetwork(leaf_spine(hosts=4))
    assert network.switches.tolist() == [[0, 1, 2, 3], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert StreamNetwork(Cluster.from_preset("dgx-a100")).switches.tolist() == [[0]]


def test_hosts_are_alike_if_their_numbers_are() -> None:
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-6)
    parts = [Cluster.from_preset(n, 2) for n in ("dgx-a100", "dgx-h100", "dgx-a100")]
    network = StreamNetwork(Cluster.mixed(*parts, level=link))
    assert [kind.device.name for kind in network.kinds] == ["a100-80", "h100-80"]
    assert network.kind_of_host.tolist() == [0, 0, 1, 1, 0, 0]


def test_matrices_are_seen_as_their_slowest_links() -> None:
    bandwidth = np.full((4, 4), 8e9)
    bandwidth[:2, :2] = bandwidth[2:, 2:] = 5e10
    bandwidth[0, 3] = 2e9
    latency = np.full((4, 4), 1e-4)
    latency[1, 2] = 3e-4
    cluster = Cluster.from_matrices(
        bandwidth, latency, device_type("a100-80"), hosts=[0, 0, 1, 1]
    )
    network = StreamNetwork(cluster)
    (between,) = network.levels
    assert (between.bandwidth_bytes_per_s, between.latency_s) == (2e9, 3e-4)
    assert network.kinds[0].group.link.bandwidth_bytes_per_s == 5e10


def test_a_sub_cluster_is_the_part_of_the_cluster() -> None:
    whole = StreamNetwork(Cluster.from_preset("dgx-a100", 4))
    shape, link = Shape(kind=0, hosts=2, per_host=8), whole.levels[0]
    part = sub_cluster(whole.kinds[0], shape, link)
    expected = Cluster.from_preset("dgx-a100", 2)
    for a, b in ((0, 7), (0, 8), (3, 15)):
        assert part.link(a, b) == expected.link(a, b)
    slowed = sub_cluster(whole.kinds[0], shape, link, stretch=4.0)
    assert slowed.link(0, 7) == expected.link(0, 7)
    assert slowed.link(0, 8)[0] == expected.link(0, 8)[0] / 4
    with pytest.raises(ClusterError, match="2 hosts without a link"):
        sub_cluster(whole.kinds[0], shape, None)
