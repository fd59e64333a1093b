"""Times of collectives against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cluster import AxisLevel
from planner.cost.traffic.collectives import Groups, LinkShares, lines_of, time_of
from planner.schema.cluster import MeasuredCollective

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def group(*levels: tuple[int, float, float]) -> Groups:
    return Groups.from_levels(
        [
            [
                AxisLevel(
                    members=m, bandwidth_bytes_per_s=b, latency_s=late, name=str(i)
                )
                for i, (m, b, late) in enumerate(levels)
            ]
        ]
    )


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_ring_all_reduce_without_latency_is_two_passes_over_the_wire(n: int) -> None:
    time = time_of("all_reduce", 1e9, group((n, 1e10, 0.0)))
    assert time == pytest.approx([2 * (n - 1) / n * 1e9 / 1e10])


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_gather_and_scatter_are_one_pass(kind: str) -> None:
    assert time_of(kind, 1e9, group((4, 1e10, 0.0))) == pytest.approx([0.075])


def test_small_messages_pay_the_fewest_hops() -> None:
    # A tree of 8 needs 3 steps a pass where a ring needs 7 or more.
    time = time_of("all_reduce", 0.0, group((8, 1e10, 1e-5)))
    assert time == pytest.approx([2 * 3 * 1e-5])


def test_two_levels_use_every_member_of_a_host() -> None:
    # 8 members a host drive 8 network cards: inside 7/8 S/B, between 1/2 (S/8)/b.
    inside, between, size = 1e11, 1e10, 8e9
    time = time_of("all_gather", size, group((8, inside, 0.0), (2, between, 0.0)))
    hierarchical = 7 / 8 * size / inside + 1 / 2 * size / 8 / between
    flat = 15 / 16 * size / min(inside, 8 * between)
    assert time == pytest.approx([min(hierarchical, flat)])


@pytest.mark.parametrize(("in_host", "times"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_a_ring_leaves_each_host_once(in_host: int, times: float) -> None:
    # Two interfaces for 8 devices: a message alone has four shares, at most.
    shares = LinkShares(
        between_hosts=1e11, inside=1.0, outside=1.0, partial_rails=1.0, lone_factor=4.0
    )
    levels = [(in_host, 1e12, 0.0)] if in_host > 1 else []
    ring = shares.of_groups(group(*levels, (2, 1e9, 0.0)), np.array([8 // in_host]))
    assert time_of("send", 4e9, ring) == pytest.approx([4 / times])


def test_all_to_all_crosses_the_slow_level_with_what_leaves_the_host() -> None:
    time = time_of("all_to_all", 1e9, group((8, 1e12, 0.0), (2, 1e10, 0.0)))
    assert time == pytest.approx([1e9 * (1 - 8 / 16) / 1e10])


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_costs_nothing(kind: str) -> None:
    measured = (
        MeasuredCollective(
            kind="all_reduce", group_size=2, alpha_s=1.0, bandwidth_bytes_per_s=1.0
        ),
    )
    for entries in ((), measured):
        assert time_of(kind, 1e9, Groups.from_levels([[]]), entries) == 0.0


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    members=st.lists(st.integers(1, 16), min_size=1, max_size=3),
    sizes=st.lists(st.floats(0, 1e12), min_size=2, max_size=2),
)
def test_time_grows_with_size(
    kind: str, members: list[int], sizes: list[float]
) -> None:
    levels = [(m, 1e11 / 10**i, 1e-6 * 3**i) for i, m in enumerate(members)]
    small, large = (time_of(kind, s, group(*levels))[0] for s in sorted(sizes))
    assert small <= large
    wire = sizes and max(sizes) / 1e11 * 0.4
    if members[0] > 1 and kind != "all_to_all":
        assert large >= wire


@pytest.mark.parametrize("kind", KINDS)
def test_many_groups_at_once_equal_one_by_one(kind: str) -> None:
    lists = [
        [],
        [AxisLevel(members=4, bandwidth_bytes_per_s=1e11, latency_s=1e-6, name="a")],
        [
            AxisLevel(members=2, bandwidth_bytes_per_s=1e11, latency_s=1e-6, name="a"),
            AxisLevel(members=8, bandwidth_bytes_per_s=1e10, latency_s=1e-5, name="b"),
        ],
    ]
    sizes = np.array([1e6, 1e7, 1e8])
    together = time_of(kind, sizes, Groups.from_levels(lists))
    alone = [
        time_of(kind, size, Groups.from_levels([levels]))[0]
        for size, levels in zip(sizes, lists, strict=True)
    ]
    assert together == pytest.approx(alone)


def test_measured_entries_replace_the_closed_form() -> None:
    def probe(size: int, alpha: float) -> MeasuredCollective:
        return MeasuredCollective(
            kind="all_reduce",
            group_size=size,
            alpha_s=alpha,
            bandwidth_bytes_per_s=1e9,
        )

    entries = (probe(2, 1e-3), probe(8, 2e-3))
    groups = group((8, 1e12, 0.0))
    time = time_of("all_reduce", 1e9, groups, entries)
    assert time == pytest.approx([2e-3 + 1.0])
    # The nearest group size counts, other kinds keep their closed form.
    assert time_of("all_reduce", 0.0, group((3, 1e12, 0.0)), entries) == 1e-3
    other = time_of("all_gather", 1e9, groups, entries)
    assert other == time_of("all_gather", 1e9, groups)


def test_times_are_the_smaller_of_two_lines() -> None:
    levels = group((8, 1e11, 1e-6), (4, 1e9, 1e-5))
    lines = lines_of("all_reduce", levels)
    assert lines.shape == (1, 2, 2)
    ring, tree = lines[0]
    for size in (0.0, 1e3, 1e9):
        least = min(ring[0] + ring[1] * size, tree[0] + tree[1] * size)
        assert time_of("all_reduce", size, levels) == pytest.approx([least])
    assert (lines_of("all_reduce", Groups.from_levels([[]])) == 0).all()


@pytest.mark.parametrize(("members", "hosts"), [(8, 2), (8, 16), (1, 16)])
def test_sums_over_hosts_as_nccl_makes_them(members: int, hosts: int) -> None:
    # All bytes cross each host's network cards twice by either algorithm; round a ring
    # messages pass all ranks one after the other, over a tree the logarithm of them.
    inside, between, hop, far = 1e11, 1e10, 1e-6, 1e-5
    levels = [
        AxisLevel(
            members=members, bandwidth_bytes_per_s=inside, latency_s=hop, name="inside"
        ),
        AxisLevel(
            members=hosts, bandwidth_bytes_per_s=between, latency_s=far, name="between"
        ),
    ]
    # A level that a group has one member of is left out of what a cluster says.
    nccl = Groups.from_levels([levels[members == 1 :]], rings=True)
    ring, tree = lines_of("all_reduce", nccl)[0]
    ranks, rate = members * hosts, members * between
    assert ring[1] == pytest.approx(2 * (ranks - 1) / ranks / rate)
    assert tree[1] == pytest.approx(2 / rate)
    assert ring[0] == pytest.approx(
        2 * ((members - 1) * hosts * hop + (hosts - 1) * far)
    )
    steps = np.log2(members) * hop + np.log2(hosts) * far
    assert tree[0] == pytest.approx(2 * steps)
