from __future__ import annotations

import numpy as np
import pytest

from planner.errors import StrategyError
from planner.simulate import actions, peak_activation_bytes, peak_in_flight
from tests.simulate import reference
from tests.simulate.cases import legal


@pytest.mark.parametrize("case", legal((1, 2, 3, 4, 6), (1, 2, 3), (1, 6, 12, 13)))
@pytest.mark.parametrize("freed", [0.0, 0.4, 1.0])
def test_peak_is_that_of_walking_the_order(
    case: tuple[str, int, int, int], freed: float
) -> None:
    table = actions(*case)
    sizes = np.random.default_rng(3).uniform(1, 9, (2, 3, table.num_stages))
    found = peak_activation_bytes(table, sizes, freed_by_input=freed)
    assert found.shape == (2, 3, table.pp)
    for index in np.ndindex(2, 3):
        expected = reference.held_bytes(table, sizes[index], freed)
        np.testing.assert_allclose(found[index], expected)


def test_gpipe_holds_all_and_1f1b_as_many_as_stages_follow() -> None:
    assert peak_in_flight(actions("GPipe", 4, 1, 16)).tolist() == [16] * 4
    assert peak_in_flight(actions("1F1B", 4, 1, 16)).tolist() == [4, 3, 2, 1]


def test_interleaving_holds_more_than_1f1b() -> None:
    # Warm-up of rank 0: (v - 1) pp + 2 (pp - 1) forwards, plus the one in hand.
    table = actions("Interleaved1F1B", 4, 2, 16)
    assert peak_activation_bytes(table, 1.0)[0] == 4 + 2 * 3 + 1


def test_zero_bubble_v_holds_two_for_each_rank_on_every_rank() -> None:
    found = peak_activation_bytes(actions("ZBVZeroBubble", 4, 2, 32), 0.5)
    np.testing.assert_allclose(found, 4.0)


def test_sizes_must_fit() -> None:
    table = actions("1F1B", 4, 1, 8)
    with pytest.raises(StrategyError, match="4 virtual stages"):
        peak_activation_bytes(table, [1.0, 2.0])
    with pytest.raises(StrategyError, match="freed_by_input=2"):
        peak_activation_bytes(table, 1.0, freed_by_input=2)
