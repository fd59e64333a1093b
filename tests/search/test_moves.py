"""Moves keep devices, rules and pins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.schema.schedules import schedule_names, schedule_spec
from planner.search.campaign import Campaign
from planner.search.moves import (
    Solution,
    block_sizes,
    crossed,
    moved_order,
    neighbours,
    swapped,
)
from planner.search.starts import begin
from planner.space import StrategyTable, legal, normalize_pins
from tests.cost.made import row
from tests.search.made import CLUSTERS, request_on


def test_moves_of_orders_keep_the_devices() -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        count = int(rng.integers(1, 17))
        order = rng.permutation(40)[:count]
        size = int(rng.integers(1, max(count // 2, 1) + 1))
        made = moved_order(order, order[:0], size, rng)
        assert sorted(made.tolist()) == sorted(order.tolist())


def test_a_random_move_reaches_every_order() -> None:
    rng = np.random.default_rng(0)
    order, seen = np.arange(4), set()
    for _ in range(2000):
        order = moved_order(order, order[:0], 1, rng)
        seen.add(tuple(order.tolist()))
    assert len(seen) == 24


def test_spare_devices_replace_others() -> None:
    rng, all_of = np.random.default_rng(0), np.arange(12)
    order, seen = np.arange(8), set()
    for _ in range(300):
        order = moved_order(order, np.setdiff1d(all_of, order), 2, rng)
        assert len(set(order.tolist())) == 8
        seen |= set(order.tolist())
    assert seen == set(range(12))


def test_blocks_are_moved_whole() -> None:
    rng, order = np.random.default_rng(1), np.arange(12)
    for _ in range(200):
        order = moved_order(order, order[:0], 3, rng)
        blocks = order.reshape(4, 3)
        assert (np.diff(blocks, axis=1) == 1).all()
        assert (blocks[:, 0] % 3 == 0).all()


def test_all_exchanges_and_some() -> None:
    order = np.array([5, 6, 7, 8, 9, 10])
    made = [tuple(m.tolist()) for m in swapped(order, 2)]
    assert made == [(7, 8, 5, 6, 9, 10), (9, 10, 7, 8, 5, 6), (5, 6, 9, 10, 7, 8)]
    some = [tuple(m.tolist()) for m in swapped(order, 2, 1, 2)]
    assert some == made[1::2]
    assert len(list(swapped(np.arange(7), 1))) == 21


def test_children_have_as_many_devices_as_the_first_parent() -> None:
    rng = np.random.default_rng(0)
    inherited = 0
    for _ in range(500):
        one, other = (rng.permutation(12)[: int(rng.integers(1, 13))] for _ in range(2))
        child = crossed(one, other, rng)
        assert len(child) == len(one) == len(set(child.tolist()))
        assert set(child.tolist()) <= set(one.tolist()) | set(other.tolist())
        inherited += bool((child != one).any() and (child == one).any())
    assert inherited > 200


def test_sizes_of_blocks() -> None:
    degrees = row(pp=4, dp_shard=2, dp_replicate=2, tp=2)
    assert block_sizes(degrees, 4) == (1, 2, 4, 8)
    assert block_sizes(row(), 1) == (1,)
    assert max(block_sizes(row(dp_replicate=6), 8)) <= 3


PINS: list[dict[str, Any]] = [
    {},
    {"pp": 2},
    {"tp": 2, "zero_stage": 1},
    {"schedule": "1F1B", "recompute": "full"},
    {"microbatch_size": 3},
]


@pytest.mark.parametrize("pins", PINS, ids=str)
@pytest.mark.parametrize("name", CLUSTERS)
def test_a_walk_stays_legal_and_keeps_the_pins(name: str, pins: dict[str, Any]) -> None:
    fixed = normalize_pins(pins)
    request = request_on(name, pins=fixed, devices="any" if not pins else "all")
    campaign = Campaign(request)
    begin(campaign)
    known = campaign.best(20)
    walked: list[Solution] = []
    for one in known:
        for _ in range(15):
            one = campaign.moved(one)
            walked.append(one)
    if not known:
        return
    columns = {key: [one.row[key] for one in walked] for key in walked[0].row}
    table = StrategyTable.from_columns(**columns)
    assert legal(table, request.facts).all()
    for knob, value in fixed.items():
        assert (getattr(table, knob) == value).all()
    free = set(request.context.cluster.free.tolist())
    for one, ranks in zip(walked, table.num_devices.tolist(), strict=True):
        assert len(one.order) == ranks == len(set(one.order.tolist()))
        assert set(one.order.tolist()) <= free
    if len(free) > 1 and not pins:
        assert len({len(one.order) for one in walked}) > 1
        assert len({one.mesh for one in walked}) > 3


def test_neighbours_change_every_knob() -> None:
    request = request_on("uniform", 32)
    made = row(pp=2, dp_shard=2, dp_replicate=2, zero_stage=1, microbatch_size=2)
    made |= {"num_microbatches": 4, "schedule": schedule_spec("1F1B").code}
    found = neighbours(made, request.facts, {}, schedule_names())
    assert found is not None
    for knob in ("pp", "dp_replicate", "dp_shard", "tp", "zero_stage", "recompute"):
        assert len(set(getattr(found, knob).tolist())) > 1, knob
    assert {2, 4} < set(found.num_microbatches.tolist())
    assert len(set(found.schedule.tolist())) > 3
    assert made not in list(found.rows())


def test_a_row_that_is_all_pinned_has_no_neighbours() -> None:
    request = request_on("one device", 1)
    assert neighbours(row(), request.facts, row()) is None
