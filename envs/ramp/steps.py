"""Steps of episodes of the benchmark side by side, in compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.history import remember
from envs.ramp.requests import servers_given
from envs.ramp.tables import RampTables
from planner.simulate.compiled import compiled

__all__ = [
    "OUTCOMES",
    "UNKNOWN",
    "Arrivals",
    "Running",
    "Totals",
    "account",
    "arrive",
    "decide_rows",
    "leave",
    "servers_in",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Masks = NDArray[np.uint64]

#: Outcomes by their number.
OUTCOMES = ("placed", "refused", "no_room", "late")
_PLACED, _REFUSED, _NO_ROOM, _LATE = range(len(OUTCOMES))
#: Instead of one, where a completion time has to be worked out first.
UNKNOWN = len(OUTCOMES)
#: Ends of jobs and arrivals this close are at one time; as in RampWorld.
_SAME_TIME_S = 1e-7


class Running(NamedTuple):
    """Jobs that run. b episodes, at most one job a server.

    Attributes:
        ends_s: When each leaves. Shape [b, servers].
        masks: Servers that each holds, as bits. Shape [b, servers].
        number: Of the jobs. Shape [b].
        held: Servers held in the interval that ends now. Shape [b].
        busy: Servers held from now on, as bits. Shape [b].
    """

    ends_s: Array
    masks: Masks
    number: Index
    held: Index
    busy: Masks


class Arrivals(NamedTuple):
    """Of each episode, filled up with zeros; ``decided`` of them need a decision.

    Attributes:
        time_s: Shape [b, n].
        model: Shape [b, n].
        beta: Shape [b, n].
        decided: How many are decided. Shape [b].
        arrived: How many arrive, those at the horizon included. Shape [b].
        position: The next one to decide. Shape [b].
    """

    time_s: Array
    model: Index
    beta: Array
    decided: Index
    arrived: Index
    position: Index


class Totals(NamedTuple):
    """Sums over an episode's decisions, as Summary names them.

    Attributes:
        outcomes: Shape [b, outcomes].
        unfinished: Shape [b].
        done_bytes: Shape [b].
        completed: Completion time, speed-up, degree and workers of completed jobs.
            Shape [b, 4].
    """

    outcomes: Index
    unfinished: Index
    done_bytes: Array
    completed: Array


@compiled
def servers_in(mask: np.uint64) -> int:
    """How many servers a mask has."""
    # Masks are 64 bits wide: pairs, fours, bytes, and a product that adds bytes up.
    x = mask - ((mask >> np.uint64(1)) & np.uint64(0x5555555555555555))
    twos = np.uint64(0x3333333333333333)
    x = (x & twos) + ((x >> np.uint64(2)) & twos)
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@compiled
def leave(ends_s: Array, masks: Masks, count: int, now_s: float) -> tuple[int, int]:
    """Drop the jobs that have ended.

    Args:
        ends_s: Of the jobs; closed up in place. Shape [at least count].
        masks: Likewise.
        count: Jobs before.
        now_s: Time of the next decision.
    Returns:
        Jobs left, and servers held in the interval that ends now: a job that leaves
        just now still counts there.
    """
    held, left = 0, 0
    for job in range(count):
        end = ends_s[job]
        if end >= now_s - _SAME_TIME_S:
            held += servers_in(masks[job])
        if end > now_s + _SAME_TIME_S:
            ends_s[left], masks[left] = end, masks[job]
            left += 1
    return left, held


@compiled
def arrive(running: Running, rows: Index, now_s: Array) -> None:
    """Let time go on to the next decisions.

    Args:
        running: Changed in place.
        rows: Episodes. Shape [r].
        now_s: Time of the next decision of each. Shape [r].
    """
    for index in range(len(rows)):
        row = rows[index]
        left, held = leave(
            running.ends_s[row], running.masks[row], running.number[row], now_s[index]
        )
        busy = np.uint64(0)
        for job in range(left):
            busy |= running.masks[row, job]
        running.number[row], running.held[row], running.busy[row] = left, held, busy


@compiled
def decide_rows(
    tables: RampTables,
    running: Running,
    arrivals: Arrivals,
    known_jct_s: Array,
    choice: Index,
    rows: Index,
    outcome: Index,
) -> None:
    """Place what can be placed, and say what became of each row's job.

    Args:
        tables: Of the jobs.
        running: Changed in place.
        arrivals: Of all episodes.
        known_jct_s: Completion times worked out so far, NaN elsewhere. Shape [b, j, s].
        choice: Index of a degree, -1 to turn the job away. Shape [b].
        rows: Episodes that are decided. Shape [r].
        outcome: Filled in; UNKNOWN where a completion time is missing. Shape [b].
    """
    for row in rows:
        now = arrivals.position[row]
        model, k = arrivals.model[row, now], choice[row]
        left = tables.num_servers - running.held[row]
        if k < 0 or tables.degrees[k] > left:
            outcome[row] = _REFUSED
            continue
        given = servers_given(tables.sizes[model, k], tables.blocks, running.busy[row])
        if given == 0:
            outcome[row] = _NO_ROOM
            continue
        jct = known_jct_s[row, model, tables.splits[model, k]]
        if np.isnan(jct):
            outcome[row] = UNKNOWN
        elif jct > arrivals.beta[row, now] * tables.sequential_jct_s[model]:
            outcome[row] = _LATE
        else:
            outcome[row] = _PLACED
            job = running.number[row]
            running.ends_s[row, job] = arrivals.time_s[row, now] + jct
            running.masks[row, job] = given
            running.number[row] += 1


@compiled
def account(
    tables: RampTables,
    running: Running,
    arrivals: Arrivals,
    totals: Totals,
    seen: NDArray[np.float32],
    known_jct_s: Array,
    choice: Index,
    rows: Index,
    outcome: Index,
    horizon_s: float,
) -> None:
    """Sum up what became of jobs, and go on to the next ones.

    Args:
        tables: Of the jobs.
        running: After the decisions.
        arrivals: Positions are changed in place.
        totals: Changed in place.
        seen: Deadlines so far, changed in place. Shape [b, NUM_SEEN].
        known_jct_s: As :func:`decide_rows`.
        choice: Likewise.
        rows: Likewise.
        outcome: As it was filled in.
        horizon_s: When episodes end.
    """
    for row in rows:
        now = arrivals.position[row]
        arrivals.position[row] += 1
        remember(seen[row], arrivals.beta[row, now])
        totals.outcomes[row, outcome[row]] += 1
        if outcome[row] != _PLACED:
            continue
        model, start = arrivals.model[row, now], arrivals.time_s[row, now]
        split = tables.splits[model, choice[row]]
        jct = known_jct_s[row, model, split]
        share = min(1.0, (horizon_s - start) / jct)
        totals.done_bytes[row] += tables.demand_bytes[model] * share
        job = running.number[row] - 1
        if running.ends_s[row, job] > horizon_s + _SAME_TIME_S:
            totals.unfinished[row] += 1
            continue
        totals.completed[row, 0] += jct
        totals.completed[row, 1] += tables.sequential_jct_s[model] / jct
        totals.completed[row, 2] += split
        totals.completed[row, 3] += servers_in(running.masks[row, job])
