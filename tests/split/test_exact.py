"""The optimum against every split, and against published optima."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import PlanFileError
from planner.split import (
    SplitTask,
    best_along,
    best_exact,
    best_linear,
    breaches,
    group,
    max_load_ms,
    order_by_priority,
    refine,
)
from tests.split.cases import document, legal_splits, naive_loads, task_of, training

_KINDS = ("inference", "training", "classes")


def random_task(seed: int) -> SplitTask:
    """Up to six classes on up to three accelerators and two CPUs."""
    rng = np.random.default_rng(seed)
    accelerators, cpus = int(rng.integers(1, 4)), int(rng.integers(0, 3))
    made = document(
        rng,
        nodes=int(rng.integers(2, 7 if accelerators + cpus < 4 else 5)),
        accelerators=accelerators,
        cpus=cpus,
        memory=float(rng.choice([1e9, 25, 15])),
    )
    kind = _KINDS[seed % 3]
    if kind == "training":
        made = training(rng, made)
    if kind == "classes":
        for node in made["nodes"]:
            if rng.random() < 0.2:
                node["supportedOnFpga"] = 0
            if rng.random() < 0.5:
                node["colorClass"] = int(rng.integers(0, 4))
    try:
        return task_of(made)
    except PlanFileError:
        return random_task(seed + 3000)


def least(task: SplitTask) -> float | None:
    loads = [max(naive_loads(task, device)) for device in legal_splits(task)]
    return min(loads, default=None)


@pytest.mark.parametrize("seed", range(90))
def test_no_split_is_better(seed: int) -> None:
    task = random_task(seed)
    wanted = least(task)
    outcome = best_exact(group(task))
    assert outcome.finished
    if wanted is None:
        assert outcome.split is None
        return
    assert outcome.split is not None
    assert outcome.split.load_ms == pytest.approx(wanted, rel=1e-9)
    assert breaches(task, outcome.split.assignment) == ()


@pytest.mark.parametrize("seed", range(40))
def test_nodes_without_time_change_nothing(seed: int) -> None:
    """They go with a neighbour, and that is never worse."""
    rng = np.random.default_rng(seed)
    made = document(
        rng,
        nodes=6,
        accelerators=2,
        cpus=int(rng.integers(0, 2)),
        memory=float(rng.choice([1e9, 45])),
    )
    idle = {"fpgaLatency": 0.0, "cpuLatency": 0.0}
    for node in made["nodes"]:
        node.update(idle if rng.random() < 0.4 else {})
    if seed % 2:
        made = training(rng, made)
        for node in made["nodes"][6:]:
            node.update(idle if rng.random() < 0.4 else {})
    task = task_of(made)
    wanted = least(task)
    outcome = best_exact(group(task))
    assert outcome.finished
    assert (outcome.split is None) == (wanted is None)
    if outcome.split is not None:
        assert outcome.split.load_ms == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_it_needs_no_split_to_start_from(seed: int) -> None:
    """A bad start, or none, leads to the same optimum."""
    task = random_task(3 * seed + 1)
    groups, wanted = group(task), least(task)
    assert wanted is not None
    for bound in (np.inf, 3 * wanted):
        known = best_along(groups, order_by_priority(groups, np.zeros(len(groups))))
        outcome = best_exact(groups, known if bound == np.inf else None)
        assert outcome.split is not None
        assert outcome.split.load_ms == pytest.approx(wanted, rel=1e-9)


def test_a_set_with_more_than_64_groups() -> None:
    """Two chains side by side, of fifty equal nodes each, fall apart evenly."""
    made = document(np.random.default_rng(0), nodes=100, accelerators=5, cpus=0)
    for node in made["nodes"]:
        node.update(fpgaLatency=1.0)
    made["edges"] = [
        {"sourceId": f"n{i}", "destId": f"n{i + 1}", "cost": 0.5}
        for i in range(99)
        if i != 49
    ]
    outcome = best_exact(group(task_of(made)))
    assert outcome.finished
    assert outcome.split is not None
    # The middle device of five takes ends of both chains: one cut of each.
    assert outcome.split.load_ms == 21.0


def hard() -> SplitTask:
    """Sixty nodes that nothing orders: more ideals than can be kept."""
    rng = np.random.default_rng(5)
    made = document(rng, nodes=60, accelerators=4, cpus=1)
    made["edges"] = made["edges"][:5]
    return task_of(made)


@pytest.mark.parametrize("limit", [{"time_limit_s": 0.3}, {"memory_bytes": 3_000_000}])
def test_it_gives_up_with_the_best_it_has(limit: dict[str, float]) -> None:
    task = hard()
    groups = group(task)
    known = best_linear(groups)
    outcome = best_exact(groups, **limit)  # type: ignore[arg-type]
    assert not outcome.finished
    assert known is not None
    assert outcome.split is not None
    assert outcome.split.load_ms <= known.load_ms
    assert breaches(task, outcome.split.assignment) == ()


@pytest.mark.parametrize("seed", range(20))
def test_orders_and_moves_do_not_beat_it(seed: int) -> None:
    task = random_task(seed)
    groups = group(task)
    best = best_exact(groups).split
    linear = best_linear(groups)
    refined = refine(groups, seed=seed, rounds=3)
    assert (linear is None) >= (best is None)
    if linear is None:
        return
    assert best is not None
    assert refined is not None
    assert best.load_ms <= refined.load_ms * (1 + 1e-9)
    assert refined.load_ms <= linear.load_ms
    for split in (linear, refined):
        assert split.load_ms == max_load_ms(task, split.assignment)
        if not task.backward.any():
            assert breaches(task, split.assignment) == ()


def test_published_optima(
    published: dict[str, SplitTask], golden: dict[tuple[str, str], float]
) -> None:
    rows = {
        name: load for (name, how), load in golden.items() if how == "exact_optimum"
    }
    assert len(rows) >= 9
    for name, load in rows.items():
        outcome = best_exact(group(published[name]))
        assert outcome.finished
        assert outcome.split is not None
        assert outcome.split.load_ms == pytest.approx(load, rel=1e-5)
        assert breaches(published[name], outcome.split.assignment) == ()


def test_published_splits_along_orders_are_matched(
    published: dict[str, SplitTask], golden: dict[tuple[str, str], float]
) -> None:
    rows = [(n, load) for (n, how), load in golden.items() if how == "linearised_dp"]
    assert len(rows) >= 10
    for name, load in rows:
        split = best_linear(group(published[name]))
        assert split is not None
        assert split.load_ms <= load * (1 + 1e-5)
        assert breaches(published[name], split.assignment) == ()
