from __future__ import annotations

import numpy as np
import pytest

from planner.cluster.fit import fit_line


def test_exact_line_is_found() -> None:
    sizes = np.array([4e3, 6e4, 1e6, 8e6])
    fixed, rate = fit_line(sizes, 2e-4 + sizes / 5e8)
    assert fixed == pytest.approx(2e-4, rel=1e-9)
    assert rate == pytest.approx(5e8, rel=1e-9)


def test_no_part_is_negative() -> None:
    sizes = np.array([1.0, 2.0, 4.0])
    assert fit_line(sizes, sizes**2)[0] == 0.0
    fixed, rate = fit_line(sizes, [3.0, 2.0, 1.0])
    assert fixed == 2.0
    assert rate == 4.0


def test_one_size_gives_a_rate_alone() -> None:
    assert fit_line([8.0, 8.0], [2.0, 2.0]) == (0.0, 4.0)


def test_small_times_count_as_much_as_large_ones() -> None:
    sizes = np.array([1e3, 1e4, 1e5, 1e9])
    times = 1e-4 + sizes / 1e9
    times[-1] *= 1.2
    assert fit_line(sizes, times)[0] == pytest.approx(1e-4, rel=0.1)
