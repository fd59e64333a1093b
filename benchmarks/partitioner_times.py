"""Partitioners over time: against a search without a clock, first plans, curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.intervals import Estimate
from benchmarks.partitioner_ratios import (
    Comparison,
    common_solvers,
    compare,
    mean_ratio,
    value_of,
)
from benchmarks.partitioner_solvers import Answer
from benchmarks.partitioner_worlds import FIRST, Record

__all__ = [
    "FirstPlan",
    "WithoutClock",
    "first_plans",
    "quality_curves",
    "without_clock",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutClock:
    """A solver against the exhaustive search that may take its time.

    Attributes:
        solver: Its name.
        budget_s: Of the solver; None for no clock.
        worlds: How many.
        quality: Against the exhaustive search.
        time: Ratio of wall times, geometric mean.
    """

    solver: str
    budget_s: float | None
    worlds: int
    quality: Comparison
    time: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPlan:
    """Time that a solver takes when it is given none.

    Attributes:
        case: Model and machines.
        devices: How many.
        solver: Its name.
        seconds: Median of the runs; infinite if a run found nothing.
        runs: How many.
    """

    case: str
    devices: int
    solver: str
    seconds: float
    runs: int


def without_clock(records: Sequence[Record]) -> tuple[WithoutClock, ...]:
    """Learned solvers against the exhaustive search without a clock."""
    slow = {
        (record.world, record.identity): record.answers["exhaustive"]
        for record in records
        if record.budget_s is None and "exhaustive" in record.answers
    }
    pairs: dict[tuple[str, float | None], list[tuple[Answer, Answer]]] = {}
    for record in records:
        reference = slow.get((record.world, record.identity))
        for name in ("learned", "auto"):
            if reference is not None and name in record.answers:
                pair = (record.answers[name], reference)
                pairs.setdefault((name, record.budget_s), []).append(pair)
    return tuple(
        WithoutClock(
            solver=name,
            budget_s=budget_s,
            worlds=len(found),
            quality=compare([m.score for m, _ in found], [o.score for _, o in found]),
            time=mean_ratio(np.log([m.seconds / o.seconds for m, o in found])),
        )
        for (name, budget_s), found in pairs.items()
    )


def first_plans(records: Sequence[Record]) -> tuple[FirstPlan, ...]:
    """Times on worlds of a kind; runs of a case are numbered."""
    runs: dict[tuple[str, int, str], list[float]] = {}
    for record in records:
        if record.kind == FIRST:
            case = record.world.rpartition(", run ")[0]
            for name, answer in record.answers.items():
                seconds = math.inf if answer.score is None else answer.seconds
                runs.setdefault((case, record.devices, name), []).append(seconds)
    return tuple(
        FirstPlan(
            case=case,
            devices=devices,
            solver=solver,
            seconds=float(np.median(seconds)) if max(seconds) < math.inf else math.inf,
            runs=len(seconds),
        )
        for (case, devices, solver), seconds in runs.items()
    )


def quality_curves(
    records: Sequence[Record],
) -> dict[str, dict[str, list[tuple[float, Estimate]]]]:
    """By kind and solver: budget and mean ratio to the best that anybody ever found.

    On the worlds that were asked at every budget; kinds with fewer than two budgets
    are left out.
    """
    found: dict[str, dict[str, list[tuple[float, Estimate]]]] = {}
    timed = [r for r in records if r.budget_s is not None and r.kind != FIRST]
    for kind in dict.fromkeys(record.kind for record in timed):
        here = [record for record in timed if record.kind == kind]
        budgets = sorted({float(r.budget_s or 0) for r in here})
        by_world: dict[str, dict[float, Record]] = {}
        for record in here:
            at = by_world.setdefault(record.world + record.identity, {})
            at[float(record.budget_s or 0)] = record
        whole = [at for at in by_world.values() if len(at) == len(budgets)]
        if len(budgets) < 2 or not whole:
            continue
        names = common_solvers([record for at in whole for record in at.values()])
        best = [_best_ever(list(at.values()), names) for at in whole]
        found[kind] = {
            name: [
                (
                    budget,
                    compare(
                        [value_of(at[budget].answers[name]) for at in whole], best
                    ).ratio,
                )
                for budget in budgets
            ]
            for name in names
        }
    return found


def _best_ever(records: Sequence[Record], names: Sequence[str]) -> float | None:
    """Late answers count: what is best does not depend on the clock."""
    scores = [r.answers[n].score for r in records for n in names]
    return min((score for score in scores if score is not None), default=None)
