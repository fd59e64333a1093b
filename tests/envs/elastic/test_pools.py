"""Places of jobs on hosts."""

from __future__ import annotations

import numpy as np
import pytest

from envs.elastic.pools import HostPool, Room, pools_of
from planner.cluster import Cluster
from planner.errors import StrategyError, UnknownNameError


def _room(hosts: int = 2, devices: int = 4) -> Room:
    return Room((HostPool(kind="gpu", hosts=hosts, devices=devices),), ("gpu",))


def test_best_fit_keeps_whole_hosts_free() -> None:
    room = _room()
    room.place([(0, 0, 1), (1, 0, 2)])
    assert room.held == {0: ((0, 1),), 1: ((0, 2),)}
    moved, unplaced = room.place([(2, 0, 4)])
    assert (moved, unplaced) == (set(), [])
    assert room.held[2] == ((1, 4),)
    assert room.free.tolist() == [1, 0]


def test_jobs_move_to_make_whole_hosts() -> None:
    room = _room()
    room.place([(0, 0, 2), (1, 0, 2), (2, 0, 2)])
    room.release(0)
    # Both hosts now have two devices taken; four on one host need a move.
    room.held = {1: ((0, 2),), 2: ((1, 2),)}
    room.free[:] = 2
    moved, unplaced = room.place([(3, 0, 4)])
    assert len(moved) == 1
    assert not unplaced
    assert room.spread(3) == 0
    assert room.free.tolist() == [0, 0]


def test_few_move_and_only_smaller_ones() -> None:
    """Powers of two: each job lies on the fewest hosts, whatever came before."""
    random = np.random.default_rng(0)
    room, sizes = _room(hosts=8), dict[int, int]()
    moves = 0
    for job in range(400):
        devices = int(2 ** random.integers(5))
        while room.free.sum() < devices:
            room.release(gone := int(random.choice(list(sizes))))
            del sizes[gone]
        before = dict(room.held)
        moved, unplaced = room.place([(job, 0, devices)])
        sizes[job] = devices
        assert not unplaced
        assert all(sizes[other] < devices for other in moved)
        assert {one for one, at in before.items() if room.held[one] != at} == moved
        assert {one: sum(n for _, n in at) for one, at in room.held.items()} == sizes
        assert not any(room.spread(one) for one in sizes)
        assert room.free.sum() == 32 - sum(sizes.values())
        moves += len(moved)
    assert 0 < moves < 300


def test_the_fewest_devices_make_way() -> None:
    room = _room(hosts=3)
    room.held = {0: ((0, 2), (1, 2)), 1: ((0, 1),), 2: ((1, 2),), 3: ((2, 3),)}
    room.free[:] = (1, 0, 1)
    # Two devices on one host: job 1 makes way for them.
    assert room.place([(4, 0, 2)]) == ({1}, [])
    assert room.held[4] == ((0, 2),)
    assert room.held[1] == ((2, 1),)


def test_job_is_spread_where_nothing_else_helps() -> None:
    room = _room(hosts=2, devices=3)
    room.place([(0, 0, 2), (1, 0, 2), (2, 0, 2)])
    assert sorted(room.spread(job) for job in range(3)) == [0, 0, 1]
    assert room.place([(3, 0, 1)]) == (set(), [3])


def test_dead_devices_hold_no_job() -> None:
    room = _room(hosts=1)
    room.fail(0)
    assert room.capacity().tolist() == [3]
    assert room.place([(0, 0, 4)]) == (set(), [0])
    room.repair(0)
    assert room.place([(0, 0, 4)]) == (set(), [])
    room.release(0)
    assert room.free.tolist() == [4]


def test_pools_of_a_cluster() -> None:
    cluster = Cluster.parse("dgx-a100:3")
    assert pools_of(cluster, ("a100", "v100")) == (
        HostPool(kind="a100", hosts=3, devices=8),
    )
    with pytest.raises(UnknownNameError, match="device type with throughputs"):
        pools_of(cluster, ("v100",))


def test_bad_pools() -> None:
    with pytest.raises(StrategyError, match="0 hosts of 8 a100; give at least one"):
        HostPool(kind="a100", hosts=0, devices=8)
    with pytest.raises(StrategyError, match="without hosts; give at least one"):
        Room((), ("gpu",))
    with pytest.raises(UnknownNameError, match="'a100'"):
        Room((HostPool(kind="a100", hosts=1, devices=8),), ("gpu",))
