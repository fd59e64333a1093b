"""Arrivals at the job stream: laws by load, and traces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envs.ramp.arrivals import ArrivalLaw, BetaLaw, read_arrivals
from envs.ramp.world import check_arrivals
from envs.stream.events import Stream
from envs.stream.tables import StreamTables
from planner.errors import StrategyError, UnknownNameError

__all__ = ["StreamLaw", "mean_interval_s", "read_stream"]

Array = NDArray[np.float64]

#: Deadlines by default: any hundredth from 0.1 to 1. Source: law A of PAC-ML.
_UNIFORM = BetaLaw(values=tuple(n / 100 for n in range(10, 101)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLaw:
    """Law of arrivals that episodes are drawn from.

    Attributes:
        beta: Distribution of deadlines, over the time on one reference device.
        load: Work offered over the capacity of the cluster with every job in its most
            efficient shape; it sets the mean time between arrivals.
        interval_s: Mean time between arrivals in seconds, instead of a load.
        process: See :class:`envs.ramp.arrivals.ArrivalLaw`.
        burst: See :class:`envs.ramp.arrivals.ArrivalLaw`.
        models: Names of jobs to draw from; all if empty.
        sizes: Steps over the usual number, drawn with equal chances.
    """

    beta: BetaLaw = _UNIFORM
    load: float = 1.0
    interval_s: float | None = None
    process: Literal["fixed", "poisson", "bursty"] = "poisson"
    burst: float = 4.0
    models: tuple[str, ...] = field(default=())
    sizes: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not 0.0 < self.load < np.inf:
            raise StrategyError(
                f"load={self.load}; give a positive share of the cluster's capacity"
            )
        if not self.sizes or not all(0.0 < size < np.inf for size in self.sizes):
            raise StrategyError(
                f"sizes={self.sizes} of jobs; give at least one, each a positive "
                f"multiple of the usual steps"
            )
        # ArrivalLaw checks the other fields.
        self.arrival_law(1.0 if self.interval_s is None else self.interval_s)

    def arrival_law(self, interval_s: float) -> ArrivalLaw:
        """Return the law without sizes, for a mean time between arrivals in seconds."""
        return ArrivalLaw(
            beta=self.beta,
            interval_s=interval_s,
            process=self.process,
            burst=self.burst,
            models=self.models,
        )

    def mean_interval_s(self, names: Sequence[str], tables: StreamTables) -> float:
        """Return the mean time between arrivals, as given or by the load.

        Args:
            names: Names of the world's jobs.
            tables: Tables of the jobs.

        Raises:
            UnknownNameError: If the law has a model that is no job.
        """
        for model in self.models:
            if model not in names:
                raise UnknownNameError("model of a law", model, names)
        if self.interval_s is not None:
            return self.interval_s
        chosen = [list(names).index(model) for model in self.models or names]
        mean = float(tables.work_device_s[chosen].mean() * np.mean(self.sizes))
        return mean / (self.load * int(tables.usable.sum()))

    def draw(
        self,
        names: Sequence[str],
        interval_s: float,
        horizon_s: float,
        seed: int | np.random.Generator,
    ) -> Stream:
        """Draw the arrivals of an episode, the first at 0, up to the horizon.

        Args:
            names: Names of the world's jobs, in their order.
            interval_s: Mean time between arrivals.
            horizon_s: Last time.
            seed: Seed or generator.
        """
        generator = np.random.default_rng(seed)
        found = self.arrival_law(interval_s).draw(names, horizon_s, generator)
        place = {name: index for index, name in enumerate(names)}
        return Stream(
            time_s=np.array([arrival.time_s for arrival in found]),
            model=np.array([place[arrival.model] for arrival in found], dtype=np.int64),
            beta=np.array([arrival.beta for arrival in found]),
            size=generator.choice(np.array(self.sizes), len(found)),
        )


def mean_interval_s(stream: Stream, horizon_s: float) -> float:
    """Return the mean time between a trace's arrivals; the horizon for one arrival."""
    if len(stream.time_s) < 2 or stream.time_s[-1] == stream.time_s[0]:
        return horizon_s
    spans = len(stream.time_s) - 1
    return float(stream.time_s[-1] - stream.time_s[0]) / spans


def read_stream(path: str | os.PathLike[str], names: Sequence[str]) -> Stream:
    """Read a trace: a CSV with the columns arrival_s, model and beta.

    Args:
        path: The file.
        names: Names of the world's jobs, in their order.

    Raises:
        StrategyError: If it cannot be read, is empty, or has a line that is no arrival.
        UnknownNameError: If a model is no job.
    """
    arrivals = read_arrivals(path)
    check_arrivals(names, arrivals)
    if not arrivals:
        raise StrategyError(f"trace {path} has no arrivals; there is nothing to decide")
    place = {name: index for index, name in enumerate(names)}
    return Stream(
        time_s=np.array([arrival.time_s for arrival in arrivals]),
        model=np.array([place[arrival.model] for arrival in arrivals], dtype=np.int64),
        beta=np.array([arrival.beta for arrival in arrivals]),
        size=np.ones(len(arrivals)),
    )
