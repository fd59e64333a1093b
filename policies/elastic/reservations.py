"""Plans of jobs in the devices that are free: what admission control asks.

Plans end at whole slots from now, as do their deadlines, so that jobs that end in one
slot leave together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled, inlined, inner
from policies.elastic.profile import Profile, find, merge, split, with_plan

__all__ = [
    "BREAKPOINTS",
    "Jobs",
    "Plans",
    "Reach",
    "copied",
    "earliest_deadline_plans",
    "largest_level",
    "minimum_shares",
    "reach_of",
    "share",
    "slot_end",
    "taken_in_turn",
]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Breakpoints that arrays have room for: for each job, and besides.
BREAKPOINTS = (6, 64)


class Jobs(NamedTuple):
    """Needs of jobs, and the levels that they can use.

    Attributes:
        left: Iterations left of each job. Shape [jobs].
        due: Deadlines. Shape [jobs].
        degrees: Levels of degree, ascending. Shape [levels].
        rates: Iterations per second. Shape [jobs, levels].
        levels: Levels that each job can use. Shape [jobs].
    """

    left: Floats
    due: Floats
    degrees: Index
    rates: Floats
    levels: Index


class Reach(NamedTuple):
    """Levels that numbers of devices suffice for, and at which jobs run.

    Attributes:
        fits: Largest level of each number of devices; -1 for none.
            Shape [devices + 1].
        usable: Largest level up to each at which a job runs, from level -1 on; -1 for
            none. Shape [jobs, levels + 1].
    """

    fits: Index
    usable: Index


class Plans(NamedTuple):
    """Plans of jobs as runs of equal degree; the last run begins at the end.

    Attributes:
        starts: Beginning of each run. Shape [jobs, runs].
        devices: Devices in it. Shape [jobs, runs].
        runs: Number of them. Shape [jobs].
    """

    starts: Floats
    devices: Index
    runs: Index


@inlined
def _aligned(now: float, time: float, slot: float) -> float:
    if slot <= 0.0:
        return time
    end: float = now + np.ceil((time - now) / slot - 1e-9) * slot
    return end


@inlined
def largest_level(usable: Index, fits: Index, level: int, devices: int) -> int:
    """Return the largest level up to one at which a job runs on some devices, or -1.

    Args:
        usable: Largest level up to each at which the job runs, from level -1 on.
        fits: Largest level that each number of devices suffices for.
    """
    found: int = usable[min(level, fits[devices]) + 1]
    return found


@inner
def _fits(degrees: Index, capacity: int) -> Index:
    """Return the largest level of each number of devices; -1 for none."""
    found, level = np.empty(capacity + 1, np.int64), -1
    for devices in range(capacity + 1):
        while level + 1 < len(degrees) and degrees[level + 1] <= devices:
            level += 1
        found[devices] = level
    return found


@inner
def _usable(rates: Floats) -> Index:
    """Return the largest level up to each at which each job runs; -1 for none.

    Shape [jobs, levels + 1], from level -1 on.
    """
    found = np.full((rates.shape[0], rates.shape[1] + 1), -1, np.int64)
    for job in range(rates.shape[0]):
        for level in range(rates.shape[1]):
            runs = rates[job, level] > 0.0
            found[job, level + 1] = level if runs else found[job, level]
    return found


@inner
def reach_of(jobs: Jobs, capacity: int) -> Reach:
    """Return the levels that devices suffice for, and at which jobs run."""
    return Reach(_fits(jobs.degrees, capacity), _usable(jobs.rates))


@inlined
def _spans(
    times: Floats,
    free: Index,
    start: int,
    last: int,
    due: float,
    fits: Index,
    levels: int,
) -> Floats:
    """Return for how long the free devices suffice for each level, from -1 on."""
    found = np.zeros(levels + 1)
    for index in range(start, last):
        until = due if index == last - 1 else times[index + 1]
        found[fits[free[index]] + 1] += until - times[index]
    return found


@inlined
def _most(spans: Floats, rates: Floats, usable: Index, level: int) -> float:
    """Return the iterations of a job that has a level, or less, whenever it can."""
    done = 0.0
    for fit in range(len(spans)):
        at = usable[min(level + 1, fit)]
        if at >= 0:
            done += spans[fit] * rates[at]
    return done


@inlined
def _lowest(
    times: Floats,
    free: Index,
    start: int,
    last: int,
    left: float,
    due: float,
    degrees: Index,
    fits: Index,
    rates: Floats,
    usable: Index,
    levels: int,
) -> tuple[int, int]:
    """Find the lowest level that suffices, and the latest breakpoint to start it at.

    Returns:
        The level and the breakpoint; -1 twice if no level suffices.
    """
    if last <= start:
        return -1, -1
    spans, fastest = np.zeros(0), 0.0
    for level in range(levels):
        fastest = max(fastest, rates[level])
        most = fastest * (due - times[start])
        if len(spans):
            most = _most(spans, rates, usable, level)
        if most < left * (1.0 - 1e-9):
            continue
        done, top, enough = 0.0, usable[level + 1], degrees[level]
        for index in range(last - 1, start - 1, -1):
            # Most of the time there is room for it.
            at = top if free[index] >= enough else usable[fits[free[index]] + 1]
            if at < 0:
                continue
            until = due if index == last - 1 else times[index + 1]
            done += (until - times[index]) * rates[at]
            if done >= left:
                return level, index
        if not len(spans):
            spans = _spans(times, free, start, last, due, fits, len(rates))
    return -1, -1


@inlined
def _use(
    times: Floats,
    free: Index,
    count: int,
    start: int,
    last: int,
    left: float,
    due: float,
    degrees: Index,
    fits: Index,
    rates: Floats,
    usable: Index,
    level: int,
    since: int,
    starts: Floats,
    devices: Index,
    runs: int,
) -> tuple[float, int, int]:
    """Write the runs of a job: a level from a breakpoint on, one less before.

    Args:
        last: Breakpoint of the end of the slot in which the job is due.
        since: The breakpoint from which it has the level.
    Returns:
        The end, the breakpoint after it, and the number of runs.
    """
    held = -1 if runs == 0 else devices[runs - 1]
    if start < since and usable[level] < 0:
        # It runs at no less, and waits.
        if held != 0:
            starts[runs], devices[runs] = times[start], 0
            held, runs = 0, runs + 1
        start = since
    most = level if start >= since else level - 1
    for index in range(start, count):
        if index == since:
            most = level
        if most >= 0 and free[index] >= degrees[most]:
            at = usable[most + 1]
        else:
            at = largest_level(usable, fits, most, free[index])
        degree = 0 if at < 0 else degrees[at]
        if degree != held:
            starts[runs], devices[runs] = times[index], degree
            held, runs = degree, runs + 1
        if at < 0:
            continue
        until = np.inf if index == count - 1 else times[index + 1]
        if index == last - 1:
            until = due
        if left <= (until - times[index]) * rates[at]:
            return times[index] + left / rates[at], index + 1, runs
        left -= (until - times[index]) * rates[at]
        if index == last - 1 and left <= 1e-9 * rates[at]:
            return due, index + 1, runs
    return np.inf, count, runs


@inner
def share(
    slot: float,
    times: Floats,
    free: Index,
    count: int,
    last: int,
    left: float,
    due: float,
    degrees: Index,
    rates: Floats,
    levels: int,
    fits: Index,
    usable: Index,
    forced: int,
    bound: float,
    starts: Floats,
    devices: Index,
) -> tuple[float, bool, int]:
    """Plan the smallest share of devices with which a job meets its deadline.

    The job gets the lowest level with which it ends by the deadline, from as late as
    that suffices, and one level less before. If no level does, it gets all it can use,
    and so too after its deadline. The last run has no devices and begins at the end.

    Args:
        last: Breakpoint of the end of the slot in which the job is due; 0 if late. With
            no more breakpoints than that, a job that does not end in time has no
            end.
        forced: Level that it has until the first breakpoint; -1 for none.
        bound: Time at which the breakpoints end.
        starts: Beginnings of the runs of equal degree; written.
        devices: Devices in them; written.
    Returns:
        The end, whether it is by the deadline, and the number of runs.
    """
    start, runs, end, after = 0, 0, np.inf, 0
    if forced >= 0:
        starts[0], devices[0], runs = times[0], degrees[forced], 1
        length = np.inf if count == 1 else times[1] - times[0]
        if last == 1:
            length = due - times[0]
        if left <= length * rates[forced]:
            end, after = times[0] + left / rates[forced], 1
        left -= length * rates[forced]
        start = 1
    met = end <= due
    if end == np.inf:
        what = (times, free, start, last, left, due, degrees, fits, rates)
        level, since = _lowest(*what, usable, levels)
        met = level >= 0
        if not met:
            level, since = levels - 1, start
        where = (times, free, count, start, last, left, due, degrees, fits, rates)
        written = (starts, devices, runs)
        end, after, runs = _use(*where, usable, level, since, *written)
    end = _aligned(times[0], end, slot)
    # An end at a whole slot can be before a breakpoint by rounding, or after the next.
    while runs > 0 and starts[runs - 1] >= end:
        runs -= 1
    rest = times[after] if after < count else bound
    if rest < end and (runs == 0 or devices[runs - 1] != 0):
        starts[runs], devices[runs], runs = rest, 0, runs + 1
    starts[runs], devices[runs] = end, 0
    return end, met, runs + 1


@inlined
def slot_end(now: float, due: float, slot: float) -> float:
    """Return the end of the slot in which a job is due; now if it is late."""
    return _aligned(now, due, slot) if due > now else now


@inlined
def _reserve(
    slot: float,
    jobs: Jobs,
    reach: Reach,
    job: int,
    profile: Profile,
    count: int,
    found: Profile,
    starts: Floats,
    devices: Index,
) -> tuple[int, int, bool]:
    """Write a profile without the smallest share of a job.

    Returns:
        Number of breakpoints of the profile, runs of the plan, and whether the job
        meets its deadline.
    """
    times, free = profile
    until, end, met, runs = slot_end(times[0], jobs.due[job], slot), np.inf, False, 0
    need = (jobs.left[job], jobs.due[job], jobs.degrees, jobs.rates[job])
    able = (jobs.levels[job], reach.fits, reach.usable[job], -1)
    last = find(times, count, until)
    if last > 0:
        where = (slot, times, free, last, last)
        end, met, runs = share(*where, *need, *able, until, starts, devices)
    late = end == np.inf
    if late:
        count = split(times, free, count, until)
        last = find(times, count, until)
        where = (slot, times, free, count, last)
        end, met, runs = share(*where, *need, *able, np.inf, starts, devices)
    count = with_plan(profile, count, starts, devices, runs, -1, np.inf, found)
    if late:
        count = merge(found.times, found.free, count, until)
    return count, runs, met


@compiled
def minimum_shares(
    now: float, capacity: int, slot: float, jobs: Jobs, plans: Plans, profile: Profile
) -> tuple[int, bool]:
    """Plan the minimum satisfactory share of each job, in the order given.

    Args:
        now: Time.
        capacity: Devices.
        slot: Length of a slot; 0 for none.
        jobs: The jobs.
        plans: Their plans; written.
        profile: The free devices; written.
    Returns:
        Number of breakpoints of the profile, and whether all jobs meet their deadlines.
    """
    one, other = profile, Profile(profile.times.copy(), profile.free.copy())
    one.times[0], one.free[0] = now, capacity
    count, met = 1, True
    reach = reach_of(jobs, capacity)
    for job in range(len(jobs.left)):
        row = (other, plans.starts[job], plans.devices[job])
        made = _reserve(slot, jobs, reach, job, one, count, *row)
        count, plans.runs[job], ok = made
        met, one, other = met and ok, other, one
    copied(one, count, profile)
    return count, met


@inlined
def copied(profile: Profile, count: int, found: Profile) -> int:
    """Copy a profile to another; return the number of its breakpoints."""
    for index in range(count):
        found.times[index] = profile.times[index]
        found.free[index] = profile.free[index]
    return count


class Turns(NamedTuple):
    """Profiles before new jobs that are still to be tried, and those of a trial.

    Attributes:
        times: Breakpoints. Shape [2, new jobs, breakpoints].
        free: Free devices. Shape [2, new jobs, breakpoints].
        counts: Number of breakpoints. Shape [2, new jobs].
        side: The first index of each that is not of a trial. Shape [new jobs].
        met: Whether the jobs before meet their deadlines. Shape [new jobs].
        place: New job that each job is; -1 for none that is to be tried. Shape [jobs].
        planned: Jobs that have plans. Shape [jobs].
    """

    times: Floats
    free: Index
    counts: Index
    side: Index
    met: Flags
    place: Index
    planned: Flags


@inlined
def _follow(
    slot: float,
    jobs: Jobs,
    reach: Reach,
    turns: Turns,
    first: int,
    count: int,
    last: bool,
    one: Profile,
    other: Profile,
    starts: Floats,
    devices: Index,
) -> bool:
    """Plan jobs from one on; return whether all of them meet their deadlines.

    Args:
        count: Number of breakpoints of the profile.
        last: Whether to end at the first that does not.
        one: The profile before them; changed.
        other: Room for a profile.
        starts: Room for runs of a plan.
        devices: Room for them.
    """
    met = True
    for job in range(first, len(jobs.left)):
        new = turns.place[job]
        if turns.planned[job]:
            what = (slot, jobs, reach, job, one, count, other, starts, devices)
            count, _, ok = _reserve(*what)
            met, one, other = met and ok, other, one
            if last and not met:
                return False
        elif new >= 0:
            side = 1 - turns.side[new]
            room = Profile(turns.times[side, new], turns.free[side, new])
            turns.counts[side, new] = copied(one, count, room)
            if not last:
                turns.met[new] = met
    return met


@compiled
def taken_in_turn(
    now: float, capacity: int, slot: float, jobs: Jobs, order: Index
) -> Flags:
    """Take each new job if all that are taken then meet their deadlines.

    A trial begins behind the jobs that are due before the new one, as these keep their
    plans: the profile there is kept for each new job that is still to come.

    Args:
        now: Time.
        capacity: Devices.
        slot: Length of a slot; 0 for none.
        jobs: Jobs that were promised before, and new ones, the earliest deadline first.
        order: The new ones, in the order in which they are tried. Shape [new jobs].
    Returns:
        Whether each new job is taken. Shape [new jobs].
    """
    number, new = len(jobs.left), len(order)
    size = BREAKPOINTS[0] * number + BREAKPOINTS[1]
    reach = reach_of(jobs, capacity)
    one = Profile(np.empty(size), np.empty(size, np.int64))
    other = Profile(np.empty(size), np.empty(size, np.int64))
    work = (one, other, np.empty(size), np.empty(size, np.int64))
    place, taken = np.full(number, -1), np.zeros(new, np.bool_)
    place[order] = np.arange(new)
    turns = Turns(
        np.empty((2, new, size)),
        np.empty((2, new, size), np.int64),
        np.zeros((2, new), np.int64),
        np.ones(new, np.int64),
        np.zeros(new, np.bool_),
        place,
        place < 0,
    )
    one.times[0], one.free[0] = now, capacity
    # Here that does not matter: a new job can change the plans of those due after it.
    _follow(slot, jobs, reach, turns, 0, 1, False, *work)
    turns.side[:] = 0
    for tried in range(new):
        first, side = order[tried], turns.side[tried]
        place[first] = -1
        if not turns.met[tried]:
            continue
        turns.planned[first] = True
        kept = Profile(turns.times[side, tried], turns.free[side, tried])
        count = copied(kept, turns.counts[side, tried], one)
        if not _follow(slot, jobs, reach, turns, first, count, True, *work):
            turns.planned[first] = False
            continue
        taken[tried] = True
        for later in place[first:]:
            if later >= 0:
                turns.side[later], turns.met[later] = 1 - turns.side[later], True
    return taken


@compiled
def earliest_deadline_plans(
    now: float,
    capacity: int,
    slot: float,
    left: Floats,
    due: Floats,
    degrees: Index,
    rates: Floats,
    levels: Index,
    given: Index,
    times: Floats,
    free: Index,
) -> bool:
    """Plan each job, in the order given, with as many devices as it can use, at once.

    Arguments as of :func:`minimum_shares`.

    Args:
        given: Devices of each job from now on; written. Shape [jobs].
    Returns:
        Whether all jobs meet their deadlines.
    """
    times[0], free[0] = now, capacity
    count, met = 1, True
    plan = np.zeros(len(times), np.int64)
    fits, usable = _fits(degrees, capacity), _usable(rates)
    for job in range(len(left)):
        rest, end = left[job], np.inf
        for index in range(count):
            at = largest_level(usable[job], fits, levels[job] - 1, free[index])
            plan[index] = 0 if at < 0 else degrees[at]
            if at < 0:
                continue
            until = np.inf if index == count - 1 else times[index + 1]
            if rest <= (until - times[index]) * rates[job, at]:
                end = times[index] + rest / rates[job, at]
                break
            rest -= (until - times[index]) * rates[job, at]
        given[job] = plan[0]
        met = met and end <= due[job]
        end = _aligned(now, end, slot)
        count = split(times, free, count, end)
        for index in range(count):
            if times[index] < end:
                free[index] -= plan[index]
    return met
