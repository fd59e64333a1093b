"""Goals of the learned partitioner beside its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.partitioner_table import KindTable, kind_tables
from benchmarks.partitioner_times import (
    FirstPlan,
    WithoutClock,
    first_plans,
    without_clock,
)
from benchmarks.partitioner_worlds import Record

__all__ = ["Goal", "goals"]

#: Mean ratio to the best baseline of each world that is asked for within a second.
_MEANS = {
    "mixed": 0.91,
    "uneven": 0.80,
    "sites": 0.83,
    "occupied": 0.88,
    "transfer": 0.77,
}
#: Largest ratio, and the largest but for 1 % of all worlds, within a second; mean of
#: each kind, and largest ratio, within more.
_WORST, _NEAR_WORST = 1.10, 1.03
_LONG, _LONG_MEAN, _LONG_WORST = (10.0, 60.0), 1.0, 1.05
#: Quality and time over those of the exhaustive search, on uniform clusters.
_QUALITY, _TIME = 1.005, 1 / 20
#: Seconds to the first plan that fits, by devices.
_FIRST = {64: 0.1, 4096: 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure that is asked for.

    Attributes:
        what: In words.
        asked: In words, like ``at most 0.95``.
        found: With its interval, if it has one.
        met: By the figure itself, wherever its interval ends.
    """

    what: str
    asked: str
    found: str
    met: bool


def goals(records: Sequence[Record]) -> tuple[Goal, ...]:
    """The goals that the records can tell of."""
    return (
        *_uniform(without_clock(records)),
        *_kinds(tables := kind_tables(records)),
        *_tails(tables),
        *_first(first_plans(records)),
    )


def _uniform(found: Sequence[WithoutClock]) -> list[Goal]:
    made = []
    for one in found:
        if one.solver == "learned" and one.budget_s is None:
            quality, time = one.quality.ratio, one.time
            made = [
                Goal(
                    what="uniform: learned over exhaustive, neither on a clock",
                    asked=f"at most {_QUALITY:g}",
                    found=f"{quality.plain(4)}, {one.worlds} worlds",
                    met=quality.value <= _QUALITY,
                ),
                Goal(
                    what="uniform: its time over that of exhaustive",
                    asked=f"at most {_TIME:g}",
                    found=time.plain(),
                    met=time.value <= _TIME,
                ),
            ]
    return made


def _kinds(tables: Sequence[KindTable]) -> list[Goal]:
    """Means of kinds, over the best baseline of each world."""
    made = []
    for table in tables:
        limit = _LONG_MEAN if table.budget_s in _LONG else None
        if table.budget_s == 1.0:
            limit = _MEANS.get(table.kind)
        for solver in ("learned", "auto"):
            row = table.row(solver)
            if limit is None or row is None:
                continue
            ratio = row.against_best.ratio
            made.append(
                Goal(
                    what=f"{table.kind}, {table.budget_s:g} s: {solver} over the best "
                    f"baseline of each world",
                    asked=f"at most {limit:g}",
                    found=f"{ratio.plain()}, {table.worlds} worlds",
                    met=ratio.value <= limit,
                )
            )
    return made


def _tails(tables: Sequence[KindTable]) -> list[Goal]:
    """Largest ratios of all kinds together."""
    made = []
    for budget_s in (1.0, *_LONG):
        for solver in ("learned", "auto"):
            rows = [t.row(solver) for t in tables if t.budget_s == budget_s]
            ratios = sorted(r for row in rows if row for r in row.against_best.ratios)
            if not ratios:
                continue
            asked = [("worst", ratios[-1], _LONG_WORST)]
            if budget_s == 1.0:
                near = ratios[math.ceil(0.99 * len(ratios)) - 1]
                asked = [
                    ("worst", ratios[-1], _WORST),
                    ("99th percentile", near, _NEAR_WORST),
                ]
            made += [
                Goal(
                    what=f"all kinds, {budget_s:g} s: {solver} over the best baseline, "
                    f"{name}",
                    asked=f"at most {limit:g}",
                    found=f"{found:.3f}, {len(ratios)} worlds",
                    met=found <= limit,
                )
                for name, found, limit in asked
            ]
    return made


def _first(plans: Sequence[FirstPlan]) -> list[Goal]:
    made = []
    for devices, limit in _FIRST.items():
        for solver in ("learned", "auto"):
            took = [
                plan.seconds
                for plan in plans
                if (plan.devices, plan.solver) == (devices, solver)
            ]
            if took:
                worst = max(took)
                shown = "none found" if math.isinf(worst) else f"{worst:.3f} s"
                made.append(
                    Goal(
                        what=f"first plan on {devices:,} GPUs, {solver}, slowest case",
                        asked=f"at most {limit:g} s",
                        found=shown,
                        met=worst <= limit,
                    )
                )
    return made
