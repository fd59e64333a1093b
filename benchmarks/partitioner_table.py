"""Partitioners on the same worlds: ratios with intervals, wins and losses.

A ratio is of the objective's value, so that below 1 is better. Only answers in time
count. Where one of two has none, the ratio is 2 or 1/2; where both have none, the
world is left out. Intervals are of the mean logarithm, by resampling worlds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.partitioner_solvers import ABLATIONS, Answer, baselines
from benchmarks.partitioner_worlds import FIRST, Record
from planner.calibration.judging.intervals import Estimate, bootstrap

__all__ = [
    "Comparison",
    "FirstPlan",
    "KindTable",
    "SolverRow",
    "WithoutClock",
    "ablations",
    "compare",
    "first_plans",
    "kind_tables",
    "log_ratio",
    "mean_ratio",
    "quality_curves",
    "without_clock",
]

#: What no answer counts as against one, at least: it is no better than the worst answer
#: that anybody gave for that world.
_MISS = 2.0
#: Values that are closer than this are a tie.
_TIE = 1e-3

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A solver against another on the same worlds.

    Attributes:
        ratio: Geometric mean of its values over the other's.
        wins: Worlds where it is better by more than 0.1 %.
        ties: Worlds where neither is.
        losses: Worlds where the other is.
    """

    ratio: Estimate
    wins: int
    ties: int
    losses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverRow:
    """A solver within one kind and budget.

    Attributes:
        solver: Its name.
        against_best: Itself against the best baseline of each world.
        best_share: Share of worlds where nobody is better, by more than 0.1 %.
        seconds: Mean wall time.
        late: Worlds where it answered too late.
        missed: Worlds where it found nothing.
    """

    solver: str
    against_best: Comparison
    best_share: float
    seconds: float
    late: int
    missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTable:
    """One kind of worlds at one budget.

    Attributes:
        kind: Of the worlds.
        budget_s: Of each solver.
        worlds: How many.
        strongest: Baseline that is best over all of them.
        against_strongest: Learned solvers against that one, by name.
        rows: All solvers.
    """

    kind: str
    budget_s: float
    worlds: int
    strongest: str
    against_strongest: dict[str, Comparison]
    rows: tuple[SolverRow, ...]

    def row(self, solver: str) -> SolverRow | None:
        """Of a solver, if it took part."""
        return next((row for row in self.rows if row.solver == solver), None)


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
    """How long a solver takes that is given no time.

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


def _value(answer: Answer | None) -> float | None:
    return None if answer is None or answer.late else answer.score


def _best(record: Record, names: Sequence[str]) -> float | None:
    found = [_value(record.answers.get(name)) for name in names]
    return min((value for value in found if value is not None), default=None)


def log_ratio(
    mine: float | None, other: float | None, worst: float | None = None
) -> float:
    """Logarithm of mine over the other; NaN if there is neither.

    Args:
        mine: None for no answer in time.
        other: Likewise.
        worst: Worst answer of anybody, which no answer is no better than.
    """
    if mine is None and other is None:
        return math.nan
    if mine is not None and other is not None:
        return math.log(mine / other)
    known = mine if mine is not None else other
    missed = math.log(max(_MISS, (worst or 0.0) / (known or math.inf)))
    return missed if mine is None else -missed


def mean_ratio(logs: Array) -> Estimate:
    """Geometric mean of ratios with its interval.

    Args:
        logs: Logarithms. Shape [worlds].
    """
    mean = bootstrap(logs, np.mean)
    ends = (math.exp(end) for end in (mean.value, mean.low, mean.high))
    value, low, high = ends
    return Estimate(value=value, low=low, high=high)


def compare(
    mine: Sequence[float | None],
    other: Sequence[float | None],
    worst: Sequence[float | None] | None = None,
) -> Comparison:
    """Values of two solvers, world by world; None for no answer in time.

    Args:
        mine: Of one solver.
        other: Of the other.
        worst: Worst answers of anybody; not known if None.
    """
    ends = [None] * len(mine) if worst is None else worst
    logs = np.array([log_ratio(*row) for row in zip(mine, other, ends, strict=True)])
    logs = logs[~np.isnan(logs)]
    edge = math.log1p(_TIE)
    wins, losses = int((logs < -edge).sum()), int((logs > edge).sum())
    return Comparison(
        ratio=mean_ratio(logs),
        wins=wins,
        ties=len(logs) - wins - losses,
        losses=losses,
    )


def _names(records: Sequence[Record]) -> list[str]:
    """That answered every one of the records, in order, no ablations."""
    first = list(records[0].answers) if records else []
    return [
        name
        for name in sorted(first, key=_place)
        if name not in ABLATIONS and all(name in r.answers for r in records)
    ]


def _place(name: str) -> tuple[bool, bool, str]:
    return name != "learned", name != "auto", name


def kind_tables(records: Sequence[Record]) -> tuple[KindTable, ...]:
    """One for each kind and budget that at least one baseline was asked at."""
    groups: dict[tuple[str, float], list[Record]] = {}
    for record in records:
        if record.budget_s is not None and record.kind != FIRST:
            groups.setdefault((record.kind, record.budget_s), []).append(record)
    return tuple(
        _kind_table(kind, budget_s, group)
        for (kind, budget_s), group in groups.items()
        if baselines(_names(group))
    )


def _kind_table(kind: str, budget_s: float, records: list[Record]) -> KindTable:
    names = _names(records)
    others = baselines(names)
    values = {n: [_value(r.answers[n]) for r in records] for n in names}
    best = [_best(record, others) for record in records]
    overall = [_best(record, names) for record in records]
    worst = [
        max((v for v in world if v is not None), default=None)
        for world in zip(*values.values(), strict=True)
    ]
    against = {name: compare(values[name], best, worst) for name in names}
    strongest = min(others, key=lambda name: (against[name].ratio.value, name))
    return KindTable(
        kind=kind,
        budget_s=budget_s,
        worlds=len(records),
        strongest=strongest,
        against_strongest={
            name: compare(values[name], values[strongest], worst)
            for name in names
            if name not in others
        },
        rows=tuple(
            SolverRow(
                solver=name,
                against_best=against[name],
                best_share=_share_of_best(values[name], overall),
                seconds=float(np.mean([r.answers[name].seconds for r in records])),
                late=sum(r.answers[name].late for r in records),
                missed=sum(r.answers[name].score is None for r in records),
            )
            for name in names
        ),
    )


def _share_of_best(
    values: Sequence[float | None], overall: Sequence[float | None]
) -> float:
    wins = [
        value is not None and best is not None and value <= best * (1 + _TIE)
        for value, best in zip(values, overall, strict=True)
    ]
    return float(np.mean(wins))


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


def ablations(
    records: Sequence[Record],
) -> dict[tuple[str, float], dict[str, Comparison]]:
    """By kind and budget: each ablation against the whole, on worlds that have both."""
    found: dict[tuple[str, float], dict[str, Comparison]] = {}
    keys = {(r.kind, r.budget_s): None for r in records if r.budget_s is not None}
    for kind, budget_s in keys:
        for name in ABLATIONS:
            both = [
                (_value(r.answers[name]), _value(r.answers["learned"]))
                for r in records
                if (r.kind, r.budget_s) == (kind, budget_s)
                and {name, "learned"} <= set(r.answers)
            ]
            if both:
                mine, whole = zip(*both, strict=True)
                here = found.setdefault((kind, float(budget_s or 0)), {})
                here[name] = compare(mine, whole)
    return found


def first_plans(records: Sequence[Record]) -> tuple[FirstPlan, ...]:
    """Of the worlds of that kind; the runs of a case are told apart by their number."""
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
        names = _names([record for at in whole for record in at.values()])
        best = [_best_ever(list(at.values()), names) for at in whole]
        found[kind] = {
            name: [
                (
                    budget,
                    compare(
                        [_value(at[budget].answers[name]) for at in whole], best
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
