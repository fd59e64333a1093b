"""A loss in chunks is the plain one, on every mesh that has a last layer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.compare import distance
from tests.distributed.pool import Pool
from tests.marked import cases

#: Of float32; 16 tokens a sample make 7 chunks unequal.
EXACT, CHUNKS = 1e-6, 7

MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2, "num_microbatches": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
    "tp": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2, "zero_stage": 3, "recompute": "full"},
    "1f1b": {"pp": 2, "num_microbatches": 4, "schedule": "1F1B"},
    "pp-zero2-tp": {
        "pp": 2,
        "dp_shard": 2,
        "tp": 2,
        "zero_stage": 2,
        "sequence_parallel": True,
        "num_microbatches": 4,
        "schedule": "1F1B",
    },
}


@pytest.mark.parametrize("mesh", cases(MESHES, slow={"pp-zero2-tp"}))
def test_chunks_give_the_plain_loss_and_gradients(pool: Pool, mesh: str) -> None:
    far = distance(pool, "llama", loss_chunks=CHUNKS, **MESHES[mesh])
    assert far.loss <= EXACT
    assert far.first_gradients <= EXACT
    assert far.largest <= 1e-5
