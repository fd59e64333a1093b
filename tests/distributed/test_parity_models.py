"""Every architecture by the plans that the planner makes, against one process."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from planner.errors import NoFeasiblePlanError, PlanFileError
from planner.schema import Plan
from tests.distributed.compare import distance_of
from tests.distributed.planned import graph_of, planned
from tests.distributed.pool import Pool
from tests.marked import cases
from tests.models.tiny import TINY

pytest.importorskip("transformers")

EXACT = 1e-5

#: Of each, the axis and the knobs that make it one way of running.
PINS: dict[str, dict[str, Any]] = {
    "zero3": {"dp_shard": 2, "zero_stage": 3},
    "pp": {"pp": 2, "schedule": "1F1B", "num_microbatches": 2},
    "tp": {"tp": 2},
    "pp-tp": {"pp": 2, "tp": 2, "schedule": "1F1B", "num_microbatches": 2},
}

#: Models of which tp can split something, and the end of one of its patterns.
SPLIT = {
    "tiny-llama": "self_attn.q_proj",
    "tiny-qwen3": "self_attn.q_proj",
    "tiny-gpt2": "mlp.c_fc",
    "tiny-mixtral": "self_attn.q_proj",
    "tiny-bert": "intermediate.dense",
    "tiny-t5": "DenseReluDense.wi",
    "tiny-vit": "mlp.fc1",
    "tiny-whisper": "fc1",
}
#: Those whose attention has a number of heads or a layout of its own.
WHOLE_ATTENTION = {
    "tiny-gpt2": "transformer.h.*.attn.c_attn",
    "tiny-t5": "decoder.block.*.layer.*.EncDecAttention.q",
    "tiny-whisper": "model.encoder.layers.*.self_attn.k_proj",
}


#: Kept in the default suite; GPT-2 has tests of its own.
QUICK = {"tiny-mixtral", "tiny-resnet"}
#: With those, one of each way of being cut. The whole suite has all.
FURTHER = {"tiny-gpt2", "tiny-t5"}


def _quick_first(names: Collection[str]) -> list[Any]:
    some = set(names)
    return cases(names, further=FURTHER & some, slow=some - QUICK - FURTHER)


@pytest.mark.parametrize("axis", ["zero3", "pp"])
@pytest.mark.parametrize("name", _quick_first(TINY))
def test_data_and_pipeline_parallelism_apply_to_every_model(
    pool: Pool, name: str, axis: str
) -> None:
    made = planned(name, **PINS[axis])
    assert not made.not_runnable
    # One process sums a batch norm's values in another order: a cancelling sum of few.
    limit = 5 * EXACT if (name, axis) == ("tiny-resnet", "zero3") else EXACT
    assert distance_of(pool, made).largest <= limit


def _exact_when_split(pool: Pool, name: str, axis: str) -> None:
    made = planned(name, **PINS[axis])
    patterns = made.strategy.sharding.patterns
    assert any(pattern.endswith(SPLIT[name]) for pattern in patterns)
    assert not made.not_runnable
    assert distance_of(pool, made).largest <= EXACT


@pytest.mark.parametrize("name", _quick_first(SPLIT))
def test_tensor_parallelism_where_something_can_be_split(pool: Pool, name: str) -> None:
    _exact_when_split(pool, name, "tp")


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_stages_of_split_layers(pool: Pool, name: str) -> None:
    _exact_when_split(pool, name, "pp-tp")


@pytest.mark.parametrize("name", sorted(set(TINY) - set(SPLIT)))
def test_tensor_parallelism_is_refused_where_nothing_can_be_split(name: str) -> None:
    with pytest.raises(NoFeasiblePlanError, match=r"no module .* could be split"):
        planned(name, tp=2)


@pytest.mark.parametrize("name", WHOLE_ATTENTION)
def test_attention_with_heads_of_its_own_stays_whole_and_says_why(name: str) -> None:
    graph = graph_of(name)
    assert WHOLE_ATTENTION[name] in graph.whole
    assert not set(graph.whole) & set(graph.sharding)
    made = planned(name, tp=2)
    assert not made.strategy.sharding.sequence_parallel
    with pytest.raises(NoFeasiblePlanError, match="whole, which mixes tokens"):
        planned(name, tp=2, sequence_parallel=True)


def test_dividing_a_stream_that_is_whole_is_silently_wrong_and_so_refused(
    pool: Pool,
) -> None:
    made = planned("tiny-gpt2", tp=2)
    sharding = made.strategy.sharding.model_copy(update={"sequence_parallel": True})
    strategy = made.strategy.model_copy(update={"sharding": sharding})
    divided = made.model_copy(update={"strategy": strategy})
    with pytest.raises(
        PlanFileError, match=r"sequence_parallel, but tp leaves .* whole"
    ):
        Plan.from_json(divided.to_json())
    # Without the rule: each rank attends to its own half, and training goes on.
    unaware = made.model.model_copy(update={"whole_stream": None})
    lied = divided.model_copy(update={"model": unaware})
    assert distance_of(pool, lied, steps=1).gradients > 1e-2


def test_a_batch_norm_of_one_value_is_not_planned() -> None:
    # 32 pixels, halved five times: one value a channel and sample in the last stage.
    assert graph_of("tiny-resnet").batch_norm_values == 1
    with pytest.raises(NoFeasiblePlanError, match="no variance"):
        planned("tiny-resnet", semantics="approximate", dp_shard=2, microbatch_size=1)


@pytest.mark.parametrize("pins", [{"num_microbatches": 2}, {"pp": 2}])
def test_batch_norms_of_microbatches_take_consent(pins: dict[str, Any]) -> None:
    with pytest.raises(NoFeasiblePlanError, match="consent by semantics=approximate"):
        planned("tiny-resnet", dp_replicate=2, semantics="exact", **pins)
    made = planned("tiny-resnet", dp_replicate=2, semantics="approximate", **pins)
    assert made.strategy.semantics == "approximate"
