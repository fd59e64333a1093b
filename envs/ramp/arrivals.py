"""Arrivals: traces from files, and the benchmark's laws drawn with a seed."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envs.ramp.jobs import RampJobs
from envs.ramp.world import Arrival, check_arrivals
from planner.errors import StrategyError, UnknownNameError
from planner.reading import read_text

__all__ = [
    "LAWS",
    "ArrivalLaw",
    "BetaLaw",
    "Episode",
    "EpisodeSource",
    "get_law",
    "read_arrivals",
]

Array = NDArray[np.float64]

#: Draws for the histogram of a skewed law, and its bins.
_DRAWS, _BINS = 50_000, 1000
_COLUMNS = ("arrival_s", "model", "beta")


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaLaw:
    """Distribution of deadlines, as shares of the time on one device.

    Attributes:
        values: Above 0, at most 1.
        weights: Not negative, not all 0; equal if empty.
        skewness: Replaces the other two: skewness of a skew-normal law that is scaled
            to 0 to 1 by its own extremes, cut at 0.1, and rounded up to hundredths.
    """

    values: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    skewness: float | None = None

    def __post_init__(self) -> None:
        if self.skewness is not None:
            if self.values or self.weights or not np.isfinite(self.skewness):
                raise StrategyError(
                    f"a law has either skewness={self.skewness} or values; the first "
                    f"is a finite number"
                )
            return
        if not self.values or not all(0.0 < value <= 1.0 for value in self.values):
            raise StrategyError(
                f"values={self.values} of a law; give at least one, each above 0 and "
                f"at most 1"
            )
        weights = np.array(self.weights or [1.0] * len(self.values))
        if len(weights) != len(self.values) or not (
            np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0
        ):
            raise StrategyError(
                f"weights={self.weights} of a law over {len(self.values)} values; give "
                f"one each, finite, not negative and not all 0"
            )

    def sample(self, count: int, generator: np.random.Generator) -> Array:
        """Draw betas. Shape [count]."""
        if self.skewness is None:
            weights = np.array(self.weights or [1.0] * len(self.values))
            return generator.choice(self.values, count, p=weights / weights.sum())
        values, weights = _skewed(self.skewness, generator)
        return generator.choice(values, count, p=weights)


def _skewed(a: float, generator: np.random.Generator) -> tuple[Array, Array]:
    """Draw values and weights of a skewed law.

    Its ends are those of the sample, so that each draw is slightly different.
    Source of the sampling: Azzalini 1985, a skew-normal as delta |u| + sqrt(1 -
    delta^2) v of two normal variables, delta = a / sqrt(1 + a^2).
    """
    delta = a / np.sqrt(1 + a * a)
    u, v = generator.standard_normal((2, _DRAWS))
    drawn = delta * np.abs(u) + np.sqrt(1 - delta * delta) * v
    drawn = (drawn - drawn.min()) / (drawn.max() - drawn.min())
    mass, edges = np.histogram(np.maximum(drawn, 0.1), bins=_BINS)
    return np.round(edges[1:], 2), mass / mass.sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalLaw:
    """Law of arrivals that episodes are drawn from.

    Attributes:
        beta: Distribution of deadlines.
        interval_s: Mean time between arrivals.
        process: ``fixed`` intervals; ``poisson``; or ``bursty``: groups of geometric
            size at exponential intervals.
        burst: Mean size of a group, at least 1.
        models: Names to draw from; all jobs of the world if empty.
        copies: Copies of each model in the pool. Jobs are drawn from it without
            replacement until it is empty, as in the benchmark.
    """

    beta: BetaLaw
    interval_s: float = 1000.0
    process: Literal["fixed", "poisson", "bursty"] = "fixed"
    burst: float = 4.0
    models: tuple[str, ...] = field(default=())
    copies: int = 201

    def __post_init__(self) -> None:
        if not 0.0 < self.interval_s < np.inf:
            raise StrategyError(
                f"interval_s={self.interval_s}; give a positive number of seconds"
            )
        if self.process not in ("fixed", "poisson", "bursty"):
            raise UnknownNameError(
                "arrival process", self.process, ("fixed", "poisson", "bursty")
            )
        if not 1.0 <= self.burst < np.inf or self.copies < 1:
            raise StrategyError(
                f"burst={self.burst} and copies={self.copies} are at least 1"
            )

    def draw(
        self, models: Sequence[str], horizon_s: float, seed: int | np.random.Generator
    ) -> list[Arrival]:
        """Draw the arrivals of an episode, the first at 0, up to the horizon.

        Args:
            models: The world's jobs, used if the law names none.
            horizon_s: Last time.
            seed: Seed or generator.
        """
        generator = np.random.default_rng(seed)
        names = np.array(self.models or tuple(models))
        pool = self._pool(names, generator)
        times = self._times(horizon_s, generator)
        found: list[Arrival] = []
        while len(found) < len(times):
            order = generator.permutation(len(pool[0]))
            for index in order[: len(times) - len(found)]:
                found.append(
                    Arrival(
                        time_s=float(times[len(found)]),
                        model=str(names[pool[0][index]]),
                        beta=float(pool[1][index]),
                    )
                )
        return found

    def _pool(
        self, names: NDArray[np.str_], generator: np.random.Generator
    ) -> tuple[NDArray[np.int64], Array]:
        """Return model and beta of every job in the pool."""
        which = np.repeat(np.arange(len(names)), self.copies)
        return which, self.beta.sample(len(which), generator)

    def _times(self, horizon_s: float, generator: np.random.Generator) -> Array:
        if self.process == "fixed":
            return np.arange(0.0, horizon_s + 1e-9, self.interval_s)
        times, now = [0.0], 0.0
        group = self.burst if self.process == "bursty" else 1.0
        while True:
            now += generator.exponential(self.interval_s * group)
            if now > horizon_s:
                return np.array(times)
            size = generator.geometric(1.0 / group) if group > 1 else 1
            times.extend([now] * int(size))


#: Laws of the benchmark. Source: as the package, and the settings of its code.
LAWS: dict[str, ArrivalLaw] = {
    "A": ArrivalLaw(beta=BetaLaw(values=tuple(n / 100 for n in range(10, 101)))),
    "B": ArrivalLaw(beta=BetaLaw(skewness=5.0)),
    "C": ArrivalLaw(beta=BetaLaw(skewness=0.0)),
    "D": ArrivalLaw(beta=BetaLaw(skewness=-5.0)),
}


def get_law(name: str) -> ArrivalLaw:
    """Look up a law of the benchmark.

    Raises:
        UnknownNameError: If there is no law of that name.
    """
    try:
        return LAWS[name]
    except KeyError:
        raise UnknownNameError("law", name, LAWS) from None


@lru_cache(maxsize=32)
def _rows(path: Path, changed: int) -> tuple[Arrival, ...]:
    del changed
    # Spreadsheets may begin a file with a byte-order mark.
    with io.StringIO(read_text(path, "trace", error=StrategyError)) as stream:
        reader = csv.DictReader(stream)
        if reader.fieldnames is None or not set(_COLUMNS) <= set(reader.fieldnames):
            raise StrategyError(
                f"{path} has the columns {reader.fieldnames}; a trace has "
                f"{', '.join(_COLUMNS)}"
            )
        found = []
        for row in reader:
            try:
                time_s, beta = float(row["arrival_s"]), float(row["beta"])
            except (TypeError, ValueError) as error:
                raise StrategyError(
                    f"{path}, line {reader.line_num}: arrival_s={row['arrival_s']!r} "
                    f"and beta={row['beta']!r} must be numbers"
                ) from error
            found.append(Arrival(time_s=time_s, model=row["model"], beta=beta))
    return tuple(found)


def read_arrivals(path: str | os.PathLike[str]) -> list[Arrival]:
    """Read a trace: a CSV with the columns arrival_s, model and beta.

    Raises:
        StrategyError: If it cannot be read, or a line is not an arrival.
    """
    file = Path(path)
    try:
        return list(_rows(file.absolute(), file.stat().st_mtime_ns))
    except OSError as error:
        raise StrategyError(
            f"trace {file} cannot be read ({error.strerror}); give a CSV file"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise StrategyError(
            f"trace {file} is not text ({error}); give a CSV file in UTF-8"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Arrivals of one episode.

    Attributes:
        arrivals: In order of time.
        interval_s: Mean time between arrivals, which scales observations.
    """

    arrivals: Sequence[Arrival]
    interval_s: float


class EpisodeSource:
    """Draws episodes from several laws or traces with equal chances.

    Args:
        jobs: Jobs that may arrive.
        laws: Names of the benchmark's laws, or laws. Ignored if there are traces.
        traces: CSV files; see :func:`read_arrivals`.
        horizon_s: End of the episodes.
        interval_s: Mean time between arrivals, which scales observations; by default
            that of the law or the trace.

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
        # A single job, or all at once: there is no mean interval.
        mean = span_s / spans if span_s > 0 else self.horizon_s
        return Episode(arrivals=arrivals, interval_s=self._interval_s or mean)

    def draw(self, generator: np.random.Generator) -> Episode:
        """Draw the next episode; with a single trace it is always the same."""
        if self._traces:
            return self._traces[int(generator.integers(len(self._traces)))]
        law = self._laws[int(generator.integers(len(self._laws)))]
        return Episode(
            arrivals=law.draw(self._names, self.horizon_s, generator),
            interval_s=self._interval_s or law.interval_s,
        )
