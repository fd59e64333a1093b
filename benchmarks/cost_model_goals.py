"""Goals of the cost model beside its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cost_model_fits import Judged
from benchmarks.cost_model_scores import (
    Prediction,
    coverage,
    memory_scores,
    rank_scores,
    regret,
    time_scores,
)
from benchmarks.intervals import Estimate

__all__ = ["Goal", "goals"]

_VTRAIN = "vTrain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure that is asked for.

    Attributes:
        what: In words.
        fit: Under which.
        asked: In words, like ``at most 10 %``.
        found: With its interval, if it has one.
        met: None where there was nothing to measure it on.
    """

    what: str
    fit: str
    asked: str
    found: str
    met: bool | None


def _least(what: str, fit: str, value: float, limit: float, found: str) -> Goal:
    asked = f"at least {limit:g}" if "correlation" in what else f"at least {limit:.0%}"
    met = None if math.isnan(value) else value >= limit
    return Goal(what=what, fit=fit, asked=asked, found=found, met=met)


def _most(what: str, fit: str, found: Estimate, limit: float) -> Goal:
    return Goal(
        what=what,
        fit=fit,
        asked=f"at most {limit:.0%}",
        found=found.percent(),
        met=None if math.isnan(found.value) else found.value <= limit,
    )


def _of_unseen(fit: str, predictions: Sequence[Prediction]) -> list[Goal]:
    ranks, picked = rank_scores(predictions), regret(predictions)
    memory = memory_scores(predictions)
    # Few sources print the whole plan of a run that failed.
    fits = memory_scores(predictions, complete=False)
    vtrain = [one for one in predictions if one.source.startswith(_VTRAIN)]
    smallest = "-" if math.isnan(ranks.smallest) else f"{ranks.smallest:.3f}"
    return [
        _least(
            "rank correlation, mean of groups of 4 plans or more",
            fit,
            ranks.mean.value,
            0.9,
            f"{ranks.mean.plain()}, {len(ranks.groups)} groups",
        ),
        _least(
            "rank correlation, smallest of groups of 8 plans or more",
            fit,
            ranks.smallest,
            0.6,
            f"{smallest}, {ranks.large} groups",
        ),
        _most("top-1 regret, mean", fit, picked.mean, 0.05),
        _most("step time, MAPE", fit, time_scores(predictions).mape, 0.1),
        _most("step time of vTrain's rows, MAPE", fit, time_scores(vtrain).mape, 0.1),
        _most("peak memory, MAPE", fit, memory.peak, 0.12),
        _least(
            "ran out of memory (incomplete rows too), share predicted infeasible",
            fit,
            fits.found.value,
            0.8,
            f"{fits.found.percent()}, {fits.ran_out} runs",
        ),
        _most(
            "ran (incomplete rows too), share predicted infeasible",
            fit,
            fits.refused,
            0.05,
        ),
    ]


def goals(judged: Sequence[Judged]) -> tuple[Goal, ...]:
    """The goals that the fits at hand can tell of."""
    by_fit = {one.fit: one.predictions for one in judged}
    found: list[Goal] = []
    for fit in ("loso", "shipped"):
        # A file that the shipped calibration never saw is like a source left out.
        if fit in by_fit:
            found += _of_unseen(fit, by_fit[fit])
    if "fitted" in by_fit:
        mape = time_scores(by_fit["fitted"]).mape
        found.append(_most("step time, MAPE", "fitted", mape, 0.06))
    for fit, predictions in by_fit.items():
        counted = coverage(predictions)
        share = (
            counted.complete_predicted / counted.complete
            if counted.complete
            else math.nan
        )
        words = f"{counted.complete_predicted} of {counted.complete} rows"
        found.append(_least("complete rows that are predicted", fit, share, 0.9, words))
    return tuple(found)
