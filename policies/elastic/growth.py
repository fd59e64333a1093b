"""Free devices shared among the jobs that run, by what they bring.

Where devices are of one type, jobs get the next level whose further devices bring the
most progress each. Where they are of several, a job may also go to devices of another
type, and what counts is how much sooner it ends.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled, inner
from policies.elastic.promises import EARLY_S, GAP_S, Rows

__all__ = ["raised"]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Weight of a level that a running job holds, against one that a restart would bring.
_HELD = 2.0
#: Restarts that other devices have to pay for.
_RESTARTS = 2.0
#: Least number of further devices that a gain is divided by.
_FEW = 0.25


def raised(rows: Rows, weight: Floats) -> Rows:
    """Return rows in which the free devices are shared by what they bring.

    Args:
        rows: Rows that hold.
        weight: Weight of each job's progress, where there is one type. Shape [n].
    """
    needs = rows.needs
    starts_s, free_then = rows.free_later()
    every = np.arange(len(needs.degrees))
    moves = rows.moves(np.broadcast_to(every, needs.time_s.shape))
    found, now, free = rows.copy(), rows.now, rows.free()
    time_s = needs.time_s + moves * needs.stalls + GAP_S
    limit_s, later = rows.due_s - EARLY_S / 2, (starts_s, free_then)
    if len(free) == 1:
        means = (needs.rates, time_s, limit_s, needs.stalls, needs.degrees, weight)
        levels = needs.tops[:, 0]
        chosen = _raise_levels(now, needs.held, levels, *means, int(free[0]), *later)
    else:
        spent_s = np.where(
            (needs.held < 0)[:, None] | (needs.held[:, None] == every),
            time_s,
            time_s + _RESTARTS * needs.stalls,
        )
        spent_s[time_s > limit_s[:, None]] = np.inf
        kinds = (needs.size, needs.degrees, needs.kinds)
        chosen = _go_sooner(now, time_s, spent_s, *kinds, free, *later)
    found.level = np.where(rows.start_s > 0.0, rows.level, chosen)
    return found if not len(starts_s) or found.hold() else rows


@inner
def _raised_later(
    starts_s: Floats,
    free_then: Index,
    ends_s: tuple[float, float],
    degree: tuple[int, int],
    kinds: tuple[int, int],
) -> bool:
    """Change a job's devices where that leaves enough for the jobs that start later.

    Args:
        starts_s: Times at which these start. Shape [k].
        free_then: Devices of each type free then; changed. Shape [k, kinds].
        ends_s: End of the job before and after.
        degree: Its devices before and after.
        kinds: Their types.
    """
    for sign in (0, 1):
        for then in range(len(starts_s)):
            less = degree[0] if starts_s[then] < ends_s[0] else 0
            more = degree[1] if starts_s[then] < ends_s[1] else 0
            if kinds[0] == kinds[1]:
                more, less = more - less, 0
            if sign == 0 and more > free_then[then, kinds[1]]:
                return False
            free_then[then, kinds[1]] -= sign * more
            free_then[then, kinds[0]] += sign * less
    return True


@compiled
def _raise_levels(
    low: Index,
    held: Index,
    levels: Index,
    rates: Floats,
    time_s: Floats,
    limit_s: Floats,
    stalls: Floats,
    degrees: Index,
    weight: Floats,
    free: int,
    starts_s: Floats,
    free_then: Index,
) -> Index:
    """Raise the levels of running jobs, the most progress a device first.

    Args:
        low: Levels that are decided; -1 for a job that does not run. Shape [n].
        limit_s: Time by which a job has to end. Shape [n].
        free: Devices that are free.
        starts_s: Times at which paused jobs start. Shape [k].
        free_then: Devices that are free then; changed. Shape [k, 1].
    Returns:
        The levels. Shape [n].
    """
    jobs = len(low)
    level, gains = low.copy(), np.zeros(jobs)
    best = np.zeros(jobs)
    for job in range(jobs):
        for at in range(levels[job]):
            best[job] = max(best[job], rates[job, at] / degrees[at])
    fresh = np.ones(jobs, dtype=np.bool_)
    while free > 0:
        chosen = -1
        for job in range(jobs):
            at = level[job] + 1
            if fresh[job]:
                fresh[job] = False
                gains[job] = 0.0
                able = level[job] >= 0 and at < levels[job]
                # A restart can cost more than the further devices bring.
                if able and time_s[job, at] <= limit_s[job]:
                    more = degrees[at] - degrees[level[job]]
                    gain = (rates[job, at] - rates[job, level[job]]) / more / best[job]
                    if at <= held[job]:
                        gain *= _HELD
                    elif held[job] >= 0:
                        gain *= time_s[job, at] / (
                            time_s[job, at] + _RESTARTS * stalls[job, at]
                        )
                    gains[job] = gain * weight[job]
            if gains[job] > 0.0 and (chosen < 0 or gains[job] > gains[chosen]):
                chosen = job
        if chosen < 0:
            break
        at = level[chosen]
        more = degrees[at + 1] - degrees[at]
        ends_s = (time_s[chosen, at], time_s[chosen, at + 1])
        held_then = (degrees[at], degrees[at + 1])
        if more > free or not _raised_later(
            starts_s, free_then, ends_s, held_then, (0, 0)
        ):
            gains[chosen] = 0.0
            continue
        free -= more
        level[chosen] += 1
        fresh[chosen] = True
    return level


@inner
def _soonest(
    now: int,
    time_s: Floats,
    spent_s: Floats,
    size: Floats,
    degrees: Index,
    kinds: Index,
    free: Index,
) -> tuple[float, int]:
    """Return the greatest gain of a job by other devices, and the option; 0 for none.

    A gain is the growth of one over the time to the job's end, for each further device.
    """
    best, chosen = 0.0, now
    for at in range(len(degrees)):
        room = free[kinds[at]]
        if kinds[at] == kinds[now]:
            room += degrees[now]
        if degrees[at] <= room and spent_s[at] < time_s[now]:
            gain = 1.0 / spent_s[at] - 1.0 / time_s[now]
            gain /= max(size[at] - size[now], _FEW)
            if gain > best:
                best, chosen = gain, at
    return best, chosen


@compiled
def _go_sooner(
    low: Index,
    time_s: Floats,
    spent_s: Floats,
    size: Floats,
    degrees: Index,
    kinds: Index,
    free: Index,
    starts_s: Floats,
    free_then: Index,
) -> Index:
    """Give running jobs devices of any type with which they end sooner.

    The greatest gain comes first. As devices get fewer, gains only shrink, so each is
    found anew no sooner than it is the greatest; all are when devices are given back.

    Args:
        low: Options that are decided; -1 for a job that does not run. Shape [n].
        time_s: Time to the end with each option. Shape [n, options].
        spent_s: The same with what a change has to pay for; infinity if that is too
            late. Written. Shape [n, options].
        size: Worth of the devices of each option. Shape [options].
        free: Devices of each type that are free; changed. Shape [kinds].
        starts_s: Times at which paused jobs start. Shape [k].
        free_then: Devices of each type free then; changed. Shape [k, kinds].
    Returns:
        The options. Shape [n].
    """
    option, wanted, gains = low.copy(), low.copy(), np.zeros(len(low))
    running = np.flatnonzero(low >= 0)
    fresh, again = np.ones(len(low), dtype=np.bool_), running
    while len(running) > 0:
        for job in again:
            means = (time_s[job], spent_s[job], size, degrees, kinds, free)
            gains[job], wanted[job] = _soonest(option[job], *means)
            fresh[job] = True
        job = running[gains[running].argmax()]
        if gains[job] <= 0.0:
            break
        again = np.full(1, job)
        if not fresh[job]:
            continue
        now, at = option[job], wanted[job]
        ends_s, held = (time_s[job, now], time_s[job, at]), (degrees[now], degrees[at])
        of = (kinds[now], kinds[at])
        if not _raised_later(starts_s, free_then, ends_s, held, of):
            spent_s[job, at] = np.inf
            continue
        free[of[0]] += held[0]
        free[of[1]] -= held[1]
        option[job], fresh[:] = at, False
        if of[0] != of[1] or held[1] < held[0]:
            again = running
    return option
