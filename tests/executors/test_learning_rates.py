"""Learning rates: values at the steps that tell schedules apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executors import learning_rate
from executors.learning_rates import Schedule
from planner.errors import ExecutionError


def _rates(schedule: Schedule, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = learning_rate(schedule, steps=11, **options)(optimizer)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", [1] * 11),
        ("linear", [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0]),
        ("wsd", [1] * 10 + [0]),
    ],
)
def test_rates_without_a_warm_up(schedule: Schedule, wanted: list[float]) -> None:
    assert _rates(schedule) == pytest.approx(wanted, abs=1e-12)


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_lowest() -> None:
    rates = _rates("cosine", lowest=0.1)
    assert (rates[0], rates[5], rates[10]) == pytest.approx((1.0, 0.55, 0.1))


def test_a_warm_up_rises_to_the_whole_rate() -> None:
    rates = _rates("linear", warm_up_steps=4)
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert rates[-1] == pytest.approx(0)


@pytest.mark.parametrize(
    ("schedule", "options", "said"),
    [
        ("square", {}, "none of constant, linear, cosine, wsd"),
        ("cosine", {"warm_up_steps": 11}, "warm_up_steps=11 of steps=11"),
        ("cosine", {"lowest": 2.0}, "lowest=2; give a share"),
    ],
)
def test_bad_numbers_are_refused(
    schedule: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ExecutionError, match=said):
        _rates(schedule, **options)
