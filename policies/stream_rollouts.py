"""Following candidates of the job stream into futures, decided by a simple rule."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.stream.contention import sum_loads
from envs.stream.decisions import (
    Options,
    decide,
    empty_options,
    list_option,
    list_options,
)
from envs.stream.events import Rewards, Stream, proceed
from envs.stream.state import TOTALS, StreamState, copy_state
from envs.stream.tables import StreamTables
from planner.simulate.compiled import compiled

__all__ = ["StreamRoom", "follow", "stream_room"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

_REWARD = TOTALS.index("reward")


class StreamRoom(NamedTuple):
    """Where rollouts take place.

    Attributes:
        state: Overwritten.
        options: Of decisions in rollouts.
        first: Of the decision itself, filled in.
    """

    state: StreamState
    options: Options
    first: Options


def stream_room(tables: StreamTables, state: StreamState) -> StreamRoom:
    """For states of an episode."""
    return StreamRoom(
        state=copy_state(state),
        options=empty_options(tables),
        first=empty_options(tables),
    )


@compiled
def _write(source: Any, out: Any) -> None:
    """Copy an array of any type and shape; slices would take minutes to compile."""
    flat, into = source.reshape(-1), out.reshape(-1)
    for index in range(len(flat)):
        into[index] = flat[index]


@compiled
def _restore(source: StreamState, out: StreamState) -> None:
    """Write one state over another of the same shapes."""
    _write(source.clock, out.clock)
    _write(source.counts, out.counts)
    _write(source.holder, out.holder)
    _write(source.free, out.free)
    _write(source.running, out.running)
    _write(source.model, out.model)
    _write(source.choice, out.choice)
    _write(source.reach, out.reach)
    _write(source.given, out.given)
    _write(source.left_s, out.left_s)
    _write(source.stretch, out.stretch)
    _write(source.rate, out.rate)
    _write(source.ends_s, out.ends_s)
    _write(source.started_s, out.started_s)
    _write(source.arrived_s, out.arrived_s)
    _write(source.due_s, out.due_s)
    _write(source.size, out.size)
    _write(source.waiting.model, out.waiting.model)
    _write(source.waiting.arrived_s, out.waiting.arrived_s)
    _write(source.waiting.due_s, out.waiting.due_s)
    _write(source.waiting.size, out.waiting.size)
    _write(source.totals, out.totals)
    _write(source.seen, out.seen)


@compiled
def _first_possible(
    tables: StreamTables, state: StreamState, options: Options, least: int
) -> int:
    """Action of the first possible candidate of a degree or more, else of any."""
    sum_loads(tables, state)
    more = np.zeros(len(state.free))
    fallback = 0
    options.possible[:] = False
    for choice in range(len(tables.degrees)):
        if fallback > 0 and tables.degrees[choice] < least:
            continue
        list_option(tables, state, choice, more, options, harm=False)
        if not options.possible[choice]:
            continue
        if tables.degrees[choice] >= least:
            return 1 + choice
        fallback = 1 + choice
    return fallback


@compiled
def _in_time(tables: StreamTables, state: StreamState) -> bool:
    """Whether an empty cluster could still end the head in time."""
    fastest = state.waiting.size[0] * tables.fastest_s[state.waiting.model[0]]
    return bool(state.clock[0] + fastest <= state.waiting.due_s[0])


@compiled
def follow(
    tables: StreamTables,
    state: StreamState,
    futures: Stream,
    rewards: Rewards,
    least: int,
    room: StreamRoom,
    out: Array,
) -> None:
    """Expected reward after each action, each followed by the same futures.

    Args:
        tables: Of jobs and network.
        state: Before the decision; left alone.
        futures: m streams of h jobs, one after the other, times in seconds from now.
            Shape [m h].
        rewards: What jobs are worth.
        least: Degree from which on rollouts look for a possible candidate.
        room: Where rollouts take place.
        out: Mean reward, minus infinity of candidates that are not possible; the
            shape says how many actions there are and, in its first axis, how many
            streams. Shape [m, actions].
    """
    streams, count = out.shape[0], len(tables.degrees)
    length = len(futures.time_s) // streams
    waits = out.shape[1] > 1 + count
    list_options(tables, state, room.first)
    before = state.totals[_REWARD]
    for action in range(out.shape[1]):
        if 1 <= action <= count and not room.first.possible[action - 1]:
            out[:, action] = -np.inf
            continue
        for number in range(streams):
            begin, end = number * length, (number + 1) * length
            future = Stream(
                futures.time_s[begin:end] + state.clock[0],
                futures.model[begin:end],
                futures.beta[begin:end],
                futures.size[begin:end],
            )
            _restore(state, room.state)
            room.state.counts[1] = 0
            # Nothing is decided after the last job, and nobody is there to be late.
            room.state.clock[1] = future.time_s[length - 1]
            decide(tables, room.state, room.first, rewards, action)
            proceed(tables, room.state, future, rewards)
            while room.state.counts[3] == 0:
                chosen = _first_possible(tables, room.state, room.options, least)
                if chosen == 0 and waits and _in_time(tables, room.state):
                    chosen = 1 + count
                decide(tables, room.state, room.options, rewards, chosen)
                proceed(tables, room.state, future, rewards)
            out[number, action] = room.state.totals[_REWARD] - before
