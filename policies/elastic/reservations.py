"""Free devices over time, and plans of jobs in them: what admission control asks.

A profile has breakpoints ``times`` and the devices that are ``free`` from each to the
next, the last without end. The first breakpoint is now. Plans end at whole slots from
now, as do their deadlines, so that jobs that end in one slot leave together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled, inner

__all__ = [
    "Jobs",
    "Plans",
    "Profile",
    "earliest_deadline_plans",
    "expand_shares",
    "minimum_shares",
]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

#: Jobs, and jobs times free devices, up to which the expansion of shares looks at all
#: jobs anew.
_JOBS, _EXACT = 256, 100_000


@inner
def _aligned(now: float, time: float, slot: float) -> float:
    if slot <= 0.0:
        return time
    end: float = now + np.ceil((time - now) / slot - 1e-9) * slot
    return end


@inner
def _split(times: Floats, free: Index, count: int, at: float) -> int:
    """Make a breakpoint of a time, if it is none; return the number of breakpoints."""
    where = count
    while where > 0 and times[where - 1] >= at:
        where -= 1
    if where < count and times[where] == at:
        return count
    for index in range(count, where, -1):
        times[index], free[index] = times[index - 1], free[index - 1]
    times[where] = at
    free[where] = free[where - 1]
    return count + 1


@inner
def _add(
    times: Floats, free: Index, count: int, start: float, end: float, devices: int
) -> int:
    """Add devices from a time to another; return the number of breakpoints."""
    if devices == 0 or end <= start:
        return count
    count = _split(times, free, count, start)
    count = _split(times, free, count, end)
    for index in range(count):
        if start <= times[index] < end:
            free[index] += devices
    return count


@inner
def _level(degrees: Index, rates: Floats, levels: int, devices: int) -> int:
    """Return the largest level at which a job runs on some devices; -1 if none."""
    found = -1
    for level in range(levels):
        if degrees[level] <= devices and rates[level] > 0.0:
            found = level
    return found


@inner
def _lowest(
    times: Floats,
    free: Index,
    start: int,
    last: int,
    left: float,
    due: float,
    degrees: Index,
    rates: Floats,
    levels: int,
) -> tuple[int, int]:
    """Find the lowest level that suffices, and the latest breakpoint to start it at.

    Returns:
        The level and the breakpoint; -1 twice if no level suffices.
    """
    fastest = 0.0
    for level in range(levels):
        fastest = max(fastest, rates[level])
        if last <= start or fastest * (due - times[start]) < left * (1.0 - 1e-9):
            continue
        done = 0.0
        for index in range(last - 1, start - 1, -1):
            at = _level(degrees, rates, level + 1, free[index])
            if at < 0:
                continue
            until = due if index == last - 1 else times[index + 1]
            done += (until - times[index]) * rates[at]
            if done >= left:
                return level, index
    return -1, -1


@inner
def _use(
    times: Floats,
    free: Index,
    count: int,
    start: int,
    last: int,
    left: float,
    due: float,
    degrees: Index,
    rates: Floats,
    level: int,
    since: int,
    plan: Index,
) -> float:
    """Write the degrees of a job: a level from a breakpoint on, one less before.

    Args:
        last: Breakpoint of the end of the slot in which the job is due.
        since: The breakpoint from which it has the level.
    Returns:
        The end.
    """
    for index in range(start, count):
        most = level if index >= since else level - 1
        at = _level(degrees, rates, most + 1, free[index])
        if at < 0:
            continue
        plan[index] = degrees[at]
        until = np.inf if index == count - 1 else times[index + 1]
        if index == last - 1:
            until = due
        if left <= (until - times[index]) * rates[at]:
            end: float = times[index] + left / rates[at]
            return end
        left -= (until - times[index]) * rates[at]
        if index == last - 1 and left <= 1e-9 * rates[at]:
            return due
    return np.inf


@inner
def _share(
    times: Floats,
    free: Index,
    count: int,
    left: float,
    due: float,
    slot: float,
    degrees: Index,
    rates: Floats,
    levels: int,
    forced: int,
    plan: Index,
) -> tuple[int, float, bool]:
    """Plan the smallest share of devices with which a job meets its deadline.

    The job gets the lowest level with which it ends by the deadline, from as late as
    that suffices, and one level less before. If no level does, it gets all it can use,
    and so too after its deadline.

    Args:
        forced: Level that it has until the first breakpoint; -1 for none.
        plan: Devices from each breakpoint on; written.
    Returns:
        Number of breakpoints, the end, and whether it is by the deadline.
    """
    now, last, start = times[0], 0, 0
    if due > now:
        until = _aligned(now, due, slot)
        count = _split(times, free, count, until)
        while times[last] < until:
            last += 1
    plan[:count] = 0
    if forced >= 0:
        plan[0] = degrees[forced]
        length = np.inf if count == 1 else times[1] - now
        if last == 1:
            length = due - now
        if left <= length * rates[forced]:
            end = now + left / rates[forced]
            return count, end, end <= due
        left -= length * rates[forced]
        start = 1
    what = (left, due, degrees, rates)
    level, since = _lowest(times, free, start, last, *what, levels)
    met = level >= 0
    if not met:
        level, since = levels - 1, start
    end = _use(times, free, count, start, last, *what, level, since, plan)
    return count, end, met


@inner
def _keep(
    times: Floats,
    count: int,
    plan: Index,
    end: float,
    starts: Floats,
    devices: Index,
) -> int:
    """Write a plan as runs of equal degree, the last of 0 from its end on."""
    runs = 0
    for index in range(count):
        if times[index] >= end:
            break
        if runs == 0 or devices[runs - 1] != plan[index]:
            starts[runs], devices[runs] = times[index], plan[index]
            runs += 1
    starts[runs], devices[runs] = end, 0
    return runs + 1


@inner
def _add_runs(
    times: Floats,
    free: Index,
    count: int,
    starts: Floats,
    devices: Index,
    runs: int,
    sign: int,
) -> int:
    for run in range(runs - 1):
        count = _add(
            times, free, count, starts[run], starts[run + 1], sign * devices[run]
        )
    return count


@inner
def _merge(times: Floats, free: Index, count: int) -> int:
    """Drop the breakpoints at which nothing changes; return how many are left."""
    kept = 1
    for index in range(1, count):
        if free[index] != free[kept - 1]:
            times[kept], free[kept] = times[index], free[index]
            kept += 1
    return kept


@inner
def _device_s(starts: Floats, devices: Index, runs: int) -> float:
    total = 0.0
    for run in range(runs - 1):
        total += devices[run] * (starts[run + 1] - starts[run])
    return total


@compiled
def minimum_shares(
    now: float,
    capacity: int,
    slot: float,
    left: Floats,
    due: Floats,
    degrees: Index,
    rates: Floats,
    levels: Index,
    starts: Floats,
    devices: Index,
    runs: Index,
    times: Floats,
    free: Index,
) -> tuple[int, bool]:
    """Plan the minimum satisfactory share of each job, in the order given.

    Args:
        now: Time.
        capacity: Devices.
        slot: Length of a slot; 0 for none.
        left: Iterations left of each job. Shape [jobs].
        due: Deadlines. Shape [jobs].
        degrees: Levels of degree, ascending. Shape [levels].
        rates: Iterations per second. Shape [jobs, levels].
        levels: Levels that each job can use. Shape [jobs].
        starts: Breakpoints of the plans; written. Shape [jobs, runs].
        devices: Devices from each; written. Shape [jobs, runs].
        runs: Number of them; written. Shape [jobs].
        times: Breakpoints of the profile; written.
        free: Free devices from each; written.
    Returns:
        Number of breakpoints of the profile, and whether all jobs meet their deadlines.
    """
    times[0], free[0] = now, capacity
    count, met = 1, True
    plan = np.zeros(len(times), np.int64)
    for job in range(len(left)):
        count, end, ok = _share(
            times,
            free,
            count,
            left[job],
            due[job],
            slot,
            degrees,
            rates[job],
            levels[job],
            -1,
            plan,
        )
        met = met and ok
        end = _aligned(now, end, slot)
        runs[job] = _keep(times, count, plan, end, starts[job], devices[job])
        count = _add_runs(times, free, count, starts[job], devices[job], runs[job], -1)
        count = _merge(times, free, count)
    return count, met


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


class Profile(NamedTuple):
    """Breakpoints, and the devices that are free from each to the next."""

    times: Floats
    free: Index


@inner
def _trial(
    slot: float,
    jobs: Jobs,
    plans: Plans,
    job: int,
    forced: int,
    profile: Profile,
    count: int,
    plan: Index,
    starts: Floats,
    devices: Index,
) -> int:
    """Plan a job anew with a degree until the first breakpoint; return its runs.

    Args:
        profile: The profile with the job's present plan; overwritten.
        count: Number of its breakpoints.
        starts: Beginnings of the new plan's runs; written.
        devices: Devices in them; written.
    """
    times, free = profile
    held = (plans.starts[job], plans.devices[job], plans.runs[job])
    count = _add_runs(times, free, count, *held, 1)
    count = _merge(times, free, count)
    need = (jobs.left[job], jobs.due[job], slot, jobs.degrees, jobs.rates[job])
    count, end, _ = _share(times, free, count, *need, jobs.levels[job], forced, plan)
    end = _aligned(times[0], end, slot)
    return _keep(times, count, plan, end, starts, devices)


@inner
def _replace(
    plans: Plans,
    job: int,
    runs: int,
    starts: Floats,
    devices: Index,
    profile: Profile,
    count: int,
) -> int:
    """Give a job another plan; return the number of breakpoints of the profile."""
    times, free = profile
    held = (plans.starts[job], plans.devices[job], plans.runs[job])
    count = _add_runs(times, free, count, *held, 1)
    plans.runs[job] = runs
    plans.starts[job, :runs] = starts[:runs]
    plans.devices[job, :runs] = devices[:runs]
    count = _add_runs(times, free, count, starts, devices, runs, -1)
    return _merge(times, free, count)


@inner
def _next_level(jobs: Jobs, plans: Plans, job: int, now: float) -> int:
    """Return the level above that which a job has now."""
    starts, devices, _ = plans
    held = devices[job, 0] if starts[job, 0] == now else 0
    rates = jobs.rates[job]
    level = _level(jobs.degrees, rates, jobs.levels[job], held) + 1
    # A large model runs on no few devices.
    while level < jobs.levels[job] and rates[level] == 0.0:
        level += 1
    return level


@compiled
def expand_shares(
    slot: float, jobs: Jobs, plans: Plans, profile: Profile, count: int, sign: float
) -> None:
    """Give the devices that are free now, one level at a time, by diminishing returns.

    A job without devices comes first; else that whose device-seconds grow least each.
    With more than ``_JOBS`` jobs, or ``_EXACT`` jobs times free devices, only the job
    that seems best is looked at anew after each level (Minoux 1978), not all.

    Args:
        slot: Length of a slot; 0 for none.
        jobs: The jobs.
        plans: Their plans, of :func:`minimum_shares`; changed.
        profile: The free devices; changed.
        count: Number of breakpoints of the profile.
        sign: 1 to take the job whose device-seconds grow least, -1 the most.
    """
    times, free = profile
    starts, devices, runs = plans
    plan = np.zeros(len(times), np.int64)
    trial = Profile(times.copy(), free.copy())
    new_starts, new_devices = starts[0].copy(), devices[0].copy()
    # Device-seconds that a job's next level costs each, and whether that is of now.
    gain, fresh = np.full(len(runs), -np.inf), np.zeros(len(runs), np.bool_)
    lazy = len(runs) > _JOBS or len(runs) * free[0] > _EXACT
    # A plan adds few breakpoints; those that the arrays have no room for, none.
    while free[0] > 0 and count + 8 + runs.max() < len(times):
        best, best_level = -1, -1
        for job in range(len(runs)):
            if best >= 0 and gain[job] >= gain[best]:
                continue
            level = _next_level(jobs, plans, job, times[0])
            if level < jobs.levels[job]:
                held = devices[job, 0] if starts[job, 0] == times[0] else 0
                if jobs.degrees[level] - held <= free[0]:
                    best, best_level = job, level
        if best < 0:
            break
        trial.times[:count], trial.free[:count] = times[:count], free[:count]
        what = (trial, count, plan, new_starts, new_devices)
        new = _trial(slot, jobs, plans, best, best_level, *what)
        held = devices[best, 0] if starts[best, 0] == times[0] else 0
        if held > 0 and not fresh[best]:
            grown = _device_s(new_starts, new_devices, new)
            grown -= _device_s(starts[best], devices[best], runs[best])
            gain[best] = sign * grown / (jobs.degrees[best_level] - held)
            if lazy and count > 1:
                # A job is tried with a level until the first breakpoint.
                gain[best] /= times[1] - times[0]
            fresh[best] = True
            continue
        count = _replace(plans, best, new, new_starts, new_devices, profile, count)
        fresh[:] = False
        gain[best] = -np.inf
        if not lazy:
            gain[:] = -np.inf


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
    for job in range(len(left)):
        rest, end = left[job], np.inf
        for index in range(count):
            at = _level(degrees, rates[job], levels[job], free[index])
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
        count = _split(times, free, count, end)
        for index in range(count):
            if times[index] < end:
                free[index] -= plan[index]
    return met
