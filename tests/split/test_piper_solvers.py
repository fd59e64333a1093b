"""Solvers of Piper tasks by name, and the judge of what they answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.errors import MeshwrightError, StrategyError, UnknownNameError
from planner.split import (
    PiperPlan,
    PiperStage,
    PiperTask,
    parse_piper,
    piper_solver_names,
    solve_piper,
)
from planner.split.piper import solve as solving
from planner.split.piper.plan import NO_PLAN, judged
from tests.split.conftest import registered
from tests.split.test_piper import layers

__all__ = ["registered"]


def task_of(seed: int = 4, nodes: int = 6, **limits: float) -> PiperTask:
    return parse_piper(layers(np.random.default_rng(seed), nodes, **limits), "made")


@pytest.mark.usefixtures("piper_solvers")
def test_auto_is_the_exact_one() -> None:
    task = task_of()
    found, best = solve_piper(task), solve_piper(task, "exact")
    assert found.exact
    assert found.found_by == "exact"
    assert found.seconds > 0
    assert found.time_per_sample == best.time_per_sample
    assert found.devices <= task.devices
    assert {"auto", "exact", "learned"} <= set(piper_solver_names())


@pytest.mark.usefixtures("piper_solvers")
def test_out_of_time_nothing_is_claimed() -> None:
    plan = solve_piper(task_of(), "exact", time_limit_s=1e-9)
    assert not plan.exact
    assert plan.stages == ()
    assert math.isinf(plan.time_per_sample)


def one_stage(task: PiperTask, *, time_limit_s: float, seed: int) -> PiperPlan:
    """All layers on one device, said to take no time."""
    stage = PiperStage(
        nodes=task.nodes,
        data_parallel=1,
        tensor_parallel=1,
        options=dict.fromkeys(task.nodes, "vanilla"),
    )
    return PiperPlan(time_per_sample=0.0, stages=(stage,))


def broken(task: PiperTask, *, time_limit_s: float, seed: int) -> PiperPlan:
    plan = one_stage(task, time_limit_s=time_limit_s, seed=seed)
    return replace(plan, stages=(replace(plan.stages[0], nodes=task.nodes[1:]),))


def test_solvers_of_others(
    piper_solvers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(memory=1e9)
    piper_solvers["mine"] = f"{__name__}:one_stage"
    mine = solve_piper(task, "mine")
    assert mine.found_by == "mine"
    assert mine.time_per_sample > solve_piper(task).time_per_sample > 0
    # Where the exact one does not end, auto takes the best of the others.
    monkeypatch.setattr(solving, "exact", lambda *_, **__: NO_PLAN)
    del piper_solvers["learned"]
    assert solve_piper(task).found_by == "mine"
    piper_solvers["broken"] = f"{__name__}:broken"
    with pytest.raises(StrategyError, match="layer 0 is in no stage"):
        solve_piper(task, "broken")


def test_auto_says_which_solver_cannot_run(
    piper_solvers: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    piper_solvers["learned"] = "no_such_package.solver:solve"
    monkeypatch.setattr(solving, "exact", lambda *_, **__: NO_PLAN)
    assert solve_piper(task_of()).stages == ()
    assert "'learned' needs 'no_such_package'" in caplog.text
    with pytest.raises(MeshwrightError, match="no_such_package"):
        solve_piper(task_of(), "learned")


@pytest.mark.usefixtures("piper_solvers")
def test_what_is_asked_wrongly_is_named() -> None:
    with pytest.raises(UnknownNameError, match="Piper solver 'fastest'"):
        solve_piper(task_of(), "fastest")
    with pytest.raises(StrategyError, match="time_limit_s=0"):
        solve_piper(task_of(), time_limit_s=0)


def _without_a_layer(task: PiperTask, plan: PiperPlan) -> PiperPlan:
    first = plan.stages[0]
    return replace(
        plan, stages=(replace(first, nodes=first.nodes[1:]), *plan.stages[1:])
    )


def _turned_round(task: PiperTask, plan: PiperPlan) -> PiperPlan:
    return replace(plan, stages=plan.stages[::-1])


def _changed(**fields: Any) -> Callable[[PiperTask, PiperPlan], PiperPlan]:
    def change(task: PiperTask, plan: PiperPlan) -> PiperPlan:
        return replace(
            plan, stages=(replace(plan.stages[0], **fields), *plan.stages[1:])
        )

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_a_layer, "layer 0 is in no stage"),
        (_turned_round, "leads back to an earlier stage"),
        (_changed(data_parallel=0), "data_parallel=0 does not divide 4"),
        (_changed(tensor_parallel=7), "there are 4 devices"),
        (_changed(options={}), "layer 0 has no option None"),
        (_changed(nodes=(0, 0)), "layer 0 is unknown or in two stages"),
    ],
)
def test_what_is_no_pipeline_is_refused(
    change: Callable[[PiperTask, PiperPlan], PiperPlan], message: str
) -> None:
    task = task_of(nodes=6, memory=13)
    plan = solve_piper(task, "exact")
    assert len(plan.stages) > 1
    assert judged(task, plan).time_per_sample == plan.time_per_sample
    with pytest.raises(StrategyError, match=message):
        judged(task, change(task, plan))


def test_a_stage_that_does_not_fit_is_refused() -> None:
    task = task_of(nodes=6, memory=1e9)
    plan = one_stage(task, time_limit_s=1, seed=0)
    assert judged(task, plan).time_per_sample > 0
    with pytest.raises(StrategyError, match="stage 0 does not fit into 20 bytes"):
        judged(task.on(memory_bytes=20), plan)
