"""Tokens of a rank, and positions that the model is given."""

from __future__ import annotations

import pytest
import torch

from executors.strategies.context import local_positions, slice_sequence
from planner.errors import ExecutionError


@pytest.mark.parametrize("algorithm", ["ring", "all_to_all"])
def test_ranks_have_every_token_once(algorithm: str) -> None:
    parts = [local_positions(24, rank, 3, algorithm) for rank in range(3)]  # type: ignore[arg-type]
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    assert {len(part) for part in parts} == {8}


def test_a_ring_gives_ranks_equal_work_under_a_causal_mask() -> None:
    """Pairs of query and key that a rank computes: a token sees all before it."""
    work = [int((local_positions(64, rank, 4, "ring") + 1).sum()) for rank in range(4)]
    assert len(set(work)) == 1
    plain = [
        int((local_positions(64, rank, 4, "all_to_all") + 1).sum()) for rank in range(4)
    ]
    assert plain[0] < plain[-1] / 5


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r"12 tokens over cp=4 \(ring\).*of 8"):
        local_positions(12, 0, 4, "ring")
    assert local_positions(12, 1, 4, "all_to_all").tolist() == [3, 4, 5]


def test_inputs_with_a_sequence_are_sliced_and_positions_added() -> None:
    inputs = {
        "input_ids": torch.arange(16).view(2, 8),
        "embeddings": torch.randn(2, 8, 3),
        "weight": torch.ones(2),
    }
    positions = local_positions(8, 1, 2, "ring")
    found = slice_sequence(inputs, positions, 8)
    assert positions.tolist() == [2, 3, 4, 5]
    assert found["input_ids"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(found["embeddings"], inputs["embeddings"][:, 2:6])
    assert found["weight"] is inputs["weight"]
    assert found["position_ids"].tolist() == [[2, 3, 4, 5]] * 2


def test_positions_of_the_data_are_kept() -> None:
    own = torch.arange(8).flip(0).expand(1, 8)
    inputs = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "position_ids": own}
    found = slice_sequence(inputs, torch.tensor([0, 1]), 8)
    assert found["position_ids"].tolist() == [[7, 6]]
