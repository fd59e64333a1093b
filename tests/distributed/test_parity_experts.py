"""Experts on different ranks: tokens travel, and no gradient is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.compare import distance
from tests.distributed.pool import Pool
from tests.marked import cases

#: Of float32: what the order of additions may change.
EXACT = 1e-5

MESHES: dict[str, dict[str, Any]] = {
    "ep-is-dp": {"dp_shard": 2, "ep": 2, "zero_stage": 3},
    "zero1": {"dp_shard": 2, "ep": 2, "zero_stage": 1, "num_microbatches": 2},
    "zero2-accumulates": {
        "dp_shard": 4,
        "ep": 2,
        "zero_stage": 2,
        "num_microbatches": 2,
    },
    "experts-fewer-than-shards": {"dp_shard": 8, "ep": 2, "zero_stage": 3},
    "experts-fewer-than-ranks": {"dp_shard": 8, "zero_stage": 3},
    "one-expert-each": {"dp_shard": 4, "ep": 4, "zero_stage": 3},
    "hsdp": {"dp_shard": 2, "dp_replicate": 2, "ep": 2, "zero_stage": 3},
    "over-cp": {"cp": 2, "ep": 2, "zero_stage": 2},
    "over-dp-and-cp": {"dp_shard": 2, "cp": 2, "ep": 4, "zero_stage": 3},
    "tp": {"dp_shard": 2, "ep": 2, "tp": 2, "zero_stage": 3},
    "tp-sequence": {
        "dp_shard": 2,
        "ep": 2,
        "tp": 2,
        "sequence_parallel": True,
        "zero_stage": 3,
    },
    "over-tp": {"ep": 2, "tp": 2, "sequence_parallel": True},
    "over-tp-whole-stream": {"ep": 2, "tp": 2},
    "over-dp-and-tp": {
        "dp_shard": 2,
        "ep": 4,
        "tp": 2,
        "sequence_parallel": True,
        "zero_stage": 2,
    },
    "over-tp-of-cp": {
        "cp": 2,
        "ep": 4,
        "tp": 2,
        "sequence_parallel": True,
        "zero_stage": 3,
    },
    "over-tp-hsdp": {
        "dp_replicate": 2,
        "dp_shard": 2,
        "ep": 2,
        "tp": 2,
        "sequence_parallel": True,
        "zero_stage": 3,
    },
    "over-tp-1f1b": {
        "pp": 2,
        "ep": 2,
        "tp": 2,
        "sequence_parallel": True,
        "num_microbatches": 4,
        "schedule": "1F1B",
    },
    "1f1b": {
        "pp": 2,
        "dp_shard": 2,
        "ep": 2,
        "zero_stage": 2,
        "num_microbatches": 4,
        "schedule": "1F1B",
    },
    "zero-bubble": {
        "pp": 2,
        "dp_shard": 2,
        "ep": 2,
        "zero_stage": 2,
        "virtual_stages": 2,
        "num_microbatches": 4,
        "schedule": "ZBVZeroBubble",
    },
}


#: Left to the whole suite: pairs of what the others try.
FURTHER = {
    "experts-fewer-than-shards",
    "experts-fewer-than-ranks",
    "zero1",
    "one-expert-each",
    "hsdp",
    "over-cp",
    "over-tp-whole-stream",
    "over-tp-hsdp",
}
SLOW = {"1f1b", "zero-bubble", "zero2-accumulates", "over-dp-and-cp", "tp"}
SLOW |= {"over-tp-of-cp", "over-tp-1f1b"}


@pytest.mark.parametrize(
    "mesh",
    cases(MESHES, further=FURTHER, slow=SLOW),
)
def test_experts_apart_train_as_experts_together(pool: Pool, mesh: str) -> None:
    far = distance(pool, "mixtral", grad_clip_norm=0.1, **MESHES[mesh])
    assert far.largest <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_routes_the_same_way(pool: Pool, recompute: str) -> None:
    far = distance(
        pool,
        "mixtral",
        dp_shard=2,
        ep=2,
        zero_stage=3,
        recompute=recompute,
    )
    assert far.largest <= EXACT
