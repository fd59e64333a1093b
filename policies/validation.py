"""Results of played episodes, and the streams that a training run is judged by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, TypeVar

from planner.schema.stream import StreamRecord

__all__ = ["Played", "Validation"]

Case = TypeVar("Case")
Decider = TypeVar("Decider")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Results of one episode for each seed.

    Attributes:
        summaries: Summary of each episode, as its environment gives it.
        decision_s: Wall time of the policy for a decision.
        records: Document of each episode, if the environment keeps them.
    """

    summaries: tuple[Mapping[str, float], ...]
    decision_s: float
    records: tuple[StreamRecord, ...] = ()

    @property
    def blocking_rates(self) -> tuple[float, ...]:
        """Blocking rate of each seed."""
        return tuple(one["blocking_rate"] for one in self.summaries)

    @property
    def blocking_rate(self) -> float:
        """Mean blocking rate over the seeds."""
        return fmean(self.blocking_rates)

    def mean(self, name: str) -> float:
        """Return the mean of a field over the seeds that have it; NaN if none has."""
        known = [one[name] for one in self.summaries if not math.isnan(one[name])]
        return fmean(known) if known else math.nan


@dataclass(frozen=True, eq=False, kw_only=True)  # no slots: generic
class Validation(Generic[Case, Decider]):
    """Streams that progress is judged by, with the best baseline of each.

    Attributes:
        cases: Laws, or worlds and loads.
        seeds: Seeds of each case.
        rate: Plays a case on the seeds with a decider; returns the blocking rate.
        baselines: Least blocking rate of the baselines in each case.
        names: Names of those baselines.
    """

    cases: tuple[Case, ...]
    seeds: Sequence[int]
    rate: Callable[[tuple[Case, Sequence[int], Decider]], float]
    baselines: tuple[float, ...]
    names: tuple[str, ...]

    def gains(
        self, decider: Decider, pool: Executor | None = None
    ) -> tuple[float, ...]:
        """Share by which a policy blocks less than the best baseline, in each case.

        Where the baseline blocks nothing: minus the policy's own rate.

        Args:
            decider: The policy, in the form that ``rate`` takes.
            pool: Processes to play in.
        """
        work = [(case, self.seeds, decider) for case in self.cases]
        rates = (map if pool is None else pool.map)(self.rate, work)
        return tuple(
            1.0 - rate / least if least > 0.0 else -rate
            for rate, least in zip(rates, self.baselines, strict=True)
        )
