"""The same for modules inside modules, cut into stages between them."""

from __future__ import annotations

from typing import Any

import pytest

from planner.schema import Optimizer, Precision
from tests.distributed.compare import distance
from tests.distributed.pool import Pool
from tests.models.stacks import STACKS

EXACT = 1e-5

#: Those in which a module is called again after others cannot be cut between them.
FOUR = sorted(set(STACKS) - {"shared", "recurrent"})

INTERLEAVED: dict[str, Any] = {
    "pp": 2,
    "virtual_stages": 2,
    "num_microbatches": 4,
    "schedule": "Interleaved1F1B",
}


@pytest.mark.parametrize("stack", sorted(STACKS))
def test_two_stages(pool: Pool, stack: str) -> None:
    far = distance(pool, stack, pp=2, num_microbatches=4, schedule="1F1B")
    assert far.largest <= EXACT


@pytest.mark.further
@pytest.mark.parametrize("stack", FOUR)
def test_four_stages_on_two_processes(pool: Pool, stack: str) -> None:
    assert distance(pool, stack, **INTERLEAVED).largest <= EXACT


@pytest.mark.parametrize("stack", ["nested", "resnet", "keywords"])
def test_a_backward_in_two_parts(pool: Pool, stack: str) -> None:
    zero_bubble = INTERLEAVED | {"schedule": "ZBVZeroBubble"}
    assert distance(pool, stack, **zero_bubble).largest <= EXACT


@pytest.mark.further
@pytest.mark.parametrize("stack", ["blocks", "recurrent", "keywords"])
@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 2, "zero_stage": 3},
        {"dp_shard": 2, "zero_stage": 2, "recompute": "full"},
        {"dp_replicate": 2},
    ],
    ids=["zero3", "zero2-recompute", "replicas"],
)
def test_with_data_parallelism(pool: Pool, stack: str, mesh: dict[str, Any]) -> None:
    far = distance(
        pool,
        stack,
        pp=2,
        num_microbatches=2,
        schedule="1F1B",
        grad_clip_norm=0.05,
        **mesh,
    )
    assert far.largest <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 2, "zero_stage": 3},
        {"pp": 2, "num_microbatches": 2, "schedule": "1F1B"},
        {"pp": 2, "num_microbatches": 2, "schedule": "1F1B", "dp_replicate": 2},
    ],
    ids=["zero3", "pp", "pp-replicas"],
)
def test_batch_norms_in_bfloat16(pool: Pool, mesh: dict[str, Any]) -> None:
    """Running statistics stay in float32: torch takes no narrow parameters to them."""
    precision = Precision(compute="bfloat16")
    # Small steps: what is compared is arithmetic, not where it leads to.
    optimizer = Optimizer(name="SGD", learning_rate=1e-3)
    far = distance(pool, "resnet", precision=precision, optimizer=optimizer, **mesh)
    # Not gradients: those of what a norm takes away again are nothing but rounding.
    assert 1e-6 <= far.loss <= 3e-2
