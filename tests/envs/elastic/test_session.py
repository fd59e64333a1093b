"""Time, progress, promises, costs and failures of elastic jobs."""

from __future__ import annotations

import numpy as np
import pytest

from envs.elastic.costs import (
    EXECUTOR_RESIZE,
    Change,
    FailureLaw,
    MeasuredOverheads,
    ReshardCost,
)
from envs.elastic.pools import HostPool
from envs.elastic.session import Allocation, ElasticSession, Fate
from planner.errors import StrategyError
from tests.envs.elastic.small import session, table


def _give(*pairs: tuple[int, int], **fields: object) -> Allocation:
    jobs, degrees = zip(*pairs, strict=True) if pairs else ((), ())
    return Allocation(
        jobs=np.array(jobs, dtype=np.int64),
        degree=np.array(degrees, dtype=np.int64),
        **fields,  # type: ignore[arg-type]
    )


def _jobs(*jobs: int) -> np.ndarray:
    return np.array(jobs, dtype=np.int64)


def test_job_runs_at_the_rate_of_its_degree() -> None:
    one = session((0, 100, 30, 1))
    one.apply(_give((0, 4)))
    assert one.over
    assert one.end_s.tolist() == [10.0]
    found = one.summary()
    assert (found.met, found.blocked, found.mean_jct_s) == (1, 0.0, 10.0)
    assert found.utilisation == 1.0


def test_decisions_come_at_submissions_ends_deadlines_and_wishes() -> None:
    one = session((0, 20, 30, 1), (5, 100, 10, 1))
    one.apply(_give((0, 1), wake_s=3.0))
    assert one.now_s == 3.0
    one.apply(_give())
    assert one.now_s == 5.0
    one.apply(_give())
    assert one.now_s == 20.0  # the deadline of the first, which is late now
    assert one.summary().late == 1
    one.apply(_give((1, 1)))
    assert one.now_s == 30.0
    assert one.over


def test_resized_job_keeps_its_work() -> None:
    one = session((0, 100, 30, 1), (10, 100, 1, 1))
    one.apply(_give((0, 1)))
    assert one.left[0] == 20.0
    one.apply(_give((0, 2)))
    assert one.end_s[0] == 20.0
    assert one.summary().resizes == 2


def test_reshard_costs_restart_and_bytes() -> None:
    cost = ReshardCost(restart_s=4.0, default_bytes=8.0, bytes_per_s=2.0)
    one = session((0, 100, 30, 1), (10, 100, 1, 1), cost=cost)
    one.apply(_give((0, 1)))  # 4 s + 8 / 2 s, then 2 s of work
    assert one.left[0] == 28.0
    one.apply(_give())  # nothing changed, nothing charged
    assert one.end_s[0] == 38.0


def test_cost_of_own_executors_is_measured() -> None:
    found = EXECUTOR_RESIZE.stall_s(
        Change(("gpt2", "gpt2"), np.array([2, 4]), np.array([True, False]), 0, 4)
    )
    # 52.8 s, and 1.5 GB in two parts.
    assert found.tolist() == pytest.approx([52.8 + 1.5e9 / (2 * 8.07e7), 0.0])
    assert "2026" in EXECUTOR_RESIZE.source
    assert "assumption" in ReshardCost().source


def test_measured_overheads_are_charged_at_each_decision() -> None:
    cost = MeasuredOverheads()
    one = session((0, 100, 30, 1), (10, 100, 1, 1), cost=cost)
    one.apply(_give((0, 2)))  # 2 s + 2 (1 + 1) s, then 4 s at 2 per second
    assert one.left[0] == 22.0
    one.apply(_give())  # 2 s at every decision
    assert one.end_s[0] == 23.0


def test_slot_is_the_least_time_between_decisions() -> None:
    one = session((0, 100, 3, 1), (1, 100, 3, 1), slot_s=10.0)
    one.apply(_give((0, 1)))
    assert one.now_s == 10.0
    assert one.end_s[0] == 3.0
    assert one.alive.tolist() == [1]


def test_broken_promise_is_blocked_and_reported() -> None:
    one = session((0, 10, 30, 1), (0, 90, 30, 1))
    one.apply(_give((0, 1), (1, 1), promised=_jobs(0, 1)))
    while not one.over:
        one.apply(_give())
    found = one.summary()
    assert found.broken == ("job0",)
    assert (found.late, found.met, found.blocked) == (1, 1, 0.5)


def test_late_job_is_dropped_if_so_configured() -> None:
    one = session((0, 10, 30, 1), late="drop")
    one.apply(_give((0, 1)))
    assert one.over
    assert one.now_s == 10.0
    assert np.isnan(one.end_s[0])


def test_declined_job_is_blocked_without_being_late() -> None:
    one = session((0, 10, 5, 1), (1, 20, 5, 1))
    one.apply(_give(declined=_jobs(0)))
    one.apply(_give((1, 1)))
    found = one.summary()
    assert (found.declined, found.late, found.blocked) == (1, 0, 0.5)
    assert one.fate.tolist() == [Fate.DECLINED, Fate.DONE]


def test_job_that_is_declined_after_its_deadline_is_blocked_once() -> None:
    one = session((0, 10, 30, 1), (20, 100, 10, 1))
    one.apply(_give())
    assert one.now_s == 10.0
    one.apply(_give(declined=_jobs(0)))
    one.apply(_give((1, 1)))
    found = one.summary()
    assert (found.declined, found.late, found.blocked) == (1, 0, 0.5)


def test_job_that_is_never_run_is_late() -> None:
    one = session((0, 10, 5, 1))
    while not one.over:
        one.apply(_give())
    assert one.summary().late == 1


def test_types_have_their_own_rates() -> None:
    source = table({"new": (2.0, 4.0, 8.0), "old": (1.0, 0.0, 0.0)})
    cluster = (
        HostPool(kind="new", hosts=1, devices=4),
        HostPool(kind="old", hosts=1, devices=4),
    )
    one = session((0, 100, 32, 1), source=source, cluster=cluster)
    one.apply(_give((0, 4), kind=_jobs(0)))
    assert one.end_s[0] == 4.0
    one.begin()
    with pytest.raises(StrategyError, match=r"2 old for job job0 \(net/64\)"):
        one.apply(_give((0, 2), kind=_jobs(1)))


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (_give((0, 4), (1, 1)), "5 more gpu for jobs where 4 are free"),
        (_give((0, 3)), "3 gpu for job job0"),
        (_give((2, 1)), "job job2 is AHEAD"),
        (_give(promised=_jobs(2)), "job job2 is AHEAD; only a WAITING job"),
    ],
)
def test_bad_decisions(decision: Allocation, message: str) -> None:
    one = session((0, 99, 5, 1), (0, 99, 5, 1), (50, 99, 5, 1))
    with pytest.raises(StrategyError, match=message):
        one.apply(decision)


def test_end_of_the_episode() -> None:
    one = session((0, 10, 5, 1))
    one.apply(_give((0, 1)))
    with pytest.raises(StrategyError, match="call begin"):
        one.apply(_give())


def test_cluster_that_no_number_of_devices_suits() -> None:
    source = table({"gpu": (0.0, 0.0, 3.0)})
    small = (HostPool(kind="gpu", hosts=1, devices=2),)
    with pytest.raises(StrategyError, match=r"job job0 .* a cluster of 2 has; give a"):
        session((0, 10, 5, 1), source=source, cluster=small)


@pytest.mark.parametrize(
    "fields", [{"slot_s": -1.0}, {"late": "never"}, {"slot_s": float("nan")}]
)
def test_bad_configurations(fields: dict[str, object]) -> None:
    with pytest.raises(StrategyError, match=next(iter(fields))):
        session((0, 10, 5, 1), **fields)
    with pytest.raises(StrategyError, match=r"repair_s=0\.0 of failures"):
        FailureLaw(repair_s=0.0)
    with pytest.raises(StrategyError, match=r"bytes_per_s=0\.0"):
        ReshardCost(bytes_per_s=0.0)
    with pytest.raises(StrategyError, match="restart_s=nan"):
        ReshardCost(restart_s=float("nan"))
    with pytest.raises(StrategyError, match=r"checkpoint_bytes=\{'net': -1.0\}"):
        ReshardCost(checkpoint_bytes={"net": -1.0})


def _run_with_failures(seed: int, checkpoint_s: float) -> ElasticSession:
    law = FailureLaw(mean_s=400.0, repair_s=20.0, checkpoint_s=checkpoint_s)
    one = session((0, 1e6, 900, 4), failures=law)
    one.begin(seed)
    while not one.over:
        degree = int(one.degrees[one.degrees <= one.capacity[0]][-1])
        one.apply(_give((0, degree)))
        assert one.room.free.min() >= 0
    return one


def test_failures_lose_the_work_since_the_last_checkpoint() -> None:
    often, seldom = (_run_with_failures(3, length) for length in (1.0, 1e6))
    assert often.summary().failures > 0
    assert 300.0 < often.end_s[0] < seldom.end_s[0]
    again = _run_with_failures(3, 1e6)
    assert again.end_s[0] == seldom.end_s[0]
