"""Rollouts of a base policy in the job stream on any cluster, in compiled code."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.stream.decisions import (
    Options,
    decide,
    empty_options,
    list_options,
)
from envs.stream.events import Rewards, Stream, proceed
from envs.stream.features import NUM_CANDIDATE_FEATURES, write_candidates
from envs.stream.observation import NUM_SHARED, can_wait, write_shared
from envs.stream.state import TOTALS, StreamState, copy_state
from envs.stream.tables import StreamTables
from planner.simulate.compiled import compiled, inner
from policies.scorer import Scorer, no_scorer, score

__all__ = [
    "StreamBase",
    "StreamRoom",
    "base_action",
    "follow",
    "play_out",
    "rule",
    "stream_room",
]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Index = NDArray[np.int64]

_REWARD = TOTALS.index("reward")


class StreamBase(NamedTuple):
    """Base policy of rollouts: a rule, or a scorer.

    Attributes:
        least: Least degree of the rule, which takes the first possible candidate; used
            if the scorer has no units.
        scorer: Takes the candidate of least score.
    """

    least: int
    scorer: Scorer


class StreamRoom(NamedTuple):
    """Scratch arrays of rollouts. a actions.

    Attributes:
        state: Overwritten.
        options: Candidates of decisions in rollouts.
        first: Candidates of the decision itself, filled in.
        features: Features of candidates. Shape [a, NUM_CANDIDATE_FEATURES].
        shared: Features that all candidates share. Shape [NUM_SHARED].
        layers: Hidden layers of the scorer. Shapes [h] and [g].
    """

    state: StreamState
    options: Options
    first: Options
    features: Floats
    shared: Floats
    layers: tuple[Floats, Floats]


def rule(least: int) -> StreamBase:
    """Make the rule: the first possible candidate of a degree, else of any."""
    return StreamBase(least, no_scorer(NUM_CANDIDATE_FEATURES + NUM_SHARED))


def stream_room(
    tables: StreamTables, state: StreamState, base: StreamBase, actions: int
) -> StreamRoom:
    """Allocate scratch arrays for the states of an episode and one base."""
    return StreamRoom(
        state=copy_state(state),
        options=empty_options(tables),
        first=empty_options(tables),
        features=np.zeros((actions, NUM_CANDIDATE_FEATURES), dtype=np.float32),
        shared=np.zeros(NUM_SHARED, dtype=np.float32),
        layers=(
            np.zeros_like(base.scorer.first_bias),
            np.zeros_like(base.scorer.second_bias),
        ),
    )


@inner
def _write(source: Any, out: Any) -> None:
    """Copy an array of any type and shape; slices would take minutes to compile."""
    flat, into = source.reshape(-1), out.reshape(-1)
    for index in range(len(flat)):
        into[index] = flat[index]


@inner
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


@inner
def _first_possible(
    tables: StreamTables, state: StreamState, options: Options, least: int
) -> int:
    """Return the first possible candidate of a degree, else of any, as an action."""
    list_options(tables, state, options, least)
    fallback = 0
    for choice in range(len(tables.degrees)):
        if options.possible[choice]:
            if tables.degrees[choice] >= least:
                return 1 + choice
            if fallback == 0:
                fallback = 1 + choice
    return fallback


@inner
def _in_time(tables: StreamTables, state: StreamState) -> bool:
    """Return True if an empty cluster could still end the head in time."""
    fastest = state.waiting.size[0] * tables.fastest_s[state.waiting.model[0]]
    return bool(state.clock[0] + fastest <= state.waiting.due_s[0])


@inner
def _by_rule(tables: StreamTables, least: int, room: StreamRoom) -> int:
    """Return the rule's action; it waits where it can instead of turning away."""
    count = len(tables.degrees)
    chosen = _first_possible(tables, room.state, room.options, least)
    waits = len(room.features) > 1 + count
    if chosen == 0 and waits and _in_time(tables, room.state):
        return 1 + count
    return chosen


@inner
def _by_score(tables: StreamTables, scorer: Scorer, room: StreamRoom) -> int:
    """Return the possible candidate of least score."""
    count, actions = len(tables.degrees), len(room.features)
    list_options(tables, room.state, room.options, np.int64(0))
    write_candidates(tables, room.state, room.options, room.features)
    write_shared(tables, room.state, room.shared)
    first, second = room.layers
    best, least = 0, np.inf
    for action in range(actions):
        if 1 <= action <= count and not room.options.possible[action - 1]:
            continue
        if action == 1 + count and not can_wait(tables, room.state):
            continue
        found = score(scorer, room.features[action], room.shared, first, second)
        if found < least:
            best, least = action, found
    return best


@compiled
def base_action(tables: StreamTables, base: StreamBase, room: StreamRoom) -> int:
    """Return the base's action in the state of the scratch arrays.

    Args:
        tables: Tables of jobs and network.
        base: Base policy.
        room: Scratch for this base; its options are filled in where the base looked.
    """
    if len(base.scorer.first_bias) > 0:
        return _by_score(tables, base.scorer, room)
    return _by_rule(tables, base.least, room)


@compiled
def play_out(
    tables: StreamTables,
    stream: Stream,
    rewards: Rewards,
    base: StreamBase,
    room: StreamRoom,
) -> None:
    """Let a base decide until the episode is over.

    Args:
        tables: Tables of jobs and network.
        stream: Arrivals.
        rewards: Rewards of jobs.
        base: Base policy.
        room: Scratch for this base; its state is at a decision, or over.
    """
    while room.state.counts[3] == 0:
        chosen = base_action(tables, base, room)
        decide(tables, room.state, room.options, rewards, chosen)
        proceed(tables, room.state, stream, rewards)


@compiled
def follow(
    tables: StreamTables,
    state: StreamState,
    futures: Stream,
    rewards: Rewards,
    base: StreamBase,
    room: StreamRoom,
    out: Array,
) -> None:
    """Compute rewards after each action, each followed by the same futures.

    Args:
        tables: Tables of jobs and network.
        state: State before the decision; not changed.
        futures: m streams of h jobs, one after the other, times in seconds from now.
            Shape [m h].
        rewards: Rewards of jobs.
        base: Base policy.
        room: Scratch for this base.
        out: Filled in with rewards; minus infinity for impossible candidates. Actions
            that are minus infinity in the first row are left out. Shape [m, actions].
    """
    streams, count = out.shape[0], len(tables.degrees)
    length = len(futures.time_s) // streams
    list_options(tables, state, room.first, np.int64(0))
    before = state.totals[_REWARD]
    for action in range(out.shape[1]):
        impossible = 1 <= action <= count and not room.first.possible[action - 1]
        if impossible or out[0, action] == -np.inf:
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
            decide(tables, room.state, room.first, rewards, action)
            proceed(tables, room.state, future, rewards)
            # The last job only marks the end of the future.
            while room.state.counts[3] == 0 and room.state.counts[1] < length:
                chosen = base_action(tables, base, room)
                decide(tables, room.state, room.options, rewards, chosen)
                proceed(tables, room.state, future, rewards)
            out[number, action] = room.state.totals[_REWARD] - before
