from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from planner.errors import StrategyError
from planner.schema.schedules import schedule_spec
from planner.simulate import (
    actions,
    peak_activation_bytes,
    peak_counts,
    peak_held_bytes,
    peak_in_flight,
)
from tests.simulate import reference
from tests.simulate.cases import legal
from tests.simulate.torch_orders import torch_order

CASES = legal((1, 2, 3, 4, 6), (1, 2, 3), (1, 6, 12, 13))
SPLIT = [case for case in CASES if schedule_spec(case[0]).splits_backward]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("freed", [0.0, 0.4, 1.0])
def test_activations_are_those_of_walking_the_order(
    case: tuple[str, int, int, int], freed: float
) -> None:
    table = actions(*case)
    sizes = np.random.default_rng(3).uniform(1, 9, (2, 1, table.num_stages))
    found = peak_activation_bytes(table, sizes, freed_by_input=freed)
    assert found.shape == (2, 1, table.pp)
    for index in np.ndindex(2, 1):
        one = sizes[index]
        expected = reference.held_bytes(
            table, np.stack([one, one * (1 - freed), 0 * one, 0 * one])
        )
        np.testing.assert_allclose(found[index], expected)


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_all_phases_are_those_of_walking_the_order(
    case: tuple[str, int, int, int],
) -> None:
    table = actions(*case)
    sizes = np.random.default_rng(4).uniform(1, 9, (2, 4, table.num_stages))
    found = peak_held_bytes(
        table,
        sizes[:, 0],
        sizes[:, 1],
        after_split_bytes=sizes[:, 2],
        after_whole_bytes=sizes[:, 3],
    )
    expected = [reference.held_bytes(table, one) for one in sizes]
    np.testing.assert_allclose(found, expected)


def _torch_counts(case: tuple[str, int, int, int]) -> dict[str, list[int]]:
    """Peaks of forwards without backward, of halves, of both; by torch's tables."""
    found: dict[str, list[int]] = {"forward": [], "split": [], "both": []}
    for order in torch_order(*case).values():
        count: Counter[str] = Counter()
        peak: Counter[str] = Counter()
        text = " ".join(order).replace("(", " ").replace(")OVERLAP_F_B", " ")
        for action in text.replace(";", " ").split():
            letter = action.strip("0123456789")
            count["forward"] += {"F": 1, "B": -1, "I": -1}.get(letter, 0)
            count["split"] += {"I": 1, "W": -1}.get(letter, 0)
            count["both"] = count["forward"] + count["split"]
            peak |= count
        assert count == Counter()
        for name, values in found.items():
            values.append(peak[name])
    return found


@pytest.mark.parametrize("case", SPLIT)
def test_counts_are_those_of_torchs_own_tables(
    case: tuple[str, int, int, int],
) -> None:
    counts, expected = peak_counts(actions(*case)), _torch_counts(case)
    assert counts.forward.tolist() == expected["forward"]
    assert counts.split.tolist() == expected["split"]
    assert counts.both.tolist() == expected["both"]


def test_gpipe_holds_all_and_1f1b_as_many_as_stages_follow() -> None:
    assert peak_in_flight(actions("GPipe", 4, 1, 16)).tolist() == [16] * 4
    assert peak_in_flight(actions("1F1B", 4, 1, 16)).tolist() == [4, 3, 2, 1]
    assert peak_counts(actions("1F1B", 4, 1, 16)).split.tolist() == [0] * 4


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_eager_1f1b_holds_two_more_for_each_stage_that_follows(
    pp: int, rounds: int
) -> None:
    many = rounds * pp
    table = actions("Eager1F1B", pp, 1, many)
    expected = [min(many, 2 * (pp - stage) - 1) for stage in range(pp)]
    assert peak_in_flight(table).tolist() == expected


def test_interleaving_holds_more_than_1f1b() -> None:
    # Warm-up of rank 0: (v - 1) pp + 2 (pp - 1) forwards, plus the one in hand.
    table = actions("Interleaved1F1B", 4, 2, 16)
    assert peak_activation_bytes(table, 1.0)[0] == 4 + 2 * 3 + 1


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [("InterleavedZeroBubble", 1), ("ZBVZeroBubble", 2), ("DualPipeV", 1)],
)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_later_ranks_owe_more_weight_gradients(
    schedule: str, per_rank: int, pp: int, rounds: int
) -> None:
    counts = peak_counts(actions(schedule, pp, 2, rounds * pp))
    assert counts.split.tolist() == [per_rank * rank + 1 for rank in range(pp)]


def test_zero_bubble_v_holds_two_for_each_rank_on_every_rank() -> None:
    table = actions("ZBVZeroBubble", 4, 2, 32)
    np.testing.assert_allclose(peak_activation_bytes(table, 0.5), 4.0)
    assert peak_counts(table).both.tolist() == [8] * 4


def test_what_stays_to_the_end_of_the_step_adds_up() -> None:
    table = actions("InterleavedZeroBubble", 2, 2, 8)
    found = peak_held_bytes(table, 0.0, after_split_bytes=[1.0, 2.0, 3.0, 4.0])
    assert found.tolist() == [8 * (1 + 3), 8 * (2 + 4)]
    assert peak_held_bytes(table, 0.0, after_whole_bytes=1.0).tolist() == [0, 0]
    whole = actions("Interleaved1F1B", 2, 2, 8)
    assert peak_held_bytes(whole, 0.0, after_whole_bytes=1.0).tolist() == [16, 16]


def test_sizes_must_fit() -> None:
    table = actions("1F1B", 4, 1, 8)
    with pytest.raises(StrategyError, match="4 virtual stages"):
        peak_activation_bytes(table, [1.0, 2.0])
    with pytest.raises(StrategyError, match="freed_by_input=2"):
        peak_activation_bytes(table, 1.0, freed_by_input=2)
    with pytest.raises(StrategyError, match="after_split_bytes has shape"):
        peak_held_bytes(table, 1.0, after_split_bytes=[1.0])
    with pytest.raises(StrategyError, match="split_bytes has a size that is negative"):
        peak_held_bytes(table, 1.0, -1.0)
