"""Sequences shared by ranks: attention is that of the whole, by either algorithm."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.compare import distance
from tests.distributed.pool import Pool, PoolError
from tests.marked import cases

#: Of float32: what the order of additions may change.
EXACT = 1e-5

PIPELINE = {"pp": 2, "num_microbatches": 4, "schedule": "1F1B"}
MESHES: dict[str, dict[str, Any]] = {
    "cp": {"cp": 2},
    "cp4-zero3": {"cp": 4, "zero_stage": 3},
    "cp-dp-zero2": {"cp": 2, "dp_shard": 2, "zero_stage": 2, "num_microbatches": 2},
    "cp-hsdp": {"cp": 2, "dp_shard": 2, "dp_replicate": 2, "zero_stage": 3},
    "cp-tp": {"cp": 2, "tp": 2, "sequence_parallel": True, "loss_parallel": True},
    "cp-pp-zero2": {"cp": 2, "zero_stage": 2, **PIPELINE},
    "cp-pp-zero-bubble": {
        "cp": 2,
        "pp": 2,
        "virtual_stages": 2,
        "num_microbatches": 4,
        "schedule": "ZBVZeroBubble",
    },
    "cp-dp-tp": {"cp": 2, "dp_shard": 2, "tp": 2, "zero_stage": 3},
}


#: Left to the whole suite: pairs of what the others try.
FURTHER = {"cp-dp-zero2", "cp4-zero3"}
SLOW = {"cp-hsdp", "cp-pp-zero2", "cp-pp-zero-bubble", "cp-dp-tp"}


@pytest.mark.parametrize("algorithm", ["ring", "all_to_all"])
@pytest.mark.parametrize(
    "mesh",
    cases(MESHES, further=FURTHER, slow=SLOW),
)
def test_parts_of_a_sequence_train_as_the_whole_does(
    pool: Pool, mesh: str, algorithm: str
) -> None:
    far = distance(
        pool,
        "llama",
        context_algorithm=algorithm,
        grad_clip_norm=0.1,
        **MESHES[mesh],
    )
    assert far.largest <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "all_to_all"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_sees_the_whole_sequence(
    pool: Pool, recompute: str, algorithm: str
) -> None:
    far = distance(
        pool, "llama", cp=2, context_algorithm=algorithm, recompute=recompute
    )
    assert far.largest <= EXACT


@pytest.mark.parametrize("algorithm", ["ring", "all_to_all"])
def test_learned_positions_are_told_to_the_model(pool: Pool, algorithm: str) -> None:
    far = distance(pool, "gpt2", cp=2, context_algorithm=algorithm)
    assert far.largest <= EXACT


@pytest.mark.parametrize("algorithm", ["ring", "all_to_all"])
def test_full_attention_sees_later_tokens(pool: Pool, algorithm: str) -> None:
    far = distance(pool, "bert", cp=2, context_algorithm=algorithm, attention="full")
    assert far.largest <= EXACT


def test_a_causal_mask_is_not_full_attention(pool: Pool) -> None:
    """The comparison can fail: full attention instead of causal is far off."""
    assert distance(pool, "llama", steps=1, cp=2, attention="full").largest > 1e-2


def test_heads_that_cp_does_not_divide_are_named(pool: Pool) -> None:
    with pytest.raises(PoolError, match=r"cp=8 does not divide 4 heads"):
        distance(pool, "llama", steps=1, cp=8)


def test_the_ring_takes_more_ranks_than_heads(pool: Pool) -> None:
    far = distance(pool, "llama", cp=8, context_algorithm="ring")
    assert far.largest <= EXACT
