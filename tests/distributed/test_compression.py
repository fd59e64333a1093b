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


def test_power_sgd_stays_near_what_it_approximates(pool: Pool) -> None:
    plan: Plan = make_plan(
        "llama",
        dp_replicate=2,
        gradient_compression="powersgd",
        semantics="approximate",
    )
    history = pool.run(train, 2, plan.to_json(), 8)
    assert history[0][-1]["loss"] == history[1][-1]["loss"]
    # Against one process: the same batches, and nothing compressed.
    compressed = {"gradient_compression": "powersgd", "semantics": "approximate"}
    far = distance(pool, "llama", dp_replicate=2, **compressed)
    assert 1e-5 <= far.loss <= 5e-2
