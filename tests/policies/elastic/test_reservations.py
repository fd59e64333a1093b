"""Plans of the smallest shares, beside the same written without tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policies.elastic.expansion import expand_shares
from policies.elastic.profile import Profile
from policies.elastic.reservations import (
    Jobs,
    Plans,
    minimum_shares,
    taken_in_turn,
)

DEGREES = np.array([1, 2, 3, 4, 8])
Runs = list[tuple[float, int]]


def _drawn(seed: int, number: int) -> Jobs:
    """Jobs, some of which run on no few devices or cannot end in time."""
    draw = np.random.default_rng(seed)
    rates = DEGREES ** draw.uniform(0.5, 1.0, (number, 1))
    rates[:, :2] *= draw.random((number, 1)) < 0.8
    return Jobs(
        left=draw.uniform(1, 60, number),
        due=np.sort(draw.uniform(-2, 60, number)),
        degrees=DEGREES,
        rates=np.ascontiguousarray(rates),
        levels=draw.integers(3, len(DEGREES) + 1, number),
    )


def _met(jobs: Jobs, capacity: int, slot: float) -> bool:
    return _planned(jobs, capacity, slot)[3]


def _planned(
    jobs: Jobs, capacity: int, slot: float
) -> tuple[Plans, Profile, int, bool]:
    number, size = len(jobs.left), 6 * len(jobs.left) + 64
    plans = Plans(
        np.zeros((number, size)),
        np.zeros((number, size), np.int64),
        np.zeros(number, np.int64),
    )
    profile = Profile(np.zeros(size), np.zeros(size, np.int64))
    made = minimum_shares(0.0, capacity, slot, jobs, plans, profile)
    return plans, profile, *made


def _runs(plans: Plans, job: int) -> Runs:
    count = plans.runs[job]
    starts, devices = plans.starts[job, :count], plans.devices[job, :count]
    return list(zip(starts.tolist(), devices.tolist(), strict=True))


def _free(others: list[Runs], capacity: int, extra: list[float]) -> Runs:
    """Devices that plans leave free, from each time on at which that changes."""
    times = sorted({0.0, *extra, *(at for runs in others for at, _ in runs)})
    found: Runs = []
    for at in times:
        held = [[given for start, given in runs if start <= at] for runs in others]
        free = capacity - sum(each[-1] if each else 0 for each in held)
        if not found or found[-1][1] != free or at in extra:
            found.append((at, free))
    return found


def _best(jobs: Jobs, job: int, most: int, free: int) -> int:
    """Largest level up to one at which a job runs on some devices; -1 if none."""
    able = (jobs.degrees[: most + 1] <= free) & (jobs.rates[job, : most + 1] > 0)
    return int(np.flatnonzero(able)[-1]) if able.any() else -1


def _share(
    jobs: Jobs, job: int, others: list[Runs], capacity: int, slot: float
) -> Runs:
    """Plan a job after others, level by level and time by time."""
    due, left = jobs.due[job], jobs.left[job]
    until = math.ceil(due / slot - 1e-9) * slot if due > 0 else 0.0
    free = _free(others, capacity, [until] if due > 0 else [])
    ends = [at for at, _ in free[1:]] + [math.inf]
    last = [at for at, _ in free].index(until)
    level, since = jobs.levels[job] - 1, 0
    for one in range(jobs.levels[job]):
        done, at = 0.0, last
        while at > 0 and done < left:
            at -= 1
            best = _best(jobs, job, one, free[at][1])
            end = due if at == last - 1 else ends[at]
            done += (end - free[at][0]) * jobs.rates[job, best] if best >= 0 else 0.0
        if done >= left:
            level, since = one, at
            break
    found: Runs = []
    end = math.inf
    for at, (start, room) in enumerate(free):
        best = _best(jobs, job, level if at >= since else level - 1, room)
        given = int(jobs.degrees[best]) if best >= 0 else 0
        if not found or found[-1][1] != given:
            found.append((start, given))
        if best < 0:
            continue
        stop = due if at == last - 1 else ends[at]
        rate = jobs.rates[job, best]
        if left <= (stop - start) * rate:
            end = start + left / rate
            break
        left -= (stop - start) * rate
        if at == last - 1 and left <= 1e-9 * rate:
            end = due
            break
    end = math.ceil(end / slot - 1e-9) * slot
    for start, _ in free[at + 1 :]:
        if start < end and found[-1][1] != 0:
            found.append((start, 0))
    return [*found, (end, 0)]


@pytest.mark.parametrize("seed", range(8))
def test_shares_are_those_of_each_job_after_the_others(seed: int) -> None:
    jobs = _drawn(seed, 20)
    plans = _planned(jobs, 12, 1.0)[0]
    before: list[Runs] = []
    for job in range(20):
        before.append(_share(jobs, job, before, 12, 1.0))
        assert _runs(plans, job) == before[-1], job


@pytest.mark.parametrize("slot", [0.0, 1.0])
@pytest.mark.parametrize(("seed", "most"), [(0, 14), (1, 19), (2, 0), (3, 21), (4, 23)])
def test_jobs_taken_in_turn_are_those_that_each_plan_takes(
    seed: int, most: int, slot: float
) -> None:
    jobs = _drawn(seed, 40)
    # Of seed 2 a job that was promised its deadline cannot meet it any more.
    jobs = jobs._replace(due=jobs.due + 2.1, left=jobs.left / 4)
    order = np.random.default_rng(seed).permutation(40)[:25]
    kept = np.setdiff1d(np.arange(40), order)
    taken = []
    for new in order:
        trial = np.sort(np.append(kept, new))
        parts = (jobs.left, jobs.due, jobs.rates, jobs.levels)
        left, due, rates, levels = (part[trial] for part in parts)
        some = Jobs(left, due, DEGREES, rates, levels)
        taken.append(_met(some, 5, slot))
        kept = trial if taken[-1] else kept
    assert sum(taken) == most or slot
    assert taken_in_turn(0.0, 5, slot, jobs, order).tolist() == taken


@pytest.mark.parametrize("number", [20, 300])
def test_expanded_shares_leave_the_profile_that_they_say(number: int) -> None:
    jobs = _drawn(9, number)
    capacity = 2 * number
    plans, profile, count, _ = _planned(jobs, capacity, 1.0)
    before = [_runs(plans, job) for job in range(number)]
    free = int(profile.free[0])
    expand_shares(1.0, capacity, jobs, plans, profile, count, 1.0)
    after = [_runs(plans, job) for job in range(number)]
    assert after != before
    assert 0 <= profile.free[0] < free
    left = _free(after, capacity, [])
    kept = list(zip(profile.times.tolist(), profile.free.tolist(), strict=True))
    assert kept[: len(left)] == left
    assert min(devices for _, devices in left) >= 0
