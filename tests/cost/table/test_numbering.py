"""Numbers of equal rows against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.table.rows import number_rows


@pytest.mark.parametrize(
    ("rows", "values"), [(1, 1), (50, 3), (20_000, 5), (60_000, 200)]
)
def test_equal_rows_share_a_number_in_order_of_appearance(
    rows: int, values: int
) -> None:
    random = np.random.default_rng(rows)
    columns = [random.integers(0, values, rows) for _ in range(3)]
    first, which = number_rows(*columns)
    numbers: dict[tuple[int, ...], int] = {}
    places = []
    for index, row in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        if row not in numbers:
            numbers[row] = len(numbers)
            places.append(index)
        assert which[index] == numbers[row]
    assert first.tolist() == places


def test_columns_of_different_ranges_do_not_run_into_each_other() -> None:
    small, large = np.array([0, 1, 0, 1]), np.array([1, 0, 10**9, 1])
    assert number_rows(small, large)[1].tolist() == [0, 1, 2, 3]


def test_no_rows_have_no_numbers() -> None:
    first, which = number_rows(np.zeros(0, dtype=np.int64))
    assert len(first) == len(which) == 0
