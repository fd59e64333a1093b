from __future__ import annotations

import numpy as np
import pytest

from planner.errors import StrategyError, UnknownNameError
from planner.schema.schedules import schedule_names, schedule_spec
from planner.simulate import (
    actions,
    bubble_coefficients,
    closed_form_makespan,
    closed_form_of_stages,
    makespan,
)
from tests.simulate.cases import legal, violation


def _uniform_makespan(
    case: tuple[str, int, int, int], compute: np.ndarray, sends: np.ndarray
) -> np.ndarray:
    table = actions(*case)
    every = np.ones(table.num_stages)
    return makespan(
        table,
        *(column[:, None] * every for column in compute.T),
        *(column[:, None] * every[1:] for column in sends.T),
    )


def _ratios(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """f : b : w from 1 : 3 to 3 : 1, some without w; sends up to half of either."""
    rng = np.random.default_rng(seed)
    compute = 9.0 ** (rng.uniform(-0.5, 0.5, (40, 3)))
    compute[:8] = 1.0
    compute[8:16, 2] = 0.0
    sends = rng.uniform(0.0, 0.5, (40, 2))
    sends[::2] = 0.0
    return compute, sends


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_eager_1f1b_takes_as_long_as_1f1b_and_hides_transfers(pp: int) -> None:
    """Without transfers; with them, one of a fill each way is all that is seen."""
    many = 4 * pp
    plain = closed_form_makespan("1F1B", pp, 1, many, 1.0, 2.0)
    assert closed_form_makespan("Eager1F1B", pp, 1, many, 1.0, 2.0) == plain
    sends = (0.0, 0.5, 0.5)
    hidden = closed_form_makespan("Eager1F1B", pp, 1, many, 1.0, 2.0, *sends)
    assert hidden == plain + 2 * (pp - 1) * 0.5
    assert closed_form_makespan("1F1B", pp, 1, many, 1.0, 2.0, *sends) > hidden


@pytest.mark.parametrize("schedule", schedule_names())
def test_agrees_with_the_engine_within_one_percent(schedule: str) -> None:
    cases = legal((1, 2, 3, 4, 8), (1, 2, 3), (1, 5, 8, 24, 96))
    cases = [case for case in cases if case[0] == schedule]
    assert len(cases) >= 10
    for seed, case in enumerate(cases):
        compute, sends = _ratios(seed)
        exact = _uniform_makespan(case, compute, sends)
        found = closed_form_makespan(*case, *compute.T, *sends.T)
        np.testing.assert_allclose(found, exact, rtol=1e-2, err_msg=str(case))
        assert (found <= exact * (1 + 1e-9)).all(), case


@pytest.mark.parametrize("case", legal((16,), (1, 2), (128,)))
def test_agrees_at_the_size_of_a_real_pipeline(
    case: tuple[str, int, int, int],
) -> None:
    compute, sends = _ratios(7)
    exact = _uniform_makespan(case, compute, sends)
    found = closed_form_makespan(*case, *compute.T, *sends.T)
    np.testing.assert_allclose(found, exact, rtol=1e-3)


def test_textbook_sums() -> None:
    for schedule in ("GPipe", "1F1B"):
        assert closed_form_makespan(schedule, 4, 1, 16, 1.0, 2.0) == 19 * 3.0
    interleaved = closed_form_makespan("Interleaved1F1B", 4, 2, 16, 0.5, 1.0)
    assert interleaved == pytest.approx((16 + 3 / 2) * 3.0)
    np.testing.assert_array_equal(
        bubble_coefficients("GPipe", 4, 1, 16), [[19, 19, 19, 3, 3]]
    )


@pytest.mark.parametrize("case", legal((2, 4), (1, 2, 4), (600,)))
def test_many_microbatches_are_extrapolated(case: tuple[str, int, int, int]) -> None:
    compute, sends = _ratios(11)
    exact = _uniform_makespan(case, compute, sends)
    found = closed_form_makespan(*case, *compute.T, *sends.T)
    np.testing.assert_allclose(found, exact, rtol=1e-3)


@pytest.mark.parametrize("count", [63, 127, 143, 255])
def test_counts_in_uneven_rounds_are_read_as_they_are(count: int) -> None:
    """255 over 16 ranks are 15 equal rounds; some smaller counts are refused."""
    case = ("Interleaved1F1B", 16 if count == 255 else 8, 2, count)
    if violation(*case) is not None:
        with pytest.raises(StrategyError):
            closed_form_makespan(*case, 1.0, 2.0)
        return
    compute, sends = _ratios(12)
    exact = _uniform_makespan(case, compute, sends)
    found = closed_form_makespan(*case, *compute.T, *sends.T)
    np.testing.assert_allclose(found, exact, rtol=1e-3)


def test_mixed_strategies_equal_single_ones() -> None:
    rng = np.random.default_rng(0)
    cases = legal((2, 4), (1, 2), (8, 16))
    chosen = [cases[i] for i in rng.integers(0, len(cases), 200)]
    names, pp, virtual, microbatches = (
        np.array(column) for column in zip(*chosen, strict=True)
    )
    times = rng.uniform(0.1, 1.0, (5, 200))
    by_name = closed_form_makespan(names, pp, virtual, microbatches, *times)
    codes = np.array([schedule_spec(name).code for name in names.tolist()])
    by_code = closed_form_makespan(codes, pp, virtual, microbatches, *times)
    np.testing.assert_array_equal(by_name, by_code)
    for index in range(0, 200, 10):
        alone = closed_form_makespan(*chosen[index], *times[:, index])
        assert alone == by_name[index]


def test_arguments_broadcast() -> None:
    forward = np.linspace(1, 2, 5)
    found = closed_form_makespan("1F1B", np.array([[2], [4]]), 1, 8, forward, 1.0)
    expected = (8 + np.array([[2], [4]]) - 1) * (forward + 1.0)
    np.testing.assert_allclose(found, expected)


def test_uneven_1f1b_is_at_most_sum_plus_slowest() -> None:
    rng = np.random.default_rng(2)
    forward, backward = rng.uniform(1, 2, (2, 50, 4))
    found = closed_form_of_stages("1F1B", 4, 1, 32, forward, backward)
    work = forward + backward
    textbook = work.sum(axis=1) + 31 * work.max(axis=1)
    assert (found <= textbook * (1 + 1e-12)).all()
    exact = makespan(actions("1F1B", 4, 1, 32), forward, backward)
    assert np.abs(found / exact - 1).max() < 0.01
    assert np.abs(textbook / exact - 1).max() > 0.02


def test_uneven_stages_use_the_mean_transfer_between_ranks() -> None:
    sends = np.array([0.1, 9.0, 0.3])
    found = closed_form_of_stages(
        "ZBVZeroBubble", 2, 2, 8, np.ones(4), np.ones(4), np.ones(4), sends, sends
    )
    expected = closed_form_makespan("ZBVZeroBubble", 2, 2, 8, 1.0, 1.0, 1.0, 0.2, 0.2)
    assert found == pytest.approx(float(expected))


def test_bad_names_and_combinations_are_errors() -> None:
    with pytest.raises(UnknownNameError, match="1F1B"):
        closed_form_makespan("1F1", 2, 1, 4, 1.0, 1.0)
    assert violation("1F1B", 4, 1, 2) is not None
    with pytest.raises(StrategyError, match="num_microbatches=2"):
        closed_form_makespan("1F1B", [2, 4], 1, 2, 1.0, 1.0)
