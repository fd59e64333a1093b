"""Tasks drawn by chance."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import StrategyError, UnknownNameError
from planner.split import breaches, group, solve
from policies.split.graphs import FAMILIES
from policies.split.worlds import PARTS, WorldConfig, draw_groups, draw_task

SMALL = WorldConfig(least=12, most=40)


@pytest.mark.parametrize("family", FAMILIES)
def test_producers_come_before_consumers(family: str) -> None:
    for seed in range(5):
        sketch = FAMILIES[family](np.random.default_rng(seed), 60)
        assert 6 < len(sketch) < 150
        assert sketch.edges
        assert all(u < v < len(sketch) for u, v in sketch.edges)
        assert len(set(sketch.edges)) == len(sketch.edges)
        assert min(sketch.work) >= 0


def test_a_number_is_a_task_of_its_own_in_each_part() -> None:
    one, again = draw_task(3), draw_task(3)
    np.testing.assert_array_equal(one.accelerator_ms, again.accelerator_ms)
    np.testing.assert_array_equal(one.edge_target, again.edge_target)
    others = [draw_task(3, part) for part in PARTS[1:]] + [draw_task(4)]
    for other in others:
        assert not np.array_equal(one.accelerator_ms, other.accelerator_ms)


def test_tasks_are_of_both_kinds_and_can_be_split() -> None:
    tasks = [draw_task(number, "train", SMALL) for number in range(24)]
    assert {bool(task.backward.any()) for task in tasks} == {False, True}
    assert {task.cpus for task in tasks} == {0, 1}
    solved = 0
    for task in tasks:
        assert len(task.topological) == len(task)
        found = solve(task, "linearised") if group(task) else None
        if found is not None:
            solved += 1
            assert breaches(task, found.assignment) == ()
    assert solved >= 20


def test_groups_have_something_to_order() -> None:
    assert all(len(groups) > 8 for groups in draw_groups(0, 6, "validation", SMALL))


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(StrategyError, match="least=40, most=20"):
        WorldConfig(least=40, most=20)
    with pytest.raises(UnknownNameError, match="published"):
        draw_task(0, "published")
