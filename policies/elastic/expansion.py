"""Devices that are free now, given to jobs that have their smallest shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled, inlined, inner
from policies.elastic.profile import Profile, find, split, with_plan
from policies.elastic.reservations import (
    Jobs,
    Plans,
    Reach,
    largest_level,
    reach_of,
    share,
    slot_end,
)

__all__ = ["expand_shares"]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

#: Jobs, and jobs times free devices, up to which the expansion of shares looks at all
#: jobs anew.
_JOBS, _EXACT = 256, 100_000


@inner
def _device_s(starts: Floats, devices: Index, runs: int) -> float:
    total = 0.0
    for run in range(runs - 1):
        total += devices[run] * (starts[run + 1] - starts[run])
    return total


@inlined
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
    starts: Floats,
    devices: Index,
) -> int:
    """Plan a job anew with a degree until the first breakpoint; return its runs.

    Args:
        profile: The profile with the job's present plan.
        count: Number of its breakpoints.
        trial: Room for a profile; written.
        starts: Beginnings of the new plan's runs; written.
        devices: Devices in them; written.
    """
    now, due = profile.times[0], jobs.due[job]
    times, free = trial
    held = (plans.starts[job], plans.devices[job], plans.runs[job])
    able = (jobs.levels[job], reach.fits, reach.usable[job], forced, np.inf)
    need = (jobs.left[job], due, jobs.degrees, jobs.rates[job], *able, starts, devices)
    until, end, runs = slot_end(now, due, slot), np.inf, 0
    # Most jobs end in time, and need no look at what comes after.
    size = with_plan(profile, count, *held, 1, until, trial)
    if until > now:
        end, _, runs = share(slot, times, free, size, size, *need)
    if end == np.inf:
        size = with_plan(profile, count, *held, 1, np.inf, trial)
        size = split(times, free, size, until)
        last = find(times, size, until)
        end, _, runs = share(slot, times, free, size, last, *need)
    return runs


@inlined
def _replace(
    plans: Plans,
    job: int,
    runs: int,
    starts: Floats,
    devices: Index,
    profile: Profile,
    count: int,
    room: Profile,
) -> int:
    """Give a job another plan; return the number of breakpoints of the profile."""
    held = (plans.starts[job], plans.devices[job], plans.runs[job])
    count = with_plan(profile, count, *held, 1, np.inf, room)
    count = with_plan(room, count, starts, devices, runs, -1, np.inf, profile)
    plans.runs[job] = runs
    plans.starts[job, :runs] = starts[:runs]
    plans.devices[job, :runs] = devices[:runs]
    return count


@inlined
def _next_level(jobs: Jobs, reach: Reach, job: int, held: int) -> int:
    """Return the level above that of the devices that a job has now."""
    rates, levels = jobs.rates[job], jobs.levels[job]
    level: int = largest_level(reach.usable[job], reach.fits, levels - 1, held) + 1
    # A large model runs on no few devices.
    while level < levels and rates[level] == 0.0:
        level += 1
    return level


@inlined
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
    trial = Profile(times.copy(), free.copy())
    new_starts, new_devices = starts[0].copy(), devices[0].copy()
    reach = reach_of(jobs, capacity)
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
    # The job whose trial the new runs are.
    tried, new = -1, 0
    while free[0] > 0 and _has_room(count, runs, longest, len(times)):
        best = _cheapest(gain, more, free[0])
        if best < 0:
            break
        if best != tried:
            what = (profile, count, trial, new_starts, new_devices)
            new = _trial(slot, jobs, reach, plans, best, above[best], *what)
            tried = best
        if held[best] > 0 and not fresh[best]:
            grown = _device_s(new_starts, new_devices, new)
            grown -= _device_s(starts[best], devices[best], runs[best])
            gain[best] = sign * grown / more[best]
            if lazy and count > 1:
                # A job is tried with a level until the first breakpoint.
                gain[best] /= times[1] - times[0]
            fresh[best] = True
            continue
        tried = -1
        count = _replace(
            plans, best, new, new_starts, new_devices, profile, count, trial
        )
        longest = max(longest, new)
        _look(jobs, reach, plans, best, times[0], capacity, held, above, more)
        fresh[:] = False
        gain[best] = -np.inf
        if not lazy:
            gain[:] = -np.inf
