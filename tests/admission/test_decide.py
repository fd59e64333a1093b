"""Decisions on jobs with deadlines, worked out by hand."""

from __future__ import annotations

import random

import pytest

import planner
from planner.admission import admit, guarantee_violations, reschedule
from planner.errors import StrategyError, UnknownNameError
from planner.schema.admission import (
    AdmissionDecision,
    ClusterState,
    OccupiedDevices,
    StateHost,
    StateJob,
)
from tests.admission.small import request, running, state, table


def test_a_job_gets_the_fewest_device_seconds_that_meet_its_deadline() -> None:
    # 10 s of start and 100 iterations at 1, 2 or 3 a second: 110, 60 or 43.3 s.
    for deadline, degree, end in ((120.0, 1, 110.0), (100.0, 2, 60.0)):
        made = planner.admit(request("new", 100, deadline), state())
        (segment,) = made.reservation("new").segments
        assert made.admitted
        assert segment.degree == degree
        assert made.promise.finish_s == pytest.approx(end)
        assert made.promise.slack_s == pytest.approx(deadline - end)
    first = planner.admit(request("new", 100, 120.0), state(), prefer="finish")
    assert first.promise.finish_s == pytest.approx(10 + 100 / 3)


def test_what_no_schedule_can_do_is_declined_with_proof() -> None:
    made = admit(request("new", 100, 40.0), state())
    assert (made.admitted, made.proven) == (False, True)
    assert (
        "needs 43.3333 s at the least, and its deadline is in 40 s" in made.reasons[0]
    )
    # Alone it would do; with 4 x 100 s promised there are not enough device-seconds.
    full = state(running("old", 290, 100.0, h0=4))
    made = admit(request("new", 120, 100.0), full)
    assert (made.admitted, made.proven) == (False, True)
    assert made.cause == "load"
    assert "device-seconds at the least, and there are 400" in made.reasons[0]


def test_a_running_job_is_resized_for_a_new_one_and_keeps_its_promise() -> None:
    made = admit(request("new", 100, 80.0), state(running("old", 250, 400.0, h0=4)))
    assert made.admitted
    # 4 devices go to the new one at most till 80 s; the old one pays for each change.
    first = next(each for each in made.changes if each.job == "old")
    assert first.kind in ("resized", "paused")
    assert first.reason == "its devices are needed by new, due by a deadline"
    old = made.reservation("old")
    assert old.promised
    assert old.finish_s <= 400.0
    kept = [each for each in old.segments if each.stall_s > 0]
    assert all(each.stall_s == 10 + 20 / each.degree for each in kept)


def test_without_need_nothing_changes() -> None:
    made = admit(
        request("new", 100, 200.0), state(running("old", 250, 400.0, h0=2), hosts=1)
    )
    assert made.admitted
    assert made.changes == ()


def test_a_job_that_is_not_elastic_is_left_alone() -> None:
    old = running("old", 250, 400.0, h0=4)
    old = old.model_copy(
        update={"request": old.request.model_copy(update={"elastic": False})}
    )
    made = admit(request("new", 100, 80.0), state(old))
    assert not made.admitted
    assert made.changes == ()


def test_a_job_without_deadline_gives_way() -> None:
    made = admit(request("new", 100, 60.0), state(running("free", 1000, None, h0=4)))
    assert made.admitted
    assert made.changes[0].job == "free"
    assert made.reservation("free").promised is False


def test_occupied_devices_come_back_when_they_should() -> None:
    busy = (OccupiedDevices(name="other", devices={"h0": 4}, until_s=50.0),)
    made = admit(request("new", 100, 120.0), state(occupied=busy))
    assert made.reservation("new").segments[0].start_s == 50.0
    for_ever = (OccupiedDevices(name="other", devices={"h0": 4}),)
    assert not admit(request("new", 100, 120.0), state(occupied=for_ever)).admitted


def test_others_may_hold_devices_of_a_host_that_is_down() -> None:
    busy = (OccupiedDevices(name="other", devices={"h0": 2}, until_s=50.0),)
    down = tuple(
        StateHost(name=name, device="gpu", devices=4, down=count)
        for name, count in (("h0", 4), ("h1", 0))
    )
    both = state(hosts=2, occupied=busy).model_copy(update={"hosts": down})
    made = admit(request("new", 100, 120.0), both)
    assert set(made.reservation("new").segments[0].devices) == {"h1"}
    held = state(running("old", 250, 400.0, h0=2), hosts=2, occupied=busy)
    made = reschedule(held.model_copy(update={"hosts": down}))
    assert set(made.reservation("old").segments[0].devices) == {"h1"}


def test_a_job_is_spread_only_where_there_is_a_throughput_for_it() -> None:
    held = (OccupiedDevices(name="other", devices={"h0": 2, "h1": 2}),)
    new = request("new", 290, 110.0, min_degree=4)
    assert not admit(new, state(hosts=2, occupied=held)).admitted
    throughputs = table(spread=0.99)
    two = state(hosts=2, occupied=held, throughputs=throughputs)
    made = admit(new, two)
    (segment,) = made.reservation("new").segments
    assert segment.devices == {"h0": 2, "h1": 2}
    assert segment.iterations_per_s == pytest.approx(2.97)


def test_a_margin_is_kept() -> None:
    job = request("new", 100, 61.0, max_degree=2)
    assert admit(job, state()).admitted
    assert not admit(job, state(rate_margin=0.1)).admitted


def test_a_promise_that_a_failure_breaks_is_told() -> None:
    down = (StateHost(name="h0", device="gpu", devices=4, down=3),)
    old = running("old", 290, 100.0)
    made = reschedule(state(old, hosts=1).model_copy(update={"hosts": down}))
    assert "3 devices are down" in made.broken["old"]
    # It still gets what there is.
    assert made.reservation("old").segments[0].degree == 1


@pytest.mark.parametrize(
    ("job", "kind", "said"),
    [
        (request("new", 9, 90, model="nett"), UnknownNameError, "did you mean 'net'?"),
        (request("new", 9, 90, batch=4), StrategyError, "with batch 8; give one"),
        (
            request("new", 9, 90, devices=("tpu",)),
            UnknownNameError,
            "did you mean 'gpu'",
        ),
        (request("new", 9, 90, min_degree=8), StrategyError, "the cluster has (4 gpu)"),
        (request("old", 9, 90), StrategyError, "give the new one another name"),
        (
            request("new", 9, 900, submitted_s=500.0),
            StrategyError,
            "submitted_s=500, which is 500 s after now_s=0 of the state; decide when",
        ),
    ],
)
def test_contradictions_are_refused(job, kind, said: str) -> None:
    with pytest.raises(kind) as caught:
        admit(job, state(running("old", 10, 400.0, h0=1)))
    assert said in str(caught.value)


def test_two_sources_are_refused() -> None:
    with pytest.raises(StrategyError, match="a decision takes one, leave one out"):
        admit(request("new", 9, 90), state(), throughputs=table(spread=0.5))


def test_the_check_finds_what_is_wrong() -> None:
    made = admit(request("new", 100, 80.0), state(running("old", 250, 400.0, h0=4)))
    full = state(running("old", 250, 400.0, h0=4))
    jobs = (
        *full.jobs,
        StateJob(request=request("new", 100, 80.0), iterations_left=100, promised=True),
    )

    def wrong(**changed: object) -> str:
        new = made.reservation("new")
        (segment,) = new.segments
        bad = new.model_copy(update={"segments": (segment.model_copy(update=changed),)})
        others = tuple(each for each in made.schedule if each.job != "new")
        return " ".join(
            guarantee_violations(full, full.throughputs, (*others, bad), jobs)
        )

    (segment,) = made.reservation("new").segments
    assert wrong() == ""
    assert "pays 0 s of 10 s" in wrong(stall_s=0.0)
    assert "after its deadline" in wrong(end_s=90.0)
    assert "iterations/s on" in wrong(iterations_per_s=9.0)
    assert "of 100 iterations" in wrong(end_s=segment.end_s - 10)
    assert "has no throughput on 3 gpu" in wrong(degree=3)
    assert "which has passed" in wrong(start_s=-5.0)


def _later(made: AdmissionDecision, before: ClusterState, now: float) -> list[StateJob]:
    """Jobs as they are when a schedule has been followed to a time."""
    found = []
    for job in before.jobs:
        given = made.reservation(job.request.name)
        left, devices, stall, started = job.iterations_left, {}, 0.0, job.started
        for each in given.segments:
            if each.start_s >= now:
                break
            since = max(each.start_s + each.stall_s, before.now_s)
            left -= max(0.0, min(each.end_s, now) - since) * each.iterations_per_s
            started = True
            if each.end_s > now:
                devices, stall = (
                    each.devices,
                    max(0.0, each.start_s + each.stall_s - now),
                )
        if given.segments and given.segments[-1].end_s <= now:
            assert left < 1e-4 * job.request.iterations
            continue
        found.append(
            job.model_copy(
                update={
                    "iterations_left": max(left, 1e-9),
                    "devices": devices,
                    "stall_s": stall,
                    "started": started,
                }
            )
        )
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_all_promises_are_kept_while_jobs_come(seed: int) -> None:
    draw, now = random.Random(seed), 0.0
    at = state(hosts=2, throughputs=table(spread=0.7))
    made = reschedule(at)
    declined = 0
    for number in range(60):
        now += draw.expovariate(1 / 60)
        jobs = _later(made, at, now)
        size = draw.uniform(20, 400)
        due = now + (15 + size / 3) * draw.uniform(0.8, 3)
        job = request(
            f"j{number}",
            size,
            due if draw.random() < 0.85 else None,
            submitted_s=now,
            elastic=draw.random() < 0.8,
        )
        known = {job.request.name for job in jobs}
        at = at.model_copy(
            update={
                "now_s": now,
                "jobs": tuple(jobs),
                "reservations": tuple(r for r in made.schedule if r.job in known),
            }
        )
        at = ClusterState.from_data(at.to_data())
        made = admit(job, at)
        assert made.broken == {}
        declined += not made.admitted
        if made.admitted:
            jobs.append(
                StateJob(
                    request=job,
                    iterations_left=size,
                    promised=made.promise is not None,
                )
            )
        at = at.model_copy(update={"jobs": tuple(jobs)})
    assert 5 < declined < 40


def test_times_since_1970_are_close_enough() -> None:
    now = 1.8e9 + 0.123
    job = running("old", 1e-4, now + 60, h0=4)
    at = state(job, now_s=now)
    assert guarantee_violations(at, at.throughputs, reschedule(at).schedule) == ()


def test_what_was_planned_before_is_no_change() -> None:
    busy = (OccupiedDevices(name="other", devices={"h0": 4}, until_s=50.0),)
    first = admit(request("one", 100, 120.0), state(occupied=busy))
    one = StateJob(
        request=request("one", 100, 120.0), iterations_left=100, promised=True
    )
    at = state(one, occupied=busy)
    assert [c.kind for c in admit(request("two", 9, 300.0), at).changes] == ["started"]
    kept = at.model_copy(update={"reservations": first.schedule})
    assert admit(request("two", 9, 300.0), kept).changes == ()
