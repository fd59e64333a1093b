"""Futures for a lookahead: sampled arrivals, from a given law or from the past."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from envs.ramp.arrivals import ArrivalLaw
from envs.ramp.state import Past
from planner.errors import StrategyError, UnknownNameError

__all__ = ["FutureSource", "Futures", "LawFutures", "SeenFutures"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Size of the sample of betas that a law's futures are drawn from.
_SAMPLE = 20_000
#: Betas that are equally likely before anything is known. Source: law A of PAC-ML.
_PRIOR_BETAS = np.arange(10, 101) / 100


class Futures(NamedTuple):
    """Streams of jobs. m streams of h jobs.

    Attributes:
        gap_s: Time since the job before. Shape [m, h].
        model: Shape [m, h].
        beta: Shape [m, h].
    """

    gap_s: Array
    model: Index
    beta: Array


class FutureSource(Protocol):
    """Source of sampled futures."""

    #: Whether draws depend on the jobs seen so far.
    learns: bool

    def draw(
        self,
        past: Past,
        interval_s: float,
        shape: tuple[int, int],
        seed: np.random.Generator,
    ) -> Futures:
        """Draw streams.

        Args:
            past: Jobs seen so far.
            interval_s: Mean time between arrivals.
            shape: Number of streams, and of jobs in each.
            seed: Generator to draw with.
        """
        ...


class LawFutures:
    """Futures drawn from a known law.

    Args:
        law: Law of the arrivals.
        models: Names of the world's jobs, in their order.
        seed: Seed of the sample of betas.

    Raises:
        UnknownNameError: If the law has a model that is no job.
    """

    learns = False

    def __init__(self, law: ArrivalLaw, models: Sequence[str], seed: int = 0) -> None:
        self.law = law
        for name in law.models:
            if name not in models:
                raise UnknownNameError("model of a law", name, models)
        names = law.models or tuple(models)
        self._models = np.array([list(models).index(name) for name in names])
        self._betas = law.beta.sample(_SAMPLE, np.random.default_rng(seed))

    def draw(
        self,
        past: Past,
        interval_s: float,
        shape: tuple[int, int],
        seed: np.random.Generator,
    ) -> Futures:
        """Draw streams; see :class:`FutureSource`."""
        return Futures(
            gap_s=self._gaps(shape, seed),
            model=seed.choice(self._models, shape),
            beta=seed.choice(self._betas, shape),
        )

    def _gaps(self, shape: tuple[int, int], seed: np.random.Generator) -> Array:
        law = self.law
        if law.process == "fixed":
            return np.full(shape, law.interval_s)
        if law.process == "poisson":
            return seed.exponential(law.interval_s, shape)
        # Groups of geometric size: after each job the group ends with 1 / burst.
        ends = seed.random(shape) < 1.0 / law.burst
        return ends * seed.exponential(law.interval_s * law.burst, shape)


class SeenFutures:
    """Futures of jobs like those seen so far, mixed with jobs of any kind.

    A future job is one of the n seen with probability n / (n + prior); else its model
    is any and its beta uniform from 0.1 to 1. Times between jobs are drawn from those
    seen; before two jobs have been seen they are the mean interval.

    Args:
        models: Number of kinds of jobs.
        prior: Number of seen jobs that weigh as much as the prior.

    Raises:
        StrategyError: If ``prior`` is not a positive number.
    """

    learns = True

    def __init__(self, models: int, prior: float = 20.0) -> None:
        if not 0.0 < prior < np.inf:
            raise StrategyError(f"prior={prior}; give a positive number of jobs")
        self._models, self._prior = models, prior

    def draw(
        self,
        past: Past,
        interval_s: float,
        shape: tuple[int, int],
        seed: np.random.Generator,
    ) -> Futures:
        """Draw streams; see :class:`FutureSource`."""
        count = len(past.beta)
        model = seed.integers(self._models, size=shape)
        beta = seed.choice(_PRIOR_BETAS, shape)
        gap_s = np.full(shape, interval_s)
        if count:
            like = seed.random(shape) < count / (count + self._prior)
            which = seed.integers(count, size=shape)
            model = np.where(like, past.model[which], model)
            beta = np.where(like, past.beta[which], beta)
        if count > 1:
            gap_s = np.diff(past.time_s)[seed.integers(count - 1, size=shape)]
        return Futures(gap_s=gap_s, model=model, beta=beta)
