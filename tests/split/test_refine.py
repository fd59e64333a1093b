"""Moves make splits better, the same ones for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from planner.split import best_along, breaches, group, order_by_priority, refine
from planner.split.groups import Groups
from planner.split.linear import Split
from tests.split.cases import document, task_of


def poor(seed: int) -> tuple[Groups, Split]:
    """A split along an order by chance."""
    rng = np.random.default_rng(seed)
    made = document(rng, nodes=40, accelerators=4, cpus=1)
    made["edges"] = [e for e in made["edges"] if rng.random() < 0.15]
    groups = group(task_of(made))
    split = best_along(groups, order_by_priority(groups, rng.random(len(groups))))
    assert split is not None
    return groups, split


def test_splits_become_better() -> None:
    gains = []
    for seed in range(8):
        groups, split = poor(seed)
        better = refine(groups, split, seed=seed)
        assert better is not None
        assert breaches(groups.task, better.assignment) == ()
        gains.append(split.load_ms / better.load_ms)
    assert min(gains) >= 1.0
    assert np.mean(gains) > 1.02


def test_the_same_seed_makes_the_same_moves() -> None:
    groups, split = poor(1)
    first, second = (refine(groups, split, seed=7) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.assignment.tolist() == second.assignment.tolist()


def test_no_time_leaves_it_as_it_was() -> None:
    groups, split = poor(2)
    assert refine(groups, split, time_limit_s=0.0) is split


@pytest.mark.parametrize("seed", range(6))
def test_memory_and_support_are_kept_to(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = document(rng, nodes=12, accelerators=3, cpus=1, memory=22)
    for node in made["nodes"][::4]:
        node["supportedOnFpga"] = 0
    task = task_of(made)
    split = refine(group(task), seed=seed)
    assert split is not None
    assert breaches(task, split.assignment) == ()
