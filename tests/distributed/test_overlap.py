"""Training is the same however far communication runs ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executors.measuring.traffic import CollectiveCounter
from executors.mesh import build_mesh
from executors.trainer import Trainer
from planner.schema import Overlap, Plan
from tests.distributed.cases import build, make_plan, reference, train
from tests.distributed.compare import Distance
from tests.distributed.pool import Pool

EXACT = 1e-5

CASES: dict[str, dict[str, Any]] = {
    "zero3": {
        "dp_shard": 2,
        "zero_stage": 3,
        "num_microbatches": 2,
        "overlap": Overlap(forward_prefetch=2, backward_prefetch=2),
    },
    "zero2": {
        "dp_shard": 2,
        "zero_stage": 2,
        "overlap": Overlap(forward_prefetch=1),
    },
    "zero3-full": {
        "dp_shard": 2,
        "zero_stage": 3,
        "recompute": "full",
        "overlap": Overlap(forward_prefetch=1, backward_prefetch=3),
    },
    "pp-zero3": {
        "pp": 2,
        "dp_shard": 2,
        "zero_stage": 3,
        "schedule": "1F1B",
        "num_microbatches": 4,
        "overlap": Overlap(forward_prefetch=2, backward_prefetch=2),
    },
    "ddp": {
        "dp_replicate": 2,
        "num_microbatches": 2,
        "overlap": Overlap(bucket_bytes=5000),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process(pool: Pool, case: str) -> None:
    plan = make_plan("llama", **CASES[case])
    world = plan.strategy.mesh.num_devices
    ours = pool.run(train, world, plan.to_json(), 2, False)[0]
    assert Distance(ours, reference(plan, 2)).largest <= EXACT


def buckets(plan_json: str) -> tuple[int, int]:
    """Limit that DDP was given, and buckets that it reduced in a second step."""
    plan = Plan.from_json(plan_json)
    place = build_mesh(plan.strategy, torch.device("cpu"))
    trainer = Trainer(plan, build("llama"), place)
    module: Any = trainer.parts[0].module
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    # The first step finds out in which order gradients come.
    module(input_ids=tokens).logits.sum().backward()
    with CollectiveCounter() as counter:
        module(input_ids=tokens).logits.sum().backward()
    return module.bucket_bytes_cap, counter.traffic()["all_reduce"].count


def test_bucket_sizes_reach_ddp(pool: Pool) -> None:
    one = make_plan("llama", dp_replicate=2)
    many = make_plan("llama", dp_replicate=2, overlap=Overlap(bucket_bytes=5000))
    assert pool.run(buckets, 2, one.to_json())[0] == (25 * 2**20, 1)
    limit, count = pool.run(buckets, 2, many.to_json())[0]
    assert limit == 5000
    assert count > 10
