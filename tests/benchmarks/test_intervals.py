"""The bootstrap against the normal approximation, and its strata."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import intervals
from benchmarks.intervals import Estimate, bootstrap


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    values = np.random.default_rng(1).normal(5, 2, 400)
    found = bootstrap(values, np.mean)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_strata_that_are_mixed_up_are_found() -> None:
    """Values of a stratum are equal, wherever they stand: nothing can vary."""
    strata = np.array([7, 2, 7, 9, 2, 7])
    values = np.array([1.0, 5.0, 1.0, 8.0, 5.0, 1.0])
    found = bootstrap(values, np.mean, strata=strata)
    assert (found.low, found.value, found.high) == pytest.approx((3.5, 3.5, 3.5))
    free = bootstrap(values, np.mean)
    assert free.high > 5 > 2.5 > free.low


def test_pieces_change_nothing_but_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(50.0)
    whole = bootstrap(values, np.median)
    monkeypatch.setattr(intervals, "_AT_ONCE", 120)
    assert bootstrap(values, np.median) == whole
    assert bootstrap(values, np.median, seed=1) != whole


def test_text() -> None:
    found = Estimate(value=0.1234, low=0.1, high=0.2)
    assert found.percent() == "12.3 % [10.0, 20.0]"
    assert found.plain(2) == "0.12 [0.10, 0.20]"
    nothing = bootstrap(np.zeros(0), np.mean)
    assert (nothing.percent(), nothing.plain()) == ("-", "-")
