"""Solvers of Piper tasks: over all suffixes, and the best of all in time."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np

from planner.errors import MeshwrightError, StrategyError
from planner.split.piper.pipelines import Pipelines
from planner.split.piper.plan import PiperPlan, judged
from planner.split.piper.solver import get_piper_solver, piper_solver_names
from planner.split.piper.suffixes import (
    Suffixes,
    all_suffixes,
    chain_of,
    draw_orders,
    rows_of,
    tables_of,
)
from planner.split.piper.task import PiperTask

__all__ = ["auto", "exact", "solve_piper"]

_BUILT_IN = ("auto", "exact")
_TABLE_BYTES = 1_500_000_000
_MOST_SUFFIXES = 20_000
_ORDERS = 16  # whose suffixes are looked at where there are too many
_EXACT_SHARE = 0.8  # of the time, where other solvers are installed

_log = logging.getLogger(__name__)


def _tables(task: PiperTask, most: int, seed: int) -> tuple[Suffixes, bool]:
    """Suffixes whose tables fit in memory, and whether they are all there are."""
    every = all_suffixes(task, most)
    if every is not None:
        tables = tables_of(task, rows_of(every, len(task)), _TABLE_BYTES)
        if tables is not None:
            return tables, True
    orders = draw_orders(task, _ORDERS, seed)
    while True:
        some = {bits for order in orders for bits in chain_of(order)}
        room = _TABLE_BYTES if len(orders) > 1 else np.inf
        tables = tables_of(task, rows_of(some, len(task)), room)
        if tables is not None:
            return tables, False
        orders = orders[: len(orders) // 2]


def exact(
    task: PiperTask,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    most_suffixes: int = _MOST_SUFFIXES,
) -> PiperPlan:
    """The pipeline of least time per sample.

    Args:
        task: What is planned.
        time_limit_s: Time there is; tables are made in any case.
        seed: Of orders.
        most_suffixes: Of graphs with more, those along some orders are looked at.

    Returns:
        The best pipeline found; ``exact`` says whether it is known to be the best.
    """
    ends = time.monotonic() + time_limit_s
    suffixes, every = _tables(task, most_suffixes, seed)
    best, finished = Pipelines(task, suffixes, ends).best()
    return replace(best, exact=every and finished, found_by="exact")


def auto(task: PiperTask, *, time_limit_s: float = 60.0, seed: int = 0) -> PiperPlan:
    """The exact one; what others there are, too, if that does not end.

    Args:
        task: What is planned.
        time_limit_s: Time there is.
        seed: Of all that is left to chance.
    """
    ends = time.monotonic() + time_limit_s
    others = [name for name in piper_solver_names() if name not in _BUILT_IN]
    share = _EXACT_SHARE if others else 1.0
    best = exact(task, time_limit_s=share * time_limit_s, seed=seed)
    for name in others:
        left = ends - time.monotonic()
        if best.exact or left <= 0:
            break
        try:
            solver = get_piper_solver(name)
            found = judged(task, solver(task, time_limit_s=left, seed=seed))
        except MeshwrightError as error:
            _log.warning("auto leaves out a solver: %s", error)
            continue
        if found.time_per_sample < best.time_per_sample:
            best = replace(found, exact=False, found_by=found.found_by or name)
    return best


def solve_piper(
    task: PiperTask,
    method: str = "auto",
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
) -> PiperPlan:
    """Plan layers that choose a parallelism each.

    Args:
        task: What is planned.
        method: Name of a solver: ``auto``, ``exact`` or one that is installed besides
            (:func:`planner.split.piper_solver_names`).
        time_limit_s: Time there is; tables, seconds for ten thousand suffixes, are
            made in any case.
        seed: Of all that is left to chance.

    Returns:
        A pipeline with its time by the judge. Without stages it says that none fits
        (``exact``) or that none was found.

    Raises:
        UnknownNameError: If there is no such solver.
        StrategyError: If the time is not above 0, or the solver's answer is no
            pipeline of the task.
    """
    if not time_limit_s > 0:
        raise StrategyError(f"time_limit_s={time_limit_s}; must be above 0")
    solver = get_piper_solver(method)
    start = time.perf_counter()
    found = solver(task, time_limit_s=time_limit_s, seed=seed)
    seconds = time.perf_counter() - start
    right = judged(task, found)
    return replace(right, found_by=right.found_by or method, seconds=seconds)
