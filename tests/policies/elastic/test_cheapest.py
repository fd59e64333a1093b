"""The scheduler that lets jobs wait: what it promises, and whom it takes."""

from __future__ import annotations

import numpy as np
import pytest

from envs.elastic.costs import FreeResize, ReshardCost
from envs.elastic.pools import HostPool
from envs.elastic.session import ElasticSession, Fate
from policies.elastic.cheapest import CheapestFirst, Order, _rows, fluid_order
from policies.elastic.promises import Needs
from policies.elastic.registry import make_rule, play
from tests.envs.elastic.small import session, table

_STALL = ReshardCost(restart_s=3.0, default_bytes=8.0, bytes_per_s=4.0)


def _stream(seed: int, jobs: int = 60, **options: object) -> ElasticSession:
    """A crowded stream on four hosts of four devices, with bursts."""
    random = np.random.default_rng(seed)
    submit = np.sort(np.round(random.uniform(0, 300, jobs) / 20.0) * 20.0)
    return session(
        *(
            (at, at + random.uniform(20, 200), random.uniform(20, 300), 1)
            for at in submit
        ),
        source=table({"gpu": (1.0, 1.9, 3.4, 5.0)}, degrees=(1, 2, 4, 8)),
        **{
            "cluster": (HostPool(kind="gpu", hosts=4, devices=4),),
            "cost": _STALL,
            **options,
        },
    )


def _drawn_order(seed: int):  # type: ignore[no-untyped-def]
    """An order as bad as chance makes it, as an untrained network could give."""
    random = np.random.default_rng(seed)

    def choose(needs: Needs) -> Order:
        waiting = np.flatnonzero(needs.undecided)
        kept = random.permutation(waiting)[: random.integers(len(waiting) + 1)]
        declined = needs.undecided & (random.random(len(needs.jobs)) < 0.05)
        return Order(kept, declined, random.exponential(size=len(needs.jobs)))

    return choose


@pytest.mark.parametrize("seed", range(12))
def test_no_promise_is_broken_whatever_the_order(seed: int) -> None:
    """Restarts and moves cost time here, and no job that was promised is late."""
    one = _stream(seed)
    play(one, CheapestFirst(_drawn_order(seed)))
    found = one.summary()
    assert found.broken == ()
    assert found.late == 0
    assert found.met + found.declined == 60
    assert found.resizes > found.met > 10


def test_no_promise_is_broken_where_slots_delay_decisions() -> None:
    for seed in range(4):
        one = _stream(seed, slot_s=10.0)
        play(one, make_rule("cheapest-first"))
        assert one.summary().broken == ()


@pytest.mark.parametrize("slot_s", [0.0, 10.0])
def test_to_follow_the_rows_is_always_safe(slot_s: float) -> None:
    """After each decision, whatever came, all promised jobs can end in time."""
    one = _stream(3, slot_s=slot_s)
    one.begin()
    rule = CheapestFirst()
    paused = 0
    while not one.over:
        one.apply(rule.decide(one))
        rows = _rows(rule._needs(one), slot_s)
        promised = one.fate[one.alive] == Fate.PROMISED
        assert (rows.level[promised] >= 0).all()
        assert rows.hold(before=True)
        assert np.isfinite(rows.due_s).all()
        paused += int((one.degree[one.alive[promised]] == 0).sum())
    assert paused > 10


def test_a_promised_job_pauses_for_one_that_cannot_wait() -> None:
    # Alone each takes 10 s on all devices; the first has time for that, and a restart.
    slow = table({"gpu": (0.0, 0.0, 3.0)})
    cost = ReshardCost(restart_s=2.0, default_bytes=0.0)
    jobs = ((0.0, 30.0, 30.0, 4), (3.0, 16.0, 30.0, 4))
    one = session(*jobs, source=slow, cost=cost)
    play(one, make_rule("cheapest-first"))
    # 2 s start and 1 s work, then 12 s of the other, then 2 s restart and 9 s work.
    assert one.end_s.tolist() == [26.0, 15.0]
    tight = session((0.0, 25.0, 30.0, 4), jobs[1], source=slow, cost=cost)
    play(tight, make_rule("cheapest-first"))
    assert tight.fate.tolist() == [Fate.DONE, Fate.DECLINED]


def test_no_promised_job_pauses_where_sizes_do_not_pack() -> None:
    """Hosts of three devices: nothing tells that a paused job finds a place again."""
    one = _stream(1, cluster=(HostPool(kind="gpu", hosts=5, devices=3),))
    one.begin()
    rule = make_rule("cheapest-first")
    while not one.over:
        one.apply(rule.decide(one))
        here = one.alive[one.fate[one.alive] == Fate.PROMISED]
        assert (one.degree[here] > 0).all()
    assert one.summary().broken == ()


def test_fewer_are_blocked_than_by_elasticflow() -> None:
    blocked = {}
    for rule in ("cheapest-first", "elasticflow"):
        found = []
        for seed in range(6):
            one = _stream(seed)
            play(one, make_rule(rule))
            found.append(one.summary().blocked)
        blocked[rule] = float(np.mean(found))
    assert blocked["cheapest-first"] < 0.8 * blocked["elasticflow"]


def test_a_burst_is_met_but_for_its_largest_job() -> None:
    # Four devices, 10 s: three jobs of 10 device-seconds and one of 40, in vain.
    one = session((0, 10.1, 20, 4), *((0.0, 10.1, 9.9, 1),) * 3)
    play(one, make_rule("cheapest-first"))
    assert one.fate.tolist() == [Fate.DECLINED, Fate.DONE, Fate.DONE, Fate.DONE]


def test_a_job_waits_within_its_slack() -> None:
    # Both need all four devices; the second can begin when the first has ended.
    one = session((0, 10.1, 30, 4), (0, 20.5, 30, 4))
    play(one, make_rule("cheapest-first"))
    assert one.summary().met == 2
    assert one.end_s.tolist() == [10.0, 20.0]


def test_a_job_is_turned_away_before_its_deadline_passes() -> None:
    one = session((0, 10.1, 30, 4), (0, 15.0, 30, 4))
    play(one, make_rule("cheapest-first"))
    found = one.summary()
    assert (found.met, found.declined, found.late) == (1, 1, 0)


def test_fluid_order_leaves_out_the_most_expensive() -> None:
    seen: list[Needs] = []

    def look(needs: Needs) -> Order:
        seen.append(needs)
        return fluid_order(needs)

    one = session((0, 12, 8, 1), (0, 10, 25, 4), (0, 11, 8, 1), (0, 11.5, 8, 1))
    CheapestFirst(look).decide(one)
    found = fluid_order(seen[0])
    # By deadline: 1, 2, 3, 0; 36 of 40 device-seconds go to job 1, so it is left out.
    assert found.first.tolist()[-1] == 1
    assert sorted(found.first.tolist()) == [0, 1, 2, 3]


def test_same_stream_same_decisions() -> None:
    ends = []
    for _ in range(2):
        one = _stream(5)
        play(one, make_rule("cheapest-first"))
        ends.append(one.end_s.tobytes())
    assert ends[0] == ends[1]


def test_free_devices_go_to_running_jobs() -> None:
    one = session((0, 100, 30, 1), cost=FreeResize())
    decision = make_rule("cheapest-first").decide(one)
    assert decision.degree.tolist() == [4]
    assert decision.promised.tolist() == [0]
