"""Shifted jobs send one after the other where there is time for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import StrategyError
from planner.simulate.time_shifts import SendingCycle, best_shifts, overlap_share


@given(st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_two_jobs_with_time_for_both_never_meet(first: float, share: float) -> None:
    second = (1 - first) * share
    jobs = [
        SendingCycle(period_s=2.0, sending_s=2.0 * duty) for duty in (first, second)
    ]
    assert overlap_share(jobs, best_shifts(jobs)) == 0


def test_without_shifts_they_meet() -> None:
    jobs = [SendingCycle(period_s=1.0, sending_s=0.5)] * 2
    assert overlap_share(jobs, (0.0, 0.0)) == pytest.approx(0.5)
    assert best_shifts(jobs) == (0.0, pytest.approx(0.5))


def test_a_period_twice_as_long_fits_between() -> None:
    jobs = [
        SendingCycle(period_s=1.0, sending_s=0.5),
        SendingCycle(period_s=2.0, sending_s=0.5),
    ]
    assert overlap_share(jobs, best_shifts(jobs)) == 0


def test_what_is_too_much_meets_no_more_than_it_must() -> None:
    jobs = [SendingCycle(period_s=1.0, sending_s=0.75)] * 2
    assert overlap_share(jobs, best_shifts(jobs)) == pytest.approx(0.5, abs=0.02)


def test_bad_cycles_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"sending_s=2.0 of period_s=1.0"):
        SendingCycle(period_s=1.0, sending_s=2.0)
    with pytest.raises(StrategyError, match="1 shifts for 2 jobs"):
        overlap_share([SendingCycle(period_s=1.0, sending_s=0.5)] * 2, [0.0])
