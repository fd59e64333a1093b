"""Shifts in time of jobs that share a link, so that they send one after the other.

A job computes and sends by turns, with the period of its steps. Periods of several jobs
are laid round one circle, their least common multiple; a job that is shifted sends at
other places of it.

Source: Rajasekaran et al. 2024, CASSINI: Network-Aware Job Scheduling in Machine
Learning Clusters, NSDI'24, section 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError

__all__ = ["SendingCycle", "best_shifts", "overlap_share"]

#: Places of the circle, and of the longest circle of several periods.
_PLACES, _MOST_PLACES = 120, 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SendingCycle:
    """One job on a link.

    Attributes:
        period_s: Seconds of its step.
        sending_s: Of them, in which it sends, in one go.

    Raises:
        StrategyError: If it sends for longer than a step, or a step takes no time.
    """

    period_s: float
    sending_s: float

    def __post_init__(self) -> None:
        if not 0 < self.period_s < math.inf or not 0 <= self.sending_s <= self.period_s:
            raise StrategyError(
                f"sending_s={self.sending_s} of period_s={self.period_s}; give a step "
                f"above 0 s, and at most all of it"
            )


def overlap_share(jobs: Sequence[SendingCycle], shifts_s: Sequence[float]) -> float:
    """Return the share of time in which more than one job sends.

    Args:
        jobs: On one link.
        shifts_s: Seconds by which each job's sending begins later. Length jobs.
    Raises:
        StrategyError: If there are no jobs, or not a shift for each.
    """
    if not jobs or len(jobs) != len(shifts_s):
        raise StrategyError(
            f"{len(shifts_s)} shifts for {len(jobs)} jobs; give a job at least, and a "
            f"shift for each"
        )
    place_s, count = _circle(jobs)
    sends = [
        np.roll(one, round(shift / place_s))
        for one, shift in zip(_sends(jobs, place_s, count), shifts_s, strict=True)
    ]
    return float((np.sum(sends, axis=0) > 1).mean())


def best_shifts(jobs: Sequence[SendingCycle]) -> tuple[float, ...]:
    """Return shifts with which jobs on a link seldom send at the same time.

    The first job keeps its time; each further one, the longest senders first, goes to
    where the others send least. Two jobs of one period, and of as much time for sending
    as there is, never meet.

    Args:
        jobs: On one link.
    Returns:
        Seconds, below each job's period.
    Raises:
        StrategyError: If there are no jobs.
    """
    if not jobs:
        raise StrategyError("no jobs to shift; give one at least")
    place_s, count = _circle(jobs)
    sends = _sends(jobs, place_s, count)
    by_length = sorted(range(1, len(jobs)), key=lambda job: -sends[job].mean())
    taken = sends[0].astype(float)
    shifts = [0.0] * len(jobs)
    for job in by_length:
        turns = range(max(1, round(jobs[job].period_s / place_s)))
        best = min(turns, key=lambda turn: float(taken @ np.roll(sends[job], turn)))
        shifts[job] = best * place_s
        taken += np.roll(sends[job], best)
    return tuple(shifts)


def _circle(jobs: Sequence[SendingCycle]) -> tuple[float, int]:
    """Seconds of a place on the circle, and places: whole periods of every job."""
    place_s = min(job.period_s for job in jobs) / _PLACES
    turns = math.lcm(*(max(1, round(job.period_s / place_s)) for job in jobs))
    return place_s, min(turns, _MOST_PLACES)


def _sends(
    jobs: Sequence[SendingCycle], place_s: float, count: int
) -> list[NDArray[np.bool_]]:
    """Mask of the places of the circle at which each job sends. Shapes [places]."""
    found = []
    for job in jobs:
        period = max(1, round(job.period_s / place_s))
        sending = math.floor(job.sending_s / place_s + 1e-9)
        places = itertools.islice(itertools.cycle(range(period)), count)
        found.append(np.fromiter(places, dtype=np.int64, count=count) < sending)
    return found
