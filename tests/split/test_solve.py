"""Solvers by name, one's own among them."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from planner.errors import (
    MeshwrightError,
    NoFeasiblePlanError,
    StrategyError,
    UnknownNameError,
)
from planner.split import (
    Solution,
    SplitTask,
    breaches,
    max_load_ms,
    one_device,
    solve,
    solver_names,
)
from tests.split.cases import document, task_of, training
from tests.split.test_exact import hard, least, random_task

_NO_SOLVER = 7


def first_device(task: SplitTask, *, time_limit_s: float, seed: int) -> Solution | None:
    """Everything on the first accelerator, with a load that is not true."""
    return Solution(load_ms=0.001, assignment=one_device(task))


def striped(task: SplitTask, *, time_limit_s: float, seed: int) -> Solution | None:
    """By turns, which is not contiguous."""
    return Solution(load_ms=1.0, assignment=np.arange(len(task)) % 2)


def much_better(task: SplitTask, *, time_limit_s: float, seed: int) -> Solution | None:
    """What annealing for longer finds."""
    return replace(_LONGER, found_by="")


_LONGER = Solution(load_ms=0.0, assignment=np.zeros(1, dtype=np.int64))


@pytest.mark.parametrize("method", ["auto", "exact", "linearised", "refined"])
def test_each_gives_a_legal_split(method: str, solvers: dict[str, str]) -> None:
    for seed in range(4):
        task = random_task(seed)
        found = solve(task, method, seed=seed)
        assert found is not None
        assert breaches(task, found.assignment) == ()
        assert found.load_ms == max_load_ms(task, found.assignment)
        assert found.seconds > 0
        if method in ("auto", "exact"):
            assert found.optimal
            assert found.load_ms == pytest.approx(least(task), rel=1e-9)


def test_backward_parts_are_contiguous_whatever_the_backward_edges() -> None:
    """Backward edges that do not mirror the forward ones."""
    legal = 0
    for seed in range(25):
        rng = np.random.default_rng(seed)
        made = training(rng, document(rng, nodes=5, accelerators=3, cpus=0))
        ids = [node["id"] for node in made["nodes"] if node["isBackwardNode"]]
        order = rng.permutation(len(ids))
        made["edges"] = made["edges"][: len(made["edges"]) // 2] + [
            {"sourceId": ids[order[i]], "destId": ids[order[i + 1]], "cost": 0.5}
            for i in range(len(ids) - 1)
        ]
        prices = {edge["sourceId"]: edge["cost"] for edge in made["edges"]}
        for edge in made["edges"]:
            edge["cost"] = prices[edge["sourceId"]]
        task = task_of(made)
        found = _solve_without_names(task)
        assert breaches(task, found.assignment) == ()
        wanted = least(task)
        assert wanted is not None
        assert found.load_ms >= wanted * (1 - 1e-9)
        if found.optimal:
            assert found.load_ms == pytest.approx(wanted, rel=1e-9)
            legal += 1
    assert 0 < legal < 25


def _solve_without_names(task: SplitTask) -> Solution:
    from planner.split.solve import exact

    found = exact(task)
    assert found is not None
    return found


def test_one_that_does_not_finish_gives_none(solvers: dict[str, str]) -> None:
    assert solve(hard(), "exact", time_limit_s=0.3) is None
    found = solve(hard(), "auto", time_limit_s=0.3)
    assert found is not None
    assert not found.optimal


def test_unknown_names_and_times_are_refused(solvers: dict[str, str]) -> None:
    assert solver_names() == ("auto", "exact", "linearised", "refined")
    with pytest.raises(UnknownNameError, match="did you mean 'refined'"):
        solve(hard(), "refind")
    with pytest.raises(StrategyError, match="time_limit_s=0; must be above 0"):
        solve(hard(), time_limit_s=0)


def test_the_judge_says_what_a_split_loads(solvers: dict[str, str]) -> None:
    solvers["mine"] = f"{__name__}:first_device"
    task = hard()
    found = solve(task, "mine")
    assert found is not None
    assert found.load_ms == pytest.approx(task.accelerator_ms.sum())
    assert found.found_by == "mine"


def test_illegal_splits_are_refused(solvers: dict[str, str]) -> None:
    solvers["mine"] = f"{__name__}:striped"
    made = document(np.random.default_rng(0), nodes=4)
    made["edges"] = [
        {"sourceId": f"n{i}", "destId": f"n{i + 1}", "cost": 1.0} for i in range(3)
    ]
    with pytest.raises(StrategyError, match="'mine' gave an illegal split of made"):
        solve(task_of(made), "mine")


def test_auto_takes_what_others_do_better(
    solvers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = hard()
    alone = solve(task, time_limit_s=0.3)
    longer = solve(task, "refined", seed=3)
    assert alone is not None
    assert longer is not None
    monkeypatch.setattr(f"{__name__}._LONGER", longer)
    solvers["mine"] = f"{__name__}:much_better"
    found = solve(task, time_limit_s=0.05)
    assert found is not None
    assert found.load_ms <= longer.load_ms


def test_auto_says_which_solver_cannot_run(
    solvers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    solvers["lacking"] = "a_package_that_is_not_there:solve"
    with caplog.at_level(logging.WARNING):
        assert solve(hard(), time_limit_s=0.3) is not None
    assert "'lacking' needs 'a_package_that_is_not_there'" in caplog.text
    with pytest.raises(MeshwrightError, match="which is not installed"):
        solve(hard(), "lacking")


def test_no_function_is_no_solver(solvers: dict[str, str]) -> None:
    solvers["number"] = f"{__name__}:_NO_SOLVER"
    with pytest.raises(MeshwrightError, match="cannot be called"):
        solve(hard(), "number")


def test_what_does_not_fit_is_said(solvers: dict[str, str]) -> None:
    made = document(
        np.random.default_rng(0), nodes=6, accelerators=2, cpus=0, memory=10
    )
    for node in made["nodes"]:
        node["size"] = 9.0
    for method in ("auto", "exact"):
        with pytest.raises(NoFeasiblePlanError, match="do not fit on 2 accelerators"):
            solve(task_of(made), method)
    assert solve(task_of(made), "linearised") is None
