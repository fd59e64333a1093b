"""The exact state of episodes before a decision, which planners simulate from.

Observations are a digest of it. A policy that looks ahead reads it from the environment
(``exact_state()``); it says nothing of later arrivals.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.episodes import RampEpisodes, Running
from envs.ramp.jobs import RampTables
from planner.simulate.compiled import compiled

__all__ = [
    "Moment",
    "Past",
    "RampState",
    "believed_jct_s",
    "exact_state",
    "moment_at",
    "moment_of",
    "past",
]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Index = NDArray[np.int64]
Masks = NDArray[np.uint64]


class Moment(NamedTuple):
    """One episode before a decision.

    Attributes:
        ends_s: Ends of the running jobs. Shape [servers].
        masks: Servers that each holds, as bits. Shape [servers].
        number: Number of running jobs.
        held: Servers held in the interval that ends now.
        busy: Servers held from now on, as bits.
        now_s: Time of the decision.
        horizon_s: End of the episode.
        interval_s: Mean time between arrivals.
    """

    ends_s: Array
    masks: Masks
    number: int
    held: int
    busy: np.uint64
    now_s: float
    horizon_s: float
    interval_s: float


class Past(NamedTuple):
    """Jobs of one episode that have been decided. n jobs.

    Attributes:
        time_s: Arrival times. Shape [n].
        model: Numbers of the jobs. Shape [n].
        beta: Deadlines. Shape [n].
    """

    time_s: Array
    model: Index
    beta: Array


class RampState(NamedTuple):
    """Episodes side by side before their decisions. b episodes, j jobs, d degrees.

    Attributes:
        running: Running jobs. Views of the episodes' own arrays, not to be changed.
        over: True after the end; other fields are then meaningless. Shape [b].
        now_s: Time of the decision. Shape [b].
        model: Number of the job at the head. Shape [b].
        beta: Its deadline, as a share of its time on one device. Shape [b].
        jct_s: Completion times as far as they are known: those of first placements,
            else those on an empty cluster. Shape [b, j, d].
        seen: State of :func:`envs.ramp.history.remember`. Shape [b, NUM_SEEN].
        interval_s: Mean time between arrivals. Shape [b].
        horizon_s: End of all episodes.
    """

    running: Running
    over: Flags
    now_s: Array
    model: Index
    beta: Array
    jct_s: Array
    seen: Floats
    interval_s: Array
    horizon_s: float


def believed_jct_s(tables: RampTables, known_jct_s: Array) -> Array:
    """Completion times of first placements, else those on an empty cluster.

    Args:
        tables: Tables of the jobs.
        known_jct_s: By the largest split, NaN if unknown. Shape [b, j, splits].
    Returns:
        Seconds. Shape [b, j, d].
    """
    jobs = np.arange(len(tables.sequential_jct_s))[:, None]
    known = known_jct_s[:, jobs, tables.splits]
    found = np.where(np.isnan(known), tables.empty_jct_s, known)
    # In one layout, as code is compiled for each.
    return np.ascontiguousarray(found)


def exact_state(episodes: RampEpisodes, interval_s: Array) -> RampState:
    """Return the state of episodes side by side.

    Args:
        episodes: Episodes before their decisions.
        interval_s: Mean time between the arrivals of each. Shape [b].
    """
    time_s, model, beta = episodes.heads()
    return RampState(
        running=episodes.running,
        over=episodes.over,
        now_s=time_s,
        model=model,
        beta=beta,
        jct_s=believed_jct_s(episodes.tables, episodes.known_jct_s),
        seen=episodes.seen,
        interval_s=np.asarray(interval_s, dtype=np.float64),
        horizon_s=episodes.horizon_s,
    )


def past(episodes: RampEpisodes, row: int) -> Past:
    """Return copies of the decided jobs of one of several episodes."""
    arrivals = episodes.arrivals
    count = arrivals.position[row]
    return Past(
        time_s=arrivals.time_s[row, :count].copy(),
        model=arrivals.model[row, :count].copy(),
        beta=arrivals.beta[row, :count].copy(),
    )


@compiled
def moment_of(state: RampState, row: int) -> Moment:
    """Return the state of one of several episodes."""
    return Moment(
        state.running.ends_s[row],
        state.running.masks[row],
        state.running.number[row],
        state.running.held[row],
        state.running.busy[row],
        state.now_s[row],
        state.horizon_s,
        state.interval_s[row],
    )


def moment_at(state: RampState, row: int) -> Moment:
    """Return the state of one of several episodes, typed as in compiled code.

    Python gets the mask as an int, for which all that takes a moment would be compiled
    once more.
    """
    found = moment_of(state, row)
    return found._replace(busy=np.uint64(found.busy))
