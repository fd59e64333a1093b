"""Events between decisions: work progresses; jobs end, arrive, or wait too long."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.stream.contention import refresh
from envs.stream.state import TOTALS, StreamState
from envs.stream.tables import StreamTables
from planner.simulate.compiled import compiled, inner

__all__ = ["Rewards", "Stream", "drop_head", "end_job", "proceed"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Times this close count as equal.
_SAME_TIME_S = 1e-7

_ARRIVED, _NO_ROOM = TOTALS.index("arrived"), TOTALS.index("no_room")
_LATE, _SLOWED = TOTALS.index("late"), TOTALS.index("slowed")
_MET, _ENDED = TOTALS.index("met"), TOTALS.index("ended")
_JCT, _SLOWDOWN = TOTALS.index("jct_s"), TOTALS.index("slowdown")
_SPEEDUP, _WAIT = TOTALS.index("speedup"), TOTALS.index("wait_s")
_DEGREE, _WORK = TOTALS.index("degree"), TOTALS.index("work_s")
_HELD, _FREE = TOTALS.index("held_s"), TOTALS.index("free_s")
_BROKEN, _REWARD = TOTALS.index("broken_s"), TOTALS.index("reward")


class Stream(NamedTuple):
    """Arrivals in order of time. n jobs.

    Attributes:
        time_s: Times of arrival. Shape [n].
        model: Numbers of the jobs. Shape [n].
        beta: Longest acceptable time over that on one reference device. Shape [n].
        size: Steps over the usual number. Shape [n].
    """

    time_s: Array
    model: Index
    beta: Array
    size: Array


class Rewards(NamedTuple):
    """Rewards of jobs.

    Attributes:
        accepted: For a job that is placed and expected to meet its deadline.
        blocked: For a job that is turned away, or ends too late.
        work: For an accepted job, times its work over that of the mean job.
        mean_work_s: Work of the mean job, in seconds on one reference device.
    """

    accepted: float
    blocked: float
    work: float
    mean_work_s: float


@inner
def _spend(tables: StreamTables, state: StreamState, until_s: float) -> None:
    """Advance time while nothing changes."""
    span = until_s - state.clock[0]
    if span <= 0:
        return
    totals = state.totals
    for slot in range(len(state.running)):
        if not state.running[slot]:
            continue
        model, choice = state.model[slot], state.choice[slot]
        done = min(span * state.rate[slot], state.left_s[slot])
        state.left_s[slot] -= done
        steps = state.size[slot] * tables.steps[model]
        alone = steps * tables.step_s[model, choice, state.reach[slot], 0]
        work = state.size[slot] * tables.sequential_jct_s[model]
        totals[_WORK] += done / alone * work
        totals[_HELD] += span * tables.degrees[choice]
    for host in range(len(state.free)):
        totals[_FREE] += span * state.free[host]
        if state.free[host] < tables.size_of_host[host]:
            totals[_BROKEN] += span * state.free[host]
    state.clock[0] = until_s


@inner
def end_job(tables: StreamTables, state: StreamState, slot: int | np.int64) -> None:
    """Free the devices of a slot."""
    choice = state.choice[slot]
    for host in state.given[slot]:
        if host >= 0:
            state.free[host] += tables.per_host[choice]
    for device in range(len(state.holder)):
        if state.holder[device] == slot:
            state.holder[device] = -1
    state.running[slot] = False


@inner
def _account(
    tables: StreamTables, state: StreamState, rewards: Rewards, slot: int | np.int64
) -> None:
    """Add a job that ends now to the totals."""
    totals, now = state.totals, state.clock[0]
    model, choice = state.model[slot], state.choice[slot]
    work = state.size[slot] * tables.sequential_jct_s[model]
    if now <= state.due_s[slot] + _SAME_TIME_S * max(1.0, now):
        totals[_MET] += 1
    else:
        totals[_LATE] += 1
        totals[_SLOWED] += 1
        paid = rewards.accepted + rewards.work * work / rewards.mean_work_s
        totals[_REWARD] += rewards.blocked - paid
    steps = state.size[slot] * tables.steps[model]
    alone = steps * tables.step_s[model, choice, state.reach[slot], 0]
    totals[_ENDED] += 1
    totals[_JCT] += now - state.arrived_s[slot]
    totals[_SLOWDOWN] += (now - state.started_s[slot]) / alone
    totals[_SPEEDUP] += work / (now - state.arrived_s[slot])
    totals[_WAIT] += state.started_s[slot] - state.arrived_s[slot]
    totals[_DEGREE] += tables.degrees[choice]


@inner
def drop_head(state: StreamState, which: int | np.int64) -> None:
    """Remove a waiting job; those behind it move up."""
    waiting = state.waiting
    for index in range(which, state.counts[0] - 1):
        waiting.model[index] = waiting.model[index + 1]
        waiting.arrived_s[index] = waiting.arrived_s[index + 1]
        waiting.due_s[index] = waiting.due_s[index + 1]
        waiting.size[index] = waiting.size[index + 1]
    state.counts[0] -= 1
    if which == 0:
        state.counts[2] = 0


@inner
def _drop_late(tables: StreamTables, state: StreamState, rewards: Rewards) -> None:
    """Drop waiting jobs that even an empty cluster could not end in time."""
    waiting, index = state.waiting, 0
    while index < state.counts[0]:
        fastest = waiting.size[index] * tables.fastest_s[waiting.model[index]]
        if state.clock[0] + fastest > waiting.due_s[index] + _SAME_TIME_S:
            drop_head(state, index)
            state.totals[_LATE] += 1
            state.totals[_REWARD] += rewards.blocked
        else:
            index += 1


@inner
def _arrive(
    tables: StreamTables, state: StreamState, stream: Stream, rewards: Rewards
) -> None:
    """Queue the next job; without a place in the queue it is turned away."""
    index = state.counts[1]
    state.counts[1] += 1
    state.totals[_ARRIVED] += 1
    waiting, place = state.waiting, state.counts[0]
    if place == len(waiting.model):
        state.totals[_NO_ROOM] += 1
        state.totals[_REWARD] += rewards.blocked
        return
    model, size = stream.model[index], stream.size[index]
    longest = stream.beta[index] * size * tables.sequential_jct_s[model]
    waiting.model[place] = model
    waiting.size[place] = size
    waiting.arrived_s[place] = stream.time_s[index]
    waiting.due_s[place] = stream.time_s[index] + longest
    state.counts[0] += 1


@compiled
def proceed(
    tables: StreamTables, state: StreamState, stream: Stream, rewards: Rewards
) -> None:
    """Go on to the next decision, or to the end of the episode.

    At equal times jobs end first, then jobs that wait too long are dropped, then jobs
    arrive, one at a time. After every event a waiting head is decided again. A job that
    arrives on the horizon counts as arrived and is not decided.
    """
    horizon = state.clock[1]
    # Typed, as code is compiled for a literal by itself.
    first: int | np.int64
    while True:
        if state.counts[0] > 0 and state.counts[2] == 0:
            return
        ending, first = np.inf, np.int64(-1)
        for slot in range(len(state.running)):
            if state.running[slot] and state.ends_s[slot] < ending:
                ending, first = state.ends_s[slot], slot
        arriving = np.inf
        if state.counts[1] < len(stream.time_s):
            arriving = stream.time_s[state.counts[1]]
        now = min(ending, arriving, horizon)
        _spend(tables, state, now)
        if first >= 0 and ending <= now + _SAME_TIME_S:
            _account(tables, state, rewards, first)
            end_job(tables, state, first)
            refresh(tables, state)
            state.counts[2] = 0
            _drop_late(tables, state, rewards)
            if now < horizon:
                continue
        if now >= horizon:
            while (
                state.counts[1] < len(stream.time_s)
                and stream.time_s[state.counts[1]] <= horizon
            ):
                state.counts[1] += 1
                state.totals[_ARRIVED] += 1
            state.counts[3] = 1
            return
        if arriving <= now:
            _drop_late(tables, state, rewards)
            _arrive(tables, state, stream, rewards)
            state.counts[2] = 0
