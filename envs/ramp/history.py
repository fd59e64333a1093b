"""Deadlines of recent jobs, with exponentially falling weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled

__all__ = ["EDGES", "NUM_HISTORY", "NUM_SEEN", "remember", "write_history"]

Floats = NDArray[np.float32]

#: Upper edges of the bins of deadlines, as shares of the time on one device: one over
#: the degrees of the benchmark's cluster, so that a bin tells which degrees suffice.
EDGES = (0.125, 0.1667, 0.25, 0.3334, 0.5, 0.7, 1.0)
#: State: the weight of each bin, then the number of jobs seen.
NUM_SEEN = len(EDGES) + 1
#: Features: the shares of the bins, the number of jobs seen, and the time left twice.
NUM_HISTORY = len(EDGES) + 3

#: Factor of a job's weight for each later job.
_KEPT = np.float32(0.99)
#: Number of jobs above which the feature for it is 1.
_FULL = 50.0
#: Limits of the two features of the time left, in mean intervals.
_FAR, _NEAR = 40.0, 10.0


@compiled
def remember(seen: Floats, beta: float) -> None:
    """Add a job that has been decided.

    Args:
        seen: Changed in place; zeros before the first job. Shape [NUM_SEEN].
        beta: Its largest acceptable share of the time on one device.
    """
    bins = len(EDGES)
    for index in range(bins):
        seen[index] *= _KEPT
    for index in range(bins):
        if beta <= EDGES[index]:
            seen[index] += np.float32(1.0)
            break
    seen[bins] += np.float32(1.0)


@compiled
def write_history(seen: Floats, intervals_left: float, out: Floats) -> None:
    """Write features of the jobs seen and of the time left, each from 0 to 1.

    Args:
        seen: State of :func:`remember`. Shape [NUM_SEEN].
        intervals_left: Time until the horizon, in mean intervals.
        out: Filled in: the share of each bin; the jobs seen, 1 from 50 on; the
            intervals left, capped at 40 and at 10. Shape [NUM_HISTORY].
    """
    bins = len(EDGES)
    total = np.float32(0.0)
    for index in range(bins):
        total += seen[index]
    for index in range(bins):
        out[index] = seen[index] / total if total > 0 else np.float32(0.0)
    out[bins] = min(seen[bins], _FULL) / _FULL
    out[bins + 1] = min(intervals_left, _FAR) / _FAR
    out[bins + 2] = min(intervals_left, _NEAR) / _NEAR
