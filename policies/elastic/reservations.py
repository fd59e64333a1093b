"""Plans of jobs in the devices that are free: what admission control asks.

Plans end at whole slots from now, as do their deadlines, so that jobs that end in one
slot leave together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled, inner
from policies.elastic.profile import (
    Profile,
    add_runs,
    find,
    merge,
    merge_runs,
    split,
    without,
)

__all__ = [
    "Jobs",
    "Plans",
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
def _level(usable: Index, fits: Index, level: int, devices: int) -> int:
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


@inner
def _most(spans: Floats, rates: Floats, usable: Index, level: int) -> float:
    """Return the iterations of a job that has a level, or less, whenever it can."""
    done = 0.0
    for fit in range(len(spans)):
        at = usable[min(level + 1, fit)]
        if at >= 0:
            done += spans[fit] * rates[at]
    return done


@inner
def _lowest(
    times: Floats,
    free: Index,
    start: int,
    last: int,
    left: float,
    due: float,
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
        done = 0.0
        for index in range(last - 1, start - 1, -1):
            at = _level(usable, fits, level, free[index])
            if at < 0:
                continue
            until = due if index == last - 1 else times[index + 1]
            done += (until - times[index]) * rates[at]
            if done >= left:
                return level, index
        if not len(spans):
            spans = _spans(times, free, start, last, due, fits, len(rates))
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
    fits: Index,
    rates: Floats,
    usable: Index,
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
        at = _level(usable, fits, most, free[index])
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
    last: int,
    left: float,
    due: float,
    degrees: Index,
    fits: Index,
    rates: Floats,
    usable: Index,
    levels: int,
    forced: int,
    plan: Index,
) -> tuple[float, bool]:
    """Plan the smallest share of devices with which a job meets its deadline.

    The job gets the lowest level with which it ends by the deadline, from as late as
    that suffices, and one level less before. If no level does, it gets all it can use,
    and so too after its deadline.

    Args:
        last: Breakpoint of the end of the slot in which the job is due; 0 if late. With
            no more breakpoints than that, a job that does not end in time has no
            end.
        forced: Level that it has until the first breakpoint; -1 for none.
        plan: Devices from each breakpoint on; written.
    Returns:
        The end, and whether it is by the deadline.
    """
    now, start = times[0], 0
    plan[:count] = 0
    if forced >= 0:
        plan[0] = degrees[forced]
        length = np.inf if count == 1 else times[1] - now
        if last == 1:
            length = due - now
        if left <= length * rates[forced]:
            end = now + left / rates[forced]
            return end, end <= due
        left -= length * rates[forced]
        start = 1
    runs = (fits, rates, usable)
    level, since = _lowest(times, free, start, last, left, due, *runs, levels)
    met = level >= 0
    if not met:
        level, since = levels - 1, start
    what = (left, due, degrees, *runs, level, since, plan)
    end = _use(times, free, count, start, last, *what)
    return end, met


@inner
def _until(now: float, due: float, slot: float) -> float:
    """Return the end of the slot in which a job is due; now if it is late."""
    return _aligned(now, due, slot) if due > now else now


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
    fits, usable = _fits(degrees, capacity), _usable(rates)
    for job in range(len(left)):
        until = _until(now, due[job], slot)
        count = split(times, free, count, until)
        last = find(times, count, until)
        need = (left[job], due[job], degrees, fits, rates[job], usable[job])
        end, ok = _share(times, free, count, last, *need, levels[job], -1, plan)
        met = met and ok
        end = _aligned(now, end, slot)
        runs[job] = _keep(times, count, plan, end, starts[job], devices[job])
        count = add_runs(times, free, count, starts[job], devices[job], runs[job], -1)
        count = merge_runs(times, free, count, starts[job], runs[job])
        count = merge(times, free, count, until)
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


@inner
def _trial(
    slot: float,
    jobs: Jobs,
    reach: Reach,
    plans: Plans,
    job: int,
    forced: int,
    profile: Profile,
    count: int,
    trial: Profile,
    plan: Index,
    starts: Floats,
    devices: Index,
) -> int:
    """Plan a job anew with a degree until the first breakpoint; return its runs.

    Args:
        profile: The profile with the job's present plan.
        count: Number of its breakpoints.
        trial: Room for a profile; written.
        plan: Room for a plan; written.
        starts: Beginnings of the new plan's runs; written.
        devices: Devices in them; written.
    """
    now, due = profile.times[0], jobs.due[job]
    times, free = trial
    held = (plans.starts[job], plans.devices[job], plans.runs[job])
    runs = (reach.fits, jobs.rates[job], reach.usable[job], jobs.levels[job])
    need = (jobs.left[job], due, jobs.degrees, *runs, forced, plan)
    until, end = _until(now, due, slot), np.inf
    # Most jobs end in time, and need no look at what comes after.
    size = without(profile, count, *held, until, trial)
    if until > now:
        end, _ = _share(times, free, size, size, *need)
    if end == np.inf:
        size = without(profile, count, *held, np.inf, trial)
        size = split(times, free, size, until)
        last = find(times, size, until)
        end, _ = _share(times, free, size, last, *need)
    end = _aligned(now, end, slot)
    return _keep(times, size, plan, end, starts, devices)


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
    count = add_runs(times, free, count, *held, 1)
    count = add_runs(times, free, count, starts, devices, runs, -1)
    count = merge_runs(times, free, count, plans.starts[job], plans.runs[job])
    count = merge_runs(times, free, count, starts, runs)
    plans.runs[job] = runs
    plans.starts[job, :runs] = starts[:runs]
    plans.devices[job, :runs] = devices[:runs]
    return count


@inner
def _next_level(jobs: Jobs, reach: Reach, job: int, held: int) -> int:
    """Return the level above that of the devices that a job has now."""
    rates, levels = jobs.rates[job], jobs.levels[job]
    level: int = _level(reach.usable[job], reach.fits, levels - 1, held) + 1
    # A large model runs on no few devices.
    while level < levels and rates[level] == 0.0:
        level += 1
    return level


@inner
def _look(
    jobs: Jobs,
    reach: Reach,
    plans: Plans,
    job: int,
    now: float,
    capacity: int,
    held: Index,
    above: Index,
    more: Index,
) -> None:
    """Write the devices of a job now, its next level, and the devices that it adds."""
    held[job] = plans.devices[job, 0] if plans.starts[job, 0] == now else 0
    above[job] = _next_level(jobs, reach, job, held[job])
    if above[job] < jobs.levels[job]:
        more[job] = jobs.degrees[above[job]] - held[job]
    else:
        more[job] = capacity + 1


@inner
def _has_room(count: int, runs: Index, longest: int, size: int) -> bool:
    """Return True if arrays have room for a plan; ``longest`` is at least the most."""
    if count + 8 + longest < size:
        return True
    found: bool = count + 8 + runs.max() < size
    return found


@inner
def _cheapest(gain: Floats, more: Index, free: int) -> int:
    """Return the job of least gain whose next level free devices suffice for, or -1."""
    best = -1
    for job in range(len(gain)):
        if more[job] <= free and (best < 0 or gain[job] < gain[best]):
            best = job
    return best


@compiled
def expand_shares(
    slot: float,
    capacity: int,
    jobs: Jobs,
    plans: Plans,
    profile: Profile,
    count: int,
    sign: float,
) -> None:
    """Give the devices that are free now, one level at a time, by diminishing returns.

    A job without devices comes first; else that whose device-seconds grow least each.
    With more than ``_JOBS`` jobs, or ``_EXACT`` jobs times free devices, only the job
    that seems best is looked at anew after each level (Minoux 1978), not all.

    Args:
        slot: Length of a slot; 0 for none.
        capacity: Devices.
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
    reach = Reach(_fits(jobs.degrees, capacity), _usable(jobs.rates))
    # Devices that each job has now, its next level, and the devices that it adds.
    held, above = np.zeros(len(runs), np.int64), np.zeros(len(runs), np.int64)
    more = np.zeros(len(runs), np.int64)
    for job in range(len(runs)):
        _look(jobs, reach, plans, job, times[0], capacity, held, above, more)
    # Device-seconds that a job's next level costs each, and whether that is of now.
    gain, fresh = np.full(len(runs), -np.inf), np.zeros(len(runs), np.bool_)
    lazy = len(runs) > _JOBS or len(runs) * free[0] > _EXACT
    # A plan adds few breakpoints; those that the arrays have no room for, none.
    longest = runs.max()
    while free[0] > 0 and _has_room(count, runs, longest, len(times)):
        best = _cheapest(gain, more, free[0])
        if best < 0:
            break
        what = (profile, count, trial, plan, new_starts, new_devices)
        new = _trial(slot, jobs, reach, plans, best, above[best], *what)
        if held[best] > 0 and not fresh[best]:
            grown = _device_s(new_starts, new_devices, new)
            grown -= _device_s(starts[best], devices[best], runs[best])
            gain[best] = sign * grown / more[best]
            if lazy and count > 1:
                # A job is tried with a level until the first breakpoint.
                gain[best] /= times[1] - times[0]
            fresh[best] = True
            continue
        count = _replace(plans, best, new, new_starts, new_devices, profile, count)
        longest = max(longest, new)
        _look(jobs, reach, plans, best, times[0], capacity, held, above, more)
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
    fits, usable = _fits(degrees, capacity), _usable(rates)
    for job in range(len(left)):
        rest, end = left[job], np.inf
        for index in range(count):
            at = _level(usable[job], fits, levels[job] - 1, free[index])
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
