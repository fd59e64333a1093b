"""Bootstrap intervals: how far a score could be off by the luck of what was measured.

Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3
(percentile intervals).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Estimate", "bootstrap"]

_DRAWS = 2000
_SEED = 20240
#: Resampled values that are held at once.
_AT_ONCE = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A score with its 95 % interval; all NaN where there was nothing to score.

    Attributes:
        value: Statistic of the sample.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    def percent(self, digits: int = 1) -> str:
        """``8.1 % [7.0, 9.4]``, or a dash."""
        if math.isnan(self.value):
            return "-"
        low, value, high = (
            f"{100 * end:.{digits}f}" for end in (self.low, self.value, self.high)
        )
        return f"{value} % [{low}, {high}]"

    def plain(self, digits: int = 3) -> str:
        """``0.912 [0.871, 0.944]``, or a dash."""
        if math.isnan(self.value):
            return "-"
        low, value, high = (
            f"{end:.{digits}f}" for end in (self.low, self.value, self.high)
        )
        return f"{value} [{low}, {high}]"


def bootstrap(
    values: NDArray[np.float64],
    statistic: Callable[..., Any],
    *,
    strata: NDArray[np.int64] | None = None,
    draws: int = _DRAWS,
    seed: int = _SEED,
) -> Estimate:
    """Return a statistic and its 95 % percentile interval.

    Args:
        values: Measured values. Shape [n].
        statistic: ``np.mean``, ``np.median`` or the like: takes values of shape
            [..., n] and ``axis``.
        strata: Each value is replaced by another of its own stratum, so that every
            resample holds as many of each; one stratum if None. Shape [n].
        draws: Number of resamples.
        seed: Seed of the generator; the same values give the same interval.
    """
    n = len(values)
    if n == 0:
        return Estimate(value=math.nan, low=math.nan, high=math.nan)
    labels = np.zeros(n, dtype=np.int64) if strata is None else strata
    _, place, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    ordered = values[np.argsort(place, kind="stable")]
    place = np.sort(place)
    starts, sizes = (np.cumsum(sizes) - sizes)[place], sizes[place]
    random = np.random.default_rng(seed)
    found = []
    left = draws
    while left:
        rows = min(left, max(1, _AT_ONCE // n))
        chosen = starts + np.floor(random.random((rows, n)) * sizes).astype(np.int64)
        found.append(statistic(ordered[chosen], axis=-1))
        left -= rows
    low, high = np.quantile(np.concatenate(found), (0.025, 0.975))
    return Estimate(
        value=float(statistic(values, axis=-1)), low=float(low), high=float(high)
    )
