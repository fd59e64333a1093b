"""The same for GPT-2, whose first and last stage share a matrix."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.compare import distance
from tests.distributed.pool import Pool
from tests.marked import cases

EXACT = 1e-5

MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero2": {"dp_shard": 2, "zero_stage": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
    "gpipe": {"pp": 2, "num_microbatches": 4},
    "1f1b": {"pp": 2, "num_microbatches": 4, "schedule": "1F1B"},
    "1f1b-ddp": {
        "pp": 2,
        "dp_replicate": 2,
        "num_microbatches": 2,
        "schedule": "1F1B",
    },
    # The copies of the tied matrix lie on different ranks …
    "interleaved-zero3": {
        "pp": 2,
        "dp_shard": 2,
        "zero_stage": 3,
        "virtual_stages": 2,
        "num_microbatches": 4,
        "schedule": "Interleaved1F1B",
    },
    # … and here on one, which holds the first stage and the last.
    "zbv-zero2": {
        "pp": 2,
        "dp_shard": 2,
        "zero_stage": 2,
        "virtual_stages": 2,
        "num_microbatches": 4,
        "schedule": "ZBVZeroBubble",
    },
}


#: Left to the whole suite: a Llama runs them, too, and nothing tied is cut apart.
FURTHER = {"zero3", "1f1b", "interleaved-zero3"}
SLOW = {"zero2", "gpipe", "1f1b-ddp"}


@pytest.mark.parametrize(
    "mesh",
    cases(MESHES, further=FURTHER, slow=SLOW),
)
def test_tied_weights_train_as_one(pool: Pool, mesh: str) -> None:
    far = distance(pool, "gpt2", grad_clip_norm=0.5, **MESHES[mesh])
    assert far.largest <= EXACT
