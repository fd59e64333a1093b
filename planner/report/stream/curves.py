"""What changes with time: how many jobs are blocked, how many devices are in use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.report.stream.data import StreamData
from planner.schema.stream import OUTCOMES, Outcome

__all__ = ["Blocking", "Steps", "Windows", "blocking", "devices_in_use", "windows"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Points of a line that a page keeps.
_MOST_POINTS = 1200
#: Windows of a stream, and jobs that one should have.
_MOST_WINDOWS, _FEWEST_JOBS = 40, 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocking:
    """Blocked over arrived so far.

    Attributes:
        time_s: Of arrivals. Shape [p].
        rate: Up to each, it included. Shape [p].
    """

    time_s: Array
    rate: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """Jobs by the window in which they arrived. w windows of equal length.

    Attributes:
        length_s: Of a window.
        arrived: Shape [w].
        causes: Outcomes that count as blocked.
        blocked: Of these, jobs of each window. Shape [causes, w].
    """

    length_s: float
    arrived: Index
    causes: tuple[Outcome, ...]
    blocked: Index


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """A number that changes at times and stays in between.

    Attributes:
        time_s: Of changes, from 0 on. Shape [p].
        value: From each on. Shape [p].
        mean: Over the whole time, of all changes, also those left out.
    """

    time_s: Array
    value: Array
    mean: float


def blocking(data: StreamData, most: int = _MOST_POINTS) -> Blocking:
    """Rate after each arrival; of many arrivals evenly chosen ones, the last included.

    Args:
        data: Of one record.
        most: Points.
    """
    rate = np.cumsum(data.blocked) / np.arange(1, len(data) + 1)
    kept = np.unique(np.linspace(0, len(data) - 1, min(most, len(data))).astype(int))
    return Blocking(time_s=data.arrival_s[kept], rate=rate[kept])


def windows(data: StreamData) -> Windows:
    """As many windows as have a dozen jobs each, at most 40.

    Args:
        data: Of one record.
    """
    count = int(np.clip(len(data) // _FEWEST_JOBS, 1, _MOST_WINDOWS))
    length_s = data.record.horizon_s / count
    window = np.minimum((data.arrival_s / length_s).astype(np.int64), count - 1)
    causes = tuple(dict.fromkeys(data.record.blocked))
    blocked = [
        np.bincount(window[data.outcome == OUTCOMES.index(cause)], minlength=count)
        for cause in causes
    ]
    return Windows(
        length_s=length_s,
        arrived=np.bincount(window, minlength=count).astype(np.int64),
        causes=causes,
        blocked=np.array(blocked, dtype=np.int64).reshape(len(causes), count),
    )


def devices_in_use(data: StreamData, most: int = _MOST_POINTS) -> Steps:
    """Devices held from each start or end on.

    Where there are more changes than points, a point is the mean up to the next one.

    Args:
        data: Of one record.
        most: Points.
    """
    horizon_s, held = data.record.horizon_s, data.held[data.ran]
    time = np.concatenate([[0.0], data.start_s[data.ran], data.until_s[data.ran]])
    change = np.concatenate([[0], held, -held])
    order = np.argsort(time, kind="stable")
    time, value = time[order], np.cumsum(change[order])
    # Of changes at one time the last tells.
    last = np.flatnonzero(np.diff(time, append=np.inf) > 0)
    time, value = time[last], value[last].astype(np.float64)
    spans = np.diff(np.append(time, horizon_s))
    mean = float((value * spans).sum() / horizon_s)
    if len(time) <= most:
        return Steps(time_s=time, value=value, mean=mean)
    edges = np.linspace(0.0, horizon_s, most + 1)
    area = np.concatenate([[0.0], np.cumsum(value * spans)])
    whole = np.interp(edges, np.append(time, horizon_s), area)
    return Steps(time_s=edges[:-1], value=np.diff(whole) / np.diff(edges), mean=mean)
