"""Placement rules on hosts with shared GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from envs.elastic.pods import (
    NodeTable,
    PodRoom,
    PodTable,
    at_demand,
    read_nodes,
    read_pods,
)
from planner.errors import UnknownNameError
from policies.elastic.placement import PLACEMENT_RULES, fill, make_placement

_FOLDER = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "traces" / "openb"


def _nodes(*gpus: int) -> NodeTable:
    count = len(gpus)
    return NodeTable(
        cpu=np.full(count, 64000),
        memory=np.full(count, 1000),
        gpus=np.array(gpus),
        kind=np.zeros(count, dtype=np.int64),
        kinds=("T4",),
    )


def _pods(*asked: tuple[int, int]) -> PodTable:
    count = len(asked)
    return PodTable(
        cpu=np.full(count, 1000),
        memory=np.full(count, 1),
        gpus=np.array([gpus for gpus, _ in asked]),
        milli=np.array([milli for _, milli in asked]),
        allowed=np.ones((count, 1), dtype=np.bool_),
    )


def test_best_fit_takes_the_smallest_host_that_suffices() -> None:
    room, pods = PodRoom(_nodes(8, 2)), _pods((1, 500), (1, 300))
    rule = make_placement("best_fit", room.nodes, pods)
    assert fill(room, pods, rule) == 0
    assert room.gpu[1, :2].tolist() == [200, 1000]


def test_fgd_keeps_whole_gpus_for_typical_pods() -> None:
    # Pods ask for 700 or 300 of a GPU: 300 go where 700 no longer fit.
    typical = _pods(*[(1, 700)] * 5, *[(1, 300)] * 5)
    room = PodRoom(_nodes(2))
    pods = _pods((1, 700), (1, 300))
    assert fill(room, pods, make_placement("fgd", room.nodes, typical)) == 0
    assert sorted(room.gpu[0, :2].tolist()) == [0, 1000]


def test_pods_without_room_are_passed_over() -> None:
    for name in PLACEMENT_RULES:
        room, pods = PodRoom(_nodes(1)), _pods((1, 800), (2, 1000), (1, 300), (1, 200))
        assert fill(room, pods, make_placement(name, room.nodes, pods)) == 2
        assert room.share == 1.0


def test_random_placement_follows_its_seed() -> None:
    pods = _pods(*[(1, 100)] * 30)
    rooms = [PodRoom(_nodes(4, 4, 4)) for _ in range(3)]
    for room, seed in zip(rooms, (1, 1, 2), strict=True):
        fill(room, pods, make_placement("random", room.nodes, pods, seed))
    assert np.array_equal(rooms[0].gpu, rooms[1].gpu)
    assert not np.array_equal(rooms[0].gpu, rooms[2].gpu)


def test_unknown_rule() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'best_fit'"):
        make_placement("bestfit", _nodes(1), _pods((1, 100)))


@pytest.mark.slow
@pytest.mark.skipif(
    not _FOLDER.is_dir() and not os.environ.get("CI"),
    reason="MESHWRIGHT_DATA has no traces/openb",
)
@pytest.mark.parametrize(
    ("name", "published"), [("random", 87.5), ("best_fit", 93.1), ("fgd", 95.4)]
)
def test_published_shares_of_openb(name: str, published: float) -> None:
    nodes = read_nodes(_FOLDER / "openb_node_list_gpu_node.csv.gz")
    pods = read_pods(_FOLDER / "openb_pod_list_default.csv.gz", nodes.kinds)
    room = PodRoom(nodes)
    asked = at_demand(pods, nodes, 1.3, seed=42)
    fill(room, asked, make_placement(name, nodes, pods, seed=42))
    assert 100 * room.share == pytest.approx(published, abs=1.0)
