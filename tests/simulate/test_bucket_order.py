"""Buckets that the next forward needs first are summed first, and none gets lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import StrategyError
from planner.simulate.bucket_order import (
    bucket_ends,
    first_layer_wait_s,
    next_forward_wait_s,
)


def test_first_layers_wait_less() -> None:
    filled, sums = [1.0, 2.0, 3.0], [4.0, 4.0, 4.0]
    # 1 to 5, 5 to 9, 9 to 13; else the first bucket's two rounds, then the last's.
    assert bucket_ends(filled, sums, "filled", 2).tolist() == [5.0, 9.0, 13.0]
    assert bucket_ends(filled, sums, "needed", 2).tolist() == [13.0, 11.0, 7.0]
    assert first_layer_wait_s(filled, sums, "filled", 2) == 10.0
    assert first_layer_wait_s(filled, sums, "needed", 2) == 4.0


def test_the_next_forward_waits_for_what_it_needs() -> None:
    filled, sums = [1.0, 2.0, 3.0], [4.0, 4.0, 4.0]
    # Summed at 5, 13 and 9; the last layers are wanted last, and wait least.
    assert bucket_ends(filled, sums, "needed").tolist() == [5.0, 13.0, 9.0]
    assert next_forward_wait_s(filled, sums, [2.0, 1.0, 0.0]) == 9.0
    assert next_forward_wait_s(filled, sums, [40.0, 20.0, 0.0]) == 6.0
    assert next_forward_wait_s(filled, sums, [40.0, 20.0, 10.0]) == 0.0


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 5)), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_the_channel_is_as_busy_in_either_order(
    buckets: list[tuple[float, float]], rounds: int
) -> None:
    filled = np.sort([one for one, _ in buckets]).tolist()
    sums = [seconds for _, seconds in buckets]
    first = bucket_ends(filled, sums, "filled", rounds)
    other = bucket_ends(filled, sums, "needed", rounds)
    assert first.max() == pytest.approx(other.max())
    assert (other >= np.array(filled) + np.array(sums) - 1e-9).all()
    assert other[-1] <= first[-1] + 1e-9


def test_a_bucket_without_a_sum_is_refused() -> None:
    with pytest.raises(StrategyError, match="2 buckets, 1 sums"):
        bucket_ends([0.0, 1.0], [1.0], "filled")
