"""Where the episodes of an environment come from: laws, drawn anew each, or traces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.ramp.arrivals import ArrivalLaw, get_law, read_arrivals
from envs.ramp.world import Arrival, RampJobs, check_arrivals
from planner.errors import StrategyError

__all__ = ["Episode", "EpisodeSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A stream of jobs.

    Attributes:
        arrivals: In order of time.
        interval_s: Mean time between arrivals, by which observations are scaled.
    """

    arrivals: Sequence[Arrival]
    interval_s: float


class EpisodeSource:
    """Draws episodes: of one of several laws or traces, each as likely.

    Args:
        jobs: What may arrive.
        laws: Names of the benchmark's laws, or laws. Left out of account if there are
            traces.
        traces: CSV files; see :func:`envs.ramp.arrivals.read_arrivals`.
        horizon_s: When episodes end.
        interval_s: Mean time between arrivals that observations are scaled by; by
            default the law's, or the trace's own.

    Raises:
        UnknownNameError: If a law or a trace's model is not known.
        StrategyError: If there is no law, a trace is no trace or has no arrival before
            the horizon, or the horizon or the interval is not a positive number.
    """

    def __init__(
        self,
        jobs: RampJobs,
        *,
        laws: Sequence[str | ArrivalLaw] = (),
        traces: Sequence[str | os.PathLike[str]] = (),
        horizon_s: float = 1e6,
        interval_s: float | None = None,
    ) -> None:
        for name, value in (("horizon_s", horizon_s), ("interval_s", interval_s)):
            if value is not None and not 0.0 < value < np.inf:
                raise StrategyError(
                    f"{name}={value}; give a positive number of seconds"
                )
        self.horizon_s, self._interval_s = horizon_s, interval_s
        self._names = tuple(jobs.jobs)
        self._laws = [get_law(law) if isinstance(law, str) else law for law in laws]
        self._traces = [self._trace(jobs, path) for path in traces]
        if not self._laws and not self._traces:
            raise StrategyError("no law and no trace; give at least one of either")

    def _trace(self, jobs: RampJobs, path: str | os.PathLike[str]) -> Episode:
        arrivals = read_arrivals(path)
        check_arrivals(jobs.jobs, arrivals)
        if not arrivals or arrivals[0].time_s >= self.horizon_s:
            raise StrategyError(
                f"trace {path} has no arrival before the horizon of "
                f"{self.horizon_s:g} s; there is nothing to decide"
            )
        spans = len(arrivals) - 1
        span_s = arrivals[-1].time_s - arrivals[0].time_s
        # A single job, or all at once: no mean to speak of.
        mean = span_s / spans if span_s > 0 else self.horizon_s
        return Episode(arrivals=arrivals, interval_s=self._interval_s or mean)

    def draw(self, generator: np.random.Generator) -> Episode:
        """The next episode; of a single trace always the same."""
        if self._traces:
            return self._traces[int(generator.integers(len(self._traces)))]
        law = self._laws[int(generator.integers(len(self._laws)))]
        return Episode(
            arrivals=law.draw(self._names, self.horizon_s, generator),
            interval_s=self._interval_s or law.interval_s,
        )
