"""Compressed gradients: rounded within stated bounds, and equal on all replicas."""

from __future__ import annotations

import pytest

from planner.schema import Plan
from tests.distributed.cases import make_plan, train
from tests.distributed.compare import distance
from tests.distributed.pool import Pool


@pytest.mark.parametrize(("how", "bound"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_rounded_gradients_stay_within_their_rounding(
    pool: Pool, how: str, bound: float
) -> None:
    """8 and 11 significant bits: 0.4 % and 0.05 % an addition, of two replicas."""
    far = distance(
        pool,
        "llama",
        dp_replicate=2,
        num_microbatches=2,
        gradient_compression=how,
        semantics="approximate",
    )
    assert 1e-5 <= far.gradients <= bound  # below, nothing was rounded


def test_power_sgd_still_learns(pool: Pool) -> None:
    plan: Plan = make_plan(
        "llama",
        dp_replicate=2,
        gradient_compression="powersgd",
        semantics="approximate",
    )
    history = pool.run(train, 2, plan.to_json(), 8)
    far = distance(pool, "llama", dp_replicate=2)
    assert far.largest <= 1e-5  # the same plan without compression is exact
    losses = [entry["loss"] for entry in history[0]]
    assert losses == [entry["loss"] for entry in history[1]]
    assert losses[-1] < losses[0]
