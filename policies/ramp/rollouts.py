"""Rollouts of a base policy in the exact world, in compiled code.

All candidates of a decision go through the same stream side by side. Two that reach the
same state stay equal from there on and are followed once; a stream ends as soon as all
candidates are equal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.episodes import leave
from envs.ramp.features import (
    Candidates,
    ShareMemo,
    empty_candidates,
    list_candidates,
    make_memo,
    write_features,
)
from envs.ramp.history import NUM_HISTORY, NUM_SEEN, remember, write_history
from envs.ramp.jobs import RampTables
from envs.ramp.placement import servers_given
from envs.ramp.state import Moment
from planner.simulate.compiled import compiled, copy_into, inlined, inner
from policies.futures import Futures
from policies.scorer import Scorer, score

__all__ = ["Base", "Room", "base_action", "make_room", "rollout_costs"]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Index = NDArray[np.int64]
Masks = NDArray[np.uint64]

#: Ends of jobs and times this close count as equal, as in RampWorld.
_SAME_TIME_S = 1e-7


class Base(NamedTuple):
    """Base policy of rollouts: a constant degree, or a scorer.

    Attributes:
        action: Action of the constant degree, used if the scorer has no units.
        scorer: Takes the candidate of least score.
    """

    action: int
    scorer: Scorer


class Room(NamedTuple):
    """Scratch arrays of rollouts. a actions.

    Attributes:
        ends_s: Ends of the running jobs, after each candidate. Shape [a, servers].
        masks: Servers that each job holds. Shape [a, servers].
        number: Number of running jobs. Shape [a].
        leader: Candidate that this one has become equal to, or itself. Shape [a].
        blocked: Jobs blocked; for a follower, those more than its leader. Shape [a].
        total: Sum over streams of jobs blocked, relative to the mean. Shape [a].
        squares: Sum of their squares. Shape [a].
        seen: Shape [NUM_SEEN].
        history: Shape [NUM_HISTORY].
        first, second: Hidden layers of the scorer. Shapes [h] and [g].
        candidates: Candidates of one decision.
        memo: Memo of the topology.
    """

    ends_s: Array
    masks: Masks
    number: Index
    leader: Index
    blocked: Array
    total: Array
    squares: Array
    seen: Floats
    history: Floats
    first: Floats
    second: Floats
    candidates: Candidates
    memo: ShareMemo


def make_room(tables: RampTables, scorer: Scorer) -> Room:
    """Allocate scratch arrays for rollouts of a base policy in one thread."""
    # One more job than servers, because a job may be added before another has left.
    actions, jobs = 1 + len(tables.degrees), tables.num_servers + 1
    return Room(
        ends_s=np.empty((actions, jobs)),
        masks=np.empty((actions, jobs), dtype=np.uint64),
        number=np.zeros(actions, dtype=np.int64),
        leader=np.zeros(actions, dtype=np.int64),
        blocked=np.zeros(actions),
        total=np.zeros(actions),
        squares=np.zeros(actions),
        seen=np.zeros(NUM_SEEN, dtype=np.float32),
        history=np.zeros(NUM_HISTORY, dtype=np.float32),
        first=np.zeros_like(scorer.first_bias),
        second=np.zeros_like(scorer.second_bias),
        candidates=empty_candidates(tables),
        memo=make_memo(),
    )


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
    """Return the base policy's action, and the servers that the job is given.

    Args:
        tables: Tables of the jobs.
        moment: State before the decision.
        model: Number of the job at the head.
        beta: Its deadline.
        jct_s: Its completion time at each degree. Shape [d].
        base: Base policy.
        room: Scratch; ``seen`` holds the state of the moment.
    Returns:
        The action, 0 if the base's degree is not possible; and a mask.
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
    write_features(tables, moment, deadline_s, room.memo, found)
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


@inlined
def _arrive(
    tables: RampTables,
    start: Moment,
    jct_s: Array,
    model: int,
    beta: float,
    now: float,
    base: Base,
    room: Room,
    one: int,
) -> None:
    """Let a job arrive in one candidate's world."""
    ends_s, masks = room.ends_s[one], room.masks[one]
    number, held = leave(ends_s, masks, room.number[one], now)
    busy = np.uint64(0)
    for other in range(number):
        busy |= masks[other]
    moment = Moment(
        ends_s, masks, number, held, busy, now, start.horizon_s, start.interval_s
    )
    action, given = base_action(tables, moment, model, beta, jct_s[model], base, room)
    if action == 0:
        room.blocked[one] += 1.0
    else:
        end_s = now + jct_s[model, action - 1]
        ends_s[number], masks[number] = end_s, given
        number += 1
        if end_s > start.horizon_s + _SAME_TIME_S:
            room.blocked[one] += 1.0
    room.number[one] = number


@inlined
def _join(room: Room) -> int:
    """Let candidates in equal states follow the first; return how many lead."""
    leading = 0
    for one in range(len(room.leader)):
        if room.leader[one] != one:
            continue
        leading += 1
        for other in range(one):
            number = room.number[one]
            if room.leader[other] != other or room.number[other] != number:
                continue
            same = True
            for job in range(number):
                if (
                    room.masks[one, job] != room.masks[other, job]
                    or room.ends_s[one, job] != room.ends_s[other, job]
                ):
                    same = False
                    break
            if same:
                room.leader[one] = other
                room.blocked[one] -= room.blocked[other]
                leading -= 1
                break
    return leading


@inner
def _begin(moment: Moment, candidates: Candidates, room: Room) -> int:
    """Set up each candidate's world after the decision; return their number."""
    number, count = moment.number, 0
    for one in range(len(room.leader)):
        room.leader[one] = one if candidates.possible[one] else -1
        if not candidates.possible[one]:
            continue
        count += 1
        copy_into(room.ends_s[one], moment.ends_s[:number])
        copy_into(room.masks[one], moment.masks[:number])
        room.number[one], room.blocked[one] = number, 1.0
        if one > 0:
            end_s = moment.now_s + candidates.jct_s[one]
            room.ends_s[one, number] = end_s
            room.masks[one, number] = candidates.servers[one]
            room.number[one] = number + 1
            room.blocked[one] = end_s > moment.horizon_s + _SAME_TIME_S
    return count


@inner
def _follow(
    tables: RampTables,
    moment: Moment,
    beta: float,
    jct_s: Array,
    seen: Floats,
    candidates: Candidates,
    futures: Futures,
    stream: int,
    base: Base,
    room: Room,
) -> None:
    """Fill in the jobs blocked in one stream, up to a number that all share."""
    count = _begin(moment, candidates, room)
    copy_into(room.seen, seen)
    remember(room.seen, beta)
    now = moment.now_s
    for job in range(futures.beta.shape[1]):
        now += futures.gap_s[stream, job]
        if now >= moment.horizon_s:
            break
        model, later = futures.model[stream, job], futures.beta[stream, job]
        for one in range(len(room.leader)):
            if room.leader[one] == one:
                _arrive(tables, moment, jct_s, model, later, now, base, room, one)
        if len(base.scorer.first_bias) > 0:
            remember(room.seen, later)
        if _join(room) == 1 and count > 1:
            break
    # A leader has a lower number than its followers, and may follow another itself.
    for one in range(len(room.leader)):
        leader = room.leader[one]
        if leader >= 0 and leader != one:
            room.blocked[one] += room.blocked[leader]


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
    variances: Array,
) -> None:
    """Mean number of jobs blocked if a candidate is taken, then the base policy used.

    All candidates get the same futures, so that their differences are less noisy than
    their costs. Where a stream ends early, because the candidates are equal, jobs that
    all would block later are left out. A single candidate is followed to the end.

    Args:
        tables: Tables of the jobs.
        moment: State before the decision.
        beta: Deadline of the job at the head.
        jct_s: Completion times of all jobs at each degree. Shape [j, d].
        seen: Deadlines so far; see :func:`envs.ramp.history.remember`.
        candidates: Candidates of the decision; impossible ones cost infinity.
        futures: Sampled futures.
        base: Base policy.
        room: Scratch.
        costs: Filled in. Shape [actions].
        variances: Filled in with the variance of the mean cost over the streams,
            relative to the mean of the candidates. Shape [actions].
    """
    streams = max(len(futures.beta), 1)
    costs[:] = np.inf
    variances[:] = 0.0
    room.total[:] = 0.0
    room.squares[:] = 0.0
    every = 0.0
    for stream in range(len(futures.beta)):
        _follow(
            tables,
            moment,
            beta,
            jct_s,
            seen,
            candidates,
            futures,
            stream,
            base,
            room,
        )
        mean, count = 0.0, 0
        for one in range(len(costs)):
            if candidates.possible[one]:
                mean += room.blocked[one]
                count += 1
        mean /= max(count, 1)
        every += mean
        for one in range(len(costs)):
            if candidates.possible[one]:
                apart = room.blocked[one] - mean
                room.total[one] += apart
                room.squares[one] += apart * apart
    for one in range(len(costs)):
        if candidates.possible[one]:
            apart = room.total[one] / streams
            costs[one] = every / streams + apart
            spread = max(room.squares[one] / streams - apart * apart, 0.0)
            variances[one] = spread / max(streams - 1, 1)
