"""Rollouts of a base policy in the exact world, in compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.episodes import leave
from envs.ramp.features import (
    Candidates,
    list_candidates,
    write_features,
)
from envs.ramp.history import remember, write_history
from envs.ramp.requests import servers_given
from envs.ramp.state import Moment
from envs.ramp.tables import RampTables
from planner.simulate.compiled import compiled
from policies.futures import Futures
from policies.scorer import Scorer, score

__all__ = ["Base", "Room", "base_action", "rollout_costs"]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Index = NDArray[np.int64]
Masks = NDArray[np.uint64]

#: Ends of jobs and times this close are one; as in RampWorld.
_SAME_TIME_S = 1e-7


class Base(NamedTuple):
    """Who decides in rollouts: a constant degree, or a network that scores candidates.

    Attributes:
        action: Of the constant degree, where the scorer has no units.
        scorer: The candidate of least score is taken.
    """

    action: int
    scorer: Scorer


class Room(NamedTuple):
    """Arrays that rollouts work in.

    Attributes:
        ends_s: Shape [servers].
        masks: Shape [servers].
        seen: Shape [NUM_SEEN].
        history: Shape [NUM_HISTORY].
        first: Shape [h] of the scorer.
        second: Shape [g] of the scorer.
        candidates: Of one decision.
    """

    ends_s: Array
    masks: Masks
    seen: Floats
    history: Floats
    first: Floats
    second: Floats
    candidates: Candidates


@compiled
def base_action(
    tables: RampTables,
    moment: Moment,
    model: int,
    beta: float,
    jct_s: Array,
    base: Base,
    room: Room,
) -> tuple[int, np.uint64]:
    """What the base policy does, and the servers that the job is given.

    Args:
        tables: Of the jobs.
        moment: Of the decision.
        model: Of the job at the head.
        beta: Its deadline.
        jct_s: Its completion time at each degree. Shape [d].
        base: Who decides.
        room: To work in; ``seen`` is of the moment.
    Returns:
        The action, 0 also where the base's degree is not possible.
    """
    if len(base.scorer.first_bias) == 0:
        k = base.action - 1
        late = jct_s[k] > beta * tables.sequential_jct_s[model]
        if k < 0 or late or tables.degrees[k] > tables.num_servers - moment.held:
            return 0, np.uint64(0)
        given = servers_given(tables.sizes[model, k], tables.blocks, moment.busy)
        return (0 if given == 0 else base.action), given
    found = room.candidates
    list_candidates(tables, moment, model, beta, jct_s, found)
    deadline_s = beta * tables.sequential_jct_s[model]
    write_features(tables, moment, deadline_s, found)
    left = (moment.horizon_s - moment.now_s) / moment.interval_s
    write_history(room.seen, left, room.history)
    best, least = 0, np.inf
    for choice in range(len(found.possible)):
        if found.possible[choice]:
            value = score(
                base.scorer,
                found.features[choice],
                room.history,
                room.first,
                room.second,
            )
            if value < least:
                best, least = choice, value
    return best, found.servers[best]


@compiled
def _blocked(
    tables: RampTables,
    start: Moment,
    number: int,
    jct_s: Array,
    futures: Futures,
    stream: int,
    base: Base,
    room: Room,
) -> int:
    """Jobs of one stream that the base policy blocks from ``room``'s state on."""
    blocked, now = 0, start.now_s
    for job in range(futures.beta.shape[1]):
        now += futures.gap_s[stream, job]
        if now >= start.horizon_s:
            break
        number, held = leave(room.ends_s, room.masks, number, now)
        busy = np.uint64(0)
        for other in range(number):
            busy |= room.masks[other]
        moment = Moment(
            room.ends_s,
            room.masks,
            number,
            held,
            busy,
            now,
            start.horizon_s,
            start.interval_s,
        )
        model, beta = futures.model[stream, job], futures.beta[stream, job]
        action, given = base_action(
            tables, moment, model, beta, jct_s[model], base, room
        )
        if len(base.scorer.first_bias) > 0:
            remember(room.seen, beta)
        if action == 0:
            blocked += 1
            continue
        end_s = now + jct_s[model, action - 1]
        room.ends_s[number], room.masks[number] = end_s, given
        number += 1
        if end_s > start.horizon_s + _SAME_TIME_S:
            blocked += 1
    return blocked


@compiled
def rollout_costs(
    tables: RampTables,
    moment: Moment,
    beta: float,
    jct_s: Array,
    seen: Floats,
    candidates: Candidates,
    futures: Futures,
    base: Base,
    room: Room,
    costs: Array,
) -> None:
    """Mean number of jobs blocked if a candidate is taken, and then the base policy.

    All candidates meet the same futures, so that their differences are less noisy than
    their costs.

    Args:
        tables: Of the jobs.
        moment: Of the decision.
        beta: Deadline of the job at the head.
        jct_s: Completion times of all jobs at each degree. Shape [j, d].
        seen: Deadlines so far; see :func:`envs.ramp.history.remember`.
        candidates: Of the job at the head; those that are not possible cost infinity.
        futures: Streams that may follow.
        base: Who decides in them.
        room: To work in.
        costs: Filled in. Shape [actions].
    """
    streams = len(futures.beta)
    for action in range(len(costs)):
        if not candidates.possible[action]:
            costs[action] = np.inf
            continue
        end_s = moment.now_s + candidates.jct_s[action]
        blocked = action == 0 or end_s > moment.horizon_s + _SAME_TIME_S
        total = 0
        for stream in range(streams):
            number = moment.number
            room.ends_s[:number] = moment.ends_s[:number]
            room.masks[:number] = moment.masks[:number]
            room.seen[:] = seen
            remember(room.seen, beta)
            if action > 0:
                room.ends_s[number] = end_s
                room.masks[number] = candidates.servers[action]
                number += 1
            total += _blocked(
                tables, moment, number, jct_s, futures, stream, base, room
            )
        costs[action] = blocked + total / max(streams, 1)
