"""Straight lines through measured times: a fixed part, and a part that grows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["fit_line"]


def fit_line(sizes: npt.ArrayLike, times_s: npt.ArrayLike) -> tuple[float, float]:
    """Fixed time and rate of t = fixed + size / rate.

    Least squares on relative errors, so that small sizes count as much as large ones;
    neither part may be negative.

    Args:
        sizes: Bytes or FLOPs, at least one positive. Shape [n].
        times_s: Measured seconds, positive. Shape [n].

    Returns:
        Fixed seconds, at least 0, and rate per second, positive.
    """
    x = np.asarray(sizes, dtype=float)
    t = np.asarray(times_s, dtype=float)
    if len(np.unique(x)) > 1:
        design = np.stack([1 / t, x / t], axis=1)
        (fixed, slope), *_ = np.linalg.lstsq(design, np.ones_like(t), rcond=None)
        if fixed >= 0 and slope > 0:
            return float(fixed), float(1 / slope)
        if slope <= 0:
            # Times that do not grow: all of it is fixed, the rate is what was reached.
            return float(np.median(t)), float((x / t).max())
    # Through the origin: minimise sum (1 - slope x / t)^2.
    ratio = x / t
    return 0.0, float((ratio**2).sum() / ratio.sum())
