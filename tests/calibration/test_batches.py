"""Microbatches of rows that leave them out."""

from __future__ import annotations

import pytest

from planner.calibration.batches import batches
from planner.calibration.frameworks import FRAMEWORKS
from tests.calibration.rows import small


@pytest.mark.parametrize(
    ("total", "found"),
    [
        (16, (4, 2)),  # 8 a replica
        (12, (3, 2)),  # 6 a replica
        (10, (1, 5)),  # 5 a replica: a prime
        (2, (1, 1)),
        # What replicas do not divide: OPT-175B's 1,024 samples on 124 of them.
        (17, (4, 2)),
        (5, (2, 1)),
        (1, (1, 1)),
        (None, (1, 1)),
    ],
)
def test_a_blank_microbatch(total: int | None, found: tuple[int, int]) -> None:
    why: list[str] = []
    row = small(microbatch=None, global_batch=total, pp=None)
    assert batches(row, FRAMEWORKS["fsdp"], 2, why) == found
    assert why[0] == f"microbatch {found[0]}, not given"


def test_a_pipeline_takes_one_sample_at_once() -> None:
    row = small(microbatch=None, global_batch=16, pp=4)
    assert batches(row, FRAMEWORKS["megatron"], 2, []) == (1, 8)
    assert batches(
        small(microbatch=None, global_batch=None, pp=4),
        FRAMEWORKS["megatron"],
        2,
        [],
    ) == (1, 16)


def test_jax_takes_a_replicas_batch_at_once() -> None:
    # gradient_accumulation_steps is 1 unless a configuration says otherwise.
    row = small(microbatch=None, global_batch=32, pp=None)
    assert batches(row, FRAMEWORKS["jax"], 2, []) == (16, 1)
