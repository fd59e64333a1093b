"""Resharding between meshes: unit tasks, their senders and their order."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from planner.errors import StrategyError
from planner.schema.resharding import (
    MeshLayout,
    Resharding,
    Transfer,
    hops_of,
    unit_tasks,
)
from planner.simulate.resharding import (
    ReshardingTime,
    lower_bound_s,
    makespan_s,
    naive_resharding,
    per_device_makespan_s,
    plan_resharding,
    size_balanced_resharding,
)
from tests.simulate.resharding_cases import CASES, ReshardingCase

#: A byte a second: seconds are bytes.
INT32 = ReshardingTime(element_bytes=4, bytes_per_s=1.0)


def _of(case: ReshardingCase) -> tuple[tuple[int, ...], MeshLayout, MeshLayout]:
    return case.shape, case.source, case.destination


@pytest.mark.parametrize("number", CASES)
def test_the_planned_order_meets_the_lower_bound(number: int) -> None:
    case = CASES[number]
    planned = plan_resharding(*_of(case))
    assert lower_bound_s(*_of(case), INT32) == case.bound_bytes
    assert makespan_s(planned, INT32) == case.bound_bytes
    tasks = unit_tasks(*_of(case))
    assert len(tasks) == case.unit_tasks
    # Every task once, sent by a device that holds it.
    assert sorted(map(repr, tasks)) == sorted(repr(t.task) for t in planned.transfers)
    assert all(one.sender in one.task.senders for one in planned.transfers)
    assert plan_resharding(*_of(case)) == planned


@pytest.mark.parametrize("number", CASES)
def test_simpler_ways_take_as_long_as_published(number: int) -> None:
    case = CASES[number]
    balanced = size_balanced_resharding(*_of(case))
    assert makespan_s(naive_resharding(*_of(case)), INT32) == case.naive_bytes
    assert makespan_s(balanced, INT32) == case.balanced_bytes
    assert per_device_makespan_s(balanced, INT32) == case.per_device_bytes


def _layouts(rng: random.Random) -> tuple[MeshLayout, MeshLayout]:
    splits = [("", ""), ("h", ""), ("", "h"), ("d", ""), ("", "d"), ("hd", "")]
    first, second = (
        MeshLayout(
            hosts=rng.randint(1, 3),
            devices_per_host=rng.randint(1, 2),
            split=rng.choice(splits),
        )
        for _ in range(2)
    )
    return first, second


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_few_tasks_is_shorter(seed: int) -> None:
    rng = random.Random(seed)
    shape = (12, 12)
    while True:
        source, destination = _layouts(rng)
        tasks = unit_tasks(shape, source, destination)
        if 2 <= len(tasks) <= 5:
            break
    best = math.inf
    for senders in itertools.product(*(task.senders for task in tasks)):
        pairs = zip(tasks, senders, strict=True)
        transfers = [Transfer(task=task, sender=sender) for task, sender in pairs]
        for order in itertools.permutations(transfers):
            made = Resharding(
                shape=shape, source=source, destination=destination, transfers=order
            )
            best = min(best, makespan_s(made, INT32))
    planned = plan_resharding(shape, source, destination)
    assert makespan_s(planned, INT32) == best
    assert lower_bound_s(shape, source, destination, INT32) <= best


@pytest.mark.parametrize("budget", [1, 3, 100])
def test_a_small_budget_is_never_worse_than_balanced_sizes(budget: int) -> None:
    for case in CASES.values():
        planned = plan_resharding(*_of(case), budget=budget)
        assert makespan_s(planned, INT32) <= case.balanced_bytes


def test_parts_tile_what_is_wanted() -> None:
    case = CASES[6]
    for device in range(case.destination.num_devices):
        tasks = [t for t in unit_tasks(*_of(case)) if device in t.receivers]
        tile = case.destination.tile(device, case.shape)
        whole = math.prod(stop - start for start, stop in tile)
        assert sum(task.elements for task in tasks) == whole


def test_a_chain_enters_each_host_once() -> None:
    case = CASES[7]
    for transfer in plan_resharding(*_of(case)).transfers:
        hops = hops_of(transfer, case.destination)
        assert [hop.receiver for hop in hops] == list(range(8))
        assert [hop.crosses for hop in hops] == [n % 4 == 0 for n in range(8)]
        assert [hop.first for hop in hops] == [n == 0 for n in range(8)]


def test_wrong_layouts_are_refused() -> None:
    with pytest.raises(StrategyError, match="has 'x'; use '', 'h', 'd' or 'hd'"):
        MeshLayout(hosts=2, devices_per_host=4, split=("x",))
    with pytest.raises(StrategyError, match="has 'h' twice"):
        MeshLayout(hosts=2, devices_per_host=4, split=("h", "hd"))
    with pytest.raises(StrategyError, match="0 hosts x 4 devices"):
        MeshLayout(hosts=0, devices_per_host=4, split=("h",))
    layout = MeshLayout(hosts=2, devices_per_host=4, split=("hd",))
    with pytest.raises(StrategyError, match="use a multiple of 8"):
        unit_tasks((12,), layout, layout)
    with pytest.raises(StrategyError, match="give one entry for each"):
        unit_tasks((8, 8), layout, layout)
    with pytest.raises(StrategyError, match="budget=0"):
        plan_resharding((8,), layout, layout, budget=0)
    with pytest.raises(StrategyError, match="bytes_per_s=0"):
        ReshardingTime(element_bytes=4, bytes_per_s=0.0)
