from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cluster import AxisLevel, Cluster, device_type
from planner.cluster.levels import axis_groups, axis_levels
from planner.errors import ClusterError
from planner.schema.cluster import ClusterDocument, HostGroup, Level, Link

FAST = Link(name="fast", bandwidth_bytes_per_s=100.0, latency_s=1e-6)
RACK = Link(name="rack", bandwidth_bytes_per_s=10.0, latency_s=1e-5)
FAR = Link(name="far", bandwidth_bytes_per_s=1.0, latency_s=1e-4)


def racks(hosts: int, per_host: int, per_rack: int) -> Cluster:
    group = HostGroup(
        name="h", count=hosts, devices_per_host=per_host, device="h100-80", link=FAST
    )
    levels = (
        Level(name="rack", hosts=per_rack, link=RACK),
        Level(name="far", link=FAR),
    )
    return Cluster.from_document(
        ClusterDocument(
            name="racks",
            device_types=(device_type("h100-80"),),
            hosts=(group,),
            levels=levels,
        )
    )


def shape(levels: tuple[AxisLevel, ...]) -> list[tuple[int, str]]:
    return [(level.members, level.name) for level in levels]


@pytest.mark.parametrize(
    ("degree", "stride", "expected"),
    [
        (1, 1, []),
        (8, 1, [(8, "NVLink4")]),
        (2, 4, [(2, "NVLink4")]),
        (16, 1, [(8, "NVLink4"), (2, "InfiniBand NDR")]),
        (16, 4, [(2, "NVLink4"), (8, "InfiniBand NDR")]),
        (4, 8, [(4, "InfiniBand NDR")]),
        (4, 16, [(4, "InfiniBand NDR")]),
        # 12 ranks two apart lie 4 + 4 + 4 on three hosts.
        (12, 2, [(4, "NVLink4"), (3, "InfiniBand NDR")]),
        # 6 in a row lie 6, then 2 + 4, then 4 + 2 …: pairs are what always fits.
        (6, 1, [(2, "NVLink4"), (3, "InfiniBand NDR")]),
        # 3 in a row lie 2 + 1 somewhere: nothing fits.
        (3, 1, [(3, "InfiniBand NDR")]),
    ],
)
def test_members_per_level_on_hosts_of_eight(
    degree: int, stride: int, expected: list[tuple[int, str]]
) -> None:
    cluster = Cluster.from_preset("dgx-h100", nodes=12)
    assert shape(cluster.axis_levels(degree, stride)) == expected


def test_bandwidth_and_latency_are_those_of_the_links() -> None:
    inner, outer = Cluster.from_preset("dgx-h100", nodes=2).axis_levels(16, 1)
    assert inner.bandwidth_bytes_per_s == 450e9
    assert outer.bandwidth_bytes_per_s == 50e9
    assert inner.latency_s < outer.latency_s


def test_three_levels() -> None:
    cluster = racks(hosts=8, per_host=4, per_rack=2)
    assert shape(cluster.axis_levels(32, 1)) == [(4, "fast"), (2, "rack"), (4, "far")]
    assert shape(cluster.axis_levels(8, 4)) == [(2, "rack"), (4, "far")]
    assert shape(cluster.axis_levels(2, 4)) == [(2, "rack")]


def test_levels_with_one_link_are_one_level() -> None:
    rack = Cluster.from_preset("gb200-nvl72", nodes=2)
    assert [level.members for level in rack.axis_levels(72, 1)] == [72]
    assert [level.members for level in rack.axis_levels(144, 1)] == [72, 2]


def test_a_meshed_host_uses_a_cable_to_each_peer_of_the_group() -> None:
    cluster = Cluster.from_preset("mi300x")
    rates = [cluster.axis_levels(n, 1)[0].bandwidth_bytes_per_s for n in (2, 4, 8)]
    assert rates == [64e9, 3 * 64e9, 7 * 64e9]
    assert cluster.link(0, 5)[0] == 64e9


def test_ranks_follow_device_ids() -> None:
    cluster = Cluster.from_preset("dgx-h100", nodes=2)
    by_turns = [0, 8, 1, 9, 2, 10, 3, 11]
    assert shape(cluster.axis_levels(2, 1, by_turns)) == [(2, "InfiniBand NDR")]
    assert shape(cluster.axis_levels(4, 2, by_turns)) == [(4, "NVLink4")]


def test_free_devices_are_the_ranks_by_default() -> None:
    cluster = Cluster.from_preset("dgx-h100", nodes=2).with_occupied(range(4))
    # Ranks 0 to 3 are devices 4 to 7, rank 4 is device 8.
    assert shape(cluster.axis_levels(4, 1)) == [(4, "NVLink4")]
    assert shape(cluster.axis_levels(12, 1)) == [(4, "NVLink4"), (3, "InfiniBand NDR")]


def test_slowest_device_type_counts() -> None:
    level = Link(name="both", bandwidth_bytes_per_s=50e9, latency_s=4e-6)
    cluster = Cluster.mixed(
        Cluster.from_preset("dgx-a100", 1),
        Cluster.from_preset("dgx-h100", 1),
        level=level,
    )
    (inside,) = cluster.axis_levels(8, 1)
    assert inside.bandwidth_bytes_per_s == 300e9
    (inside,) = cluster.axis_levels(8, 1, range(8, 16))
    assert inside.bandwidth_bytes_per_s == 450e9


def test_a_slow_host_is_not_hidden_by_a_fast_network() -> None:
    slow = Link(bandwidth_bytes_per_s=1.0, latency_s=1e-3)
    fast = Link(bandwidth_bytes_per_s=9.0, latency_s=1e-6)
    groups = (
        HostGroup(name="a", count=1, devices_per_host=2, device="h100-80", link=slow),
        HostGroup(name="b", count=2, devices_per_host=1, device="h100-80", link=fast),
    )
    cluster = Cluster.from_document(
        ClusterDocument(
            name="odd",
            device_types=(device_type("h100-80"),),
            hosts=groups,
            levels=(Level(name="net", link=fast),),
        )
    )
    (level,) = cluster.axis_levels(2, 1)
    assert (level.members, level.bandwidth_bytes_per_s) == (2, 1.0)
    assert level.latency_s == 1e-3


def test_too_many_ranks_is_an_error_with_the_numbers() -> None:
    cluster = Cluster.from_preset("dgx-h100")
    with pytest.raises(ClusterError, match="degree=4 and stride=4 covers 16 devices"):
        cluster.axis_levels(4, 4)
    with pytest.raises(ClusterError, match="at least 1"):
        cluster.axis_levels(0, 1)


# -- Against enumeration -----------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Small hierarchical clusters, some of them uneven or partly taken."""
    even = draw(st.booleans())
    per_host = draw(st.integers(1, 4))
    sizes = [per_host if even else draw(st.integers(1, 4)) for _ in range(4)]
    groups = tuple(
        HostGroup(
            name=f"h{i}", count=1, devices_per_host=n, device="h100-80", link=FAST
        )
        for i, n in enumerate(sizes)
    )
    levels = (Level(name="rack", hosts=2, link=RACK), Level(name="far", link=FAR))
    if draw(st.booleans()):
        levels = (Level(name="far", link=FAR),)
    cluster = Cluster.from_document(
        ClusterDocument(
            name="drawn",
            device_types=(device_type("h100-80"),),
            hosts=groups,
            levels=levels,
        )
    )
    taken = draw(st.sets(st.integers(0, sum(sizes) - 1), max_size=sum(sizes) - 1))
    return cluster.with_occupied(taken if draw(st.booleans()) else ())


def all_pairs(cluster: Cluster, groups: np.ndarray) -> list[tuple[float, float]]:
    return [
        cluster.link(int(a), int(b))
        for group in groups
        for a, b in itertools.permutations(group, 2)
    ]


@settings(max_examples=150, deadline=None)
@given(clusters(), st.integers(2, 8), st.integers(1, 4))
def test_no_group_can_beat_its_levels(
    cluster: Cluster, degree: int, stride: int
) -> None:
    if degree * stride > cluster.num_free:
        return
    levels = cluster.axis_levels(degree, stride)
    groups = axis_groups(cluster.free, degree, stride)
    links = all_pairs(cluster, groups)
    assert np.prod([level.members for level in levels]) == degree
    assert all(level.members > 1 for level in levels)
    # The outermost level is the slowest link that any pair of any group has.
    assert levels[-1].bandwidth_bytes_per_s == min(band for band, _ in links)
    assert levels[-1].latency_s == max(wait for _, wait in links)
    # A host of k members takes in (d - k) / d of the data over k links at least;
    # the levels say so or more of what crosses hosts.
    told = crossing(levels, cluster)
    for group in groups:
        hosts = cluster.host_of_device[group]
        for host in np.unique(hosts):
            k = int((hosts == host).sum())
            assert told >= 1 / k - 1 / degree - 1e-12


def crossing(levels: tuple[AxisLevel, ...], cluster: Cluster) -> float:
    """Share of the data that one member takes in from beyond its host."""
    inside = levels[0].members if levels[0].name == "fast" else 1
    total = int(np.prod([level.members for level in levels]))
    return 1 / inside - 1 / total


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.data())
def test_closed_form_equals_enumeration(
    per_host: int, per_rack: int, data: st.DataObject
) -> None:
    cluster = racks(hosts=8, per_host=per_host, per_rack=per_rack)
    n = cluster.num_devices
    degree = data.draw(st.integers(2, n))
    stride = data.draw(st.integers(1, n // degree))
    ids = cluster.free
    quick = axis_levels(cluster.topology, ids, degree, stride, aligned=True)
    slow = axis_levels(cluster.topology, ids, degree, stride, aligned=False)
    assert quick == slow


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 6), st.integers(1, 3))
def test_matrix_levels_are_the_worst_pairs(seed: int, degree: int, stride: int) -> None:
    rng = np.random.default_rng(seed)
    hosts = np.repeat([0, 1, 2], [4, 4, 4])
    bandwidth = rng.uniform(1.0, 9.0, (12, 12))
    latency = rng.uniform(0.0, 1e-3, (12, 12))
    cluster = Cluster.from_matrices(
        bandwidth, latency, device_type("v100-16"), hosts=hosts.tolist()
    )
    if degree * stride > 12:
        return
    levels = {level.name: level for level in cluster.axis_levels(degree, stride)}
    groups = axis_groups(cluster.free, degree, stride)
    pairs = [
        (cluster.link(int(a), int(b)), bool(hosts[a] == hosts[b]))
        for group in groups
        for a, b in itertools.permutations(group, 2)
    ]
    worst_all = min(band for (band, _), _ in pairs)
    assert min(lv.bandwidth_bytes_per_s for lv in levels.values()) == worst_all
    assert max(lv.latency_s for lv in levels.values()) == max(
        wait for (_, wait), _ in pairs
    )
    if set(levels) == {"host", "network"}:
        inside = min(band for (band, _), same in pairs if same)
        assert levels["host"].bandwidth_bytes_per_s == inside
