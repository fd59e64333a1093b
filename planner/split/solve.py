"""Solvers of split tasks: along orders, refined, exact, and the best of all in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from planner.errors import MeshwrightError, NoFeasiblePlanError, StrategyError
from planner.split.exact import Outcome, best_exact
from planner.split.groups import Groups, group
from planner.split.linear import Split, best_linear
from planner.split.loads import breaches, max_load_ms
from planner.split.refine import refine
from planner.split.search import NO_BETTER
from planner.split.solver import Solution, get_solver, solver_names
from planner.split.task import SplitTask

__all__ = ["auto", "exact", "linearised", "refined", "solve"]

_BUILT_IN = ("auto", "exact", "linearised", "refined")
_REFINE_SHARE = 0.1  # of the time, before the exact search
_EXACT_SHARE = 0.6  # of the time left after it, where other solvers are installed

_log = logging.getLogger(__name__)


def _legal(
    task: SplitTask, run: Callable[[Groups], tuple[Split | None, bool]], name: str
) -> Solution | None:
    """A solver's split, made again with backward edges counted if it is not legal."""
    split, optimal = run(group(task))
    if split is None:
        return None
    if breaches(task, split.assignment):
        lower = split.load_ms
        split, _ = run(group(task, mirrored=True))
        if split is None:
            return None
        optimal = optimal and split.load_ms <= lower * (1 + NO_BETTER)
    return Solution(
        load_ms=split.load_ms,
        assignment=split.assignment,
        optimal=optimal,
        found_by=name,
    )


def linearised(
    task: SplitTask,
    *,
    time_limit_s: float = 60.0,  # noqa: ARG001 every solver is called the same way
    seed: int = 0,  # noqa: ARG001
) -> Solution | None:
    """The best split along any of ten orders; see :func:`best_linear`."""
    return _legal(task, lambda groups: (best_linear(groups), False), "linearised")


def refined(
    task: SplitTask, *, time_limit_s: float = 60.0, seed: int = 0
) -> Solution | None:
    """The best split along orders, made better by moves; see :func:`refine`."""

    def run(groups: Groups) -> tuple[Split | None, bool]:
        return refine(groups, seed=seed, time_limit_s=time_limit_s), False

    return _legal(task, run, "refined")


def _searched(groups: Groups, seed: int, ends: float) -> Outcome:
    left = ends - time.monotonic()
    known = refine(groups, seed=seed, time_limit_s=_REFINE_SHARE * left)
    return best_exact(groups, known, time_limit_s=ends - time.monotonic())


def exact(
    task: SplitTask, *, time_limit_s: float = 60.0, seed: int = 0
) -> Solution | None:
    """The best split of all; None if time or memory do not suffice to know.

    Raises:
        NoFeasiblePlanError: If there is no legal split.
    """
    ends = time.monotonic() + time_limit_s
    unfinished = False

    def run(groups: Groups) -> tuple[Split | None, bool]:
        nonlocal unfinished
        outcome = _searched(groups, seed, ends)
        unfinished = unfinished or not outcome.finished
        return (None if unfinished else outcome.split), True

    found = _legal(task, run, "exact")
    if found is None and not unfinished:
        raise _none_fits(task)
    return found


def auto(
    task: SplitTask, *, time_limit_s: float = 60.0, seed: int = 0
) -> Solution | None:
    """The best of all installed solvers in the time there is.

    The exact search goes on from the best split along orders. If it ends, that is the
    optimum; if not, the other solvers get the rest of the time.

    Raises:
        NoFeasiblePlanError: If there is no legal split.
    """
    ends = time.monotonic() + time_limit_s
    others = [name for name in solver_names() if name not in _BUILT_IN]
    first = time_limit_s * (_EXACT_SHARE if others else 1.0)
    finished = True

    def run(groups: Groups) -> tuple[Split | None, bool]:
        nonlocal finished
        outcome = _searched(groups, seed, ends - time_limit_s + first)
        finished = finished and outcome.finished
        return outcome.split, outcome.finished

    best = _legal(task, run, "exact")
    if best is None and finished:
        raise _none_fits(task)
    if best is not None and not best.optimal:
        best = replace(best, found_by="refined")
    if best is None or not best.optimal:
        for name in others:
            found = _of_another(task, name, max(ends - time.monotonic(), 0.0), seed)
            if found and (best is None or found.load_ms < best.load_ms):
                best = found
    return best


def _of_another(
    task: SplitTask, name: str, time_limit_s: float, seed: int
) -> Solution | None:
    """What another solver finds; one that cannot run here is named in the log."""
    try:
        solver = get_solver(name)
    except MeshwrightError as error:
        _log.warning("auto leaves out a solver: %s", error)
        return None
    found = solver(task, time_limit_s=time_limit_s, seed=seed)
    return found and _judged(task, found, name)


def _judged(task: SplitTask, found: Solution, name: str) -> Solution:
    """The solution with its load as the judge has it.

    Raises:
        StrategyError: If it is not legal.
    """
    reasons = breaches(task, found.assignment)
    if reasons:
        raise StrategyError(
            f"split solver {name!r} gave an illegal split of {task.name}: {reasons[0]}"
        )
    load = max_load_ms(task, found.assignment)
    return replace(found, load_ms=load, found_by=found.found_by or name)


def _none_fits(task: SplitTask) -> NoFeasiblePlanError:
    return NoFeasiblePlanError(
        [
            f"{task.name}: {task.size_bytes.sum():.0f} bytes in "
            f"{int(task.colour.max()) + 1} classes do not fit on {task.accelerators} "
            f"accelerators of {task.memory_bytes:.0f} bytes and {task.cpus} CPUs"
        ],
        ["more memory, more accelerators, or a CPU"],
    )


def solve(
    task: SplitTask, method: str = "auto", *, time_limit_s: float = 60.0, seed: int = 0
) -> Solution | None:
    """Split a task.

    Args:
        task: What is split.
        method: Name of a solver: ``auto``, ``exact``, ``linearised``, ``refined`` or
            one that is installed besides (:func:`solver_names`).
        time_limit_s: Time there is.
        seed: Of all that is left to chance.

    Returns:
        A legal split with its load by the judge; None if the solver did not finish.

    Raises:
        UnknownNameError: If there is no such solver.
        NoFeasiblePlanError: If there is no legal split.
        StrategyError: If the time is not above 0, or the solver's split is not legal.
    """
    if not time_limit_s > 0:
        raise StrategyError(f"time_limit_s={time_limit_s}; must be above 0")
    solver = get_solver(method)
    start = time.perf_counter()
    found = solver(task, time_limit_s=time_limit_s, seed=seed)
    seconds = time.perf_counter() - start
    return found and replace(_judged(task, found, method), seconds=seconds)
