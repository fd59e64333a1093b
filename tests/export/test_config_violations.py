"""Fields that accelerate, DeepSpeed and nanotron refuse: value, rule, remedy."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import ExportError
from planner.export import export_files
from planner.schema import Optimizer, Precision, Stage, Strategy, TensorSharding
from planner.targets import Case, get_target
from tests.export.plans import PLANS, make_plan


def _refused(target: str, **changes: Any) -> str:
    hosts = changes.pop("hosts", ((1, 8),))
    device = changes.pop("device", "h100-80")
    with pytest.raises(ExportError) as raised:
        export_files(make_plan(hosts, device, **changes), target)
    return str(raised.value)


FLOAT32 = Precision(compute="float32")
SHARD, REPLICATE = {"dp_shard": 8}, {"dp_replicate": 8}
TENSOR = {"dp_shard": 4, "tp": 2}
RING = {"zero_stage": 3, "context_algorithm": "ring"}


@pytest.mark.parametrize(
    ("target", "changes", "field", "remedy"),
    [
        ("accelerate", {"mesh": {"pp": 8}}, "mesh.pp=8: accelerate's mesh", "use 1"),
        (
            "accelerate",
            {"mesh": SHARD, "zero_stage": 1},
            "zero_stage=1",
            "stage 2 or 3",
        ),
        ("accelerate", {"mesh": SHARD}, "zero_stage=0", "dp_replicate"),
        ("accelerate", {"mesh": {"tp": 8}}, "mesh.tp=8", "dp_shard > 1"),
        (
            "accelerate",
            {"mesh": {"dp_replicate": 4, "tp": 2}},
            "mesh.dp_shard=1",
            "dp_shard in place",
        ),
        (
            "accelerate",
            {"mesh": {"dp_replicate": 4, "cp": 2}, **RING},
            "mesh.dp_shard=1",
            "dp_shard in place",
        ),
        (
            "accelerate",
            {"mesh": {"dp_shard": 4, "cp": 2}, "zero_stage": 3},
            "context_algorithm=all_to_all",
            "ring, or the target deepspeed",
        ),
        (
            "accelerate",
            {"mesh": SHARD, "zero_stage": 3, "recompute": "selective"},
            "stages.recompute=selective",
            "full or none",
        ),
        (
            "accelerate",
            {"mesh": REPLICATE, "precision": FLOAT32, "recompute": "full"},
            "stages.recompute=full",
            "use none",
        ),
        (
            "accelerate",
            {"mesh": REPLICATE, "precision": Precision(reduce="bfloat16")},
            "precision.reduce=bfloat16",
            "use float32",
        ),
        (
            "accelerate",
            {
                "mesh": TENSOR,
                "zero_stage": 3,
                "sharding": TensorSharding(sequence_parallel=True),
            },
            "sharding.sequence_parallel=True",
            "use False",
        ),
        (
            "accelerate",
            {"device": "cpu", "mesh": SHARD, "zero_stage": 3, "precision": FLOAT32},
            "accelerators alone",
            "torchrun",
        ),
        (
            "accelerate",
            {"mesh": SHARD, "zero_stage": 3, "device_ranges": ((4, 8), (0, 4))},
            "out of the order",
            "devices in order",
        ),
        ("deepspeed", {"mesh": {"pp": 8}}, "PipelineModule", "use 1"),
        ("deepspeed", {"mesh": TENSOR, "zero_stage": 3}, "zero_stage=3", "2 or less"),
        (
            "deepspeed",
            {"mesh": {"dp_replicate": 2, "dp_shard": 4}, "zero_stage": 2},
            "mesh.dp_replicate=2",
            "dp_shard in place",
        ),
        (
            "deepspeed",
            {"mesh": {"dp_shard": 4, "cp": 2}, **RING},
            "context_algorithm=ring",
            "all_to_all",
        ),
        (
            "deepspeed",
            {"mesh": {"dp_shard": 2, "cp": 2, "tp": 2}, "zero_stage": 2},
            "mesh.cp=2",
            "cp=1 or tp=1",
        ),
        (
            "deepspeed",
            {
                "mesh": TENSOR,
                "zero_stage": 1,
                "sharding": TensorSharding(patterns={"embed_tokens": "vocab"}),
            },
            "embed_tokens: vocab",
            "take the pattern out",
        ),
        (
            "deepspeed",
            {
                "mesh": REPLICATE,
                "precision": Precision(parameter="bfloat16", reduce="bfloat16"),
                "optimizer": Optimizer(state_dtype="bfloat16"),
            },
            "precision.parameter=bfloat16",
            "or ZeRO",
        ),
        (
            "deepspeed",
            {"mesh": REPLICATE, "optimizer": Optimizer(state_dtype="bfloat16")},
            "optimizer.state_dtype=bfloat16",
            "float32 for both",
        ),
        ("nanotron", {"mesh": SHARD, "zero_stage": 2}, "zero_stage=2", "0 or 1"),
        (
            "nanotron",
            {"mesh": {"dp_replicate": 2, "dp_shard": 4}, "zero_stage": 1},
            "mesh.dp_replicate=2",
            "zero_stage=0",
        ),
        (
            "nanotron",
            {"mesh": {"pp": 4, "tp": 2}, "schedule": "1F1B", "layers": (7, 9, 9, 7)},
            "stages.modules",
            "equally many layers",
        ),
        (
            "nanotron",
            {"mesh": {"pp": 8}, "schedule": "1F1B", "num_microbatches": 4},
            "num_microbatches=4",
            "7 or more",
        ),
        (
            "nanotron",
            {"mesh": {"pp": 8}, "schedule": "Interleaved1F1B", "virtual_stages": 2},
            "schedule=Interleaved1F1B",
            "GPipe or 1F1B",
        ),
        (
            "nanotron",
            {"mesh": REPLICATE, "optimizer": Optimizer(name="SGD")},
            "optimizer.name=SGD",
            "use AdamW",
        ),
        (
            "deepspeed",
            {"mesh": REPLICATE, "optimizer": Optimizer(name="Adagrad")},
            "optimizer.name=Adagrad",
            "use Adam or AdamW or SGD",
        ),
        (
            "nanotron",
            {"mesh": REPLICATE, "precision": Precision(reduce="bfloat16")},
            "precision=float32/bfloat16/bfloat16",
            "one of these",
        ),
        (
            "nanotron",
            {"mesh": REPLICATE, "recompute": "full"},
            "stages.recompute=full: nanotron 0.4",
            "use none",
        ),
        (
            "nanotron",
            {"mesh": REPLICATE, "device": "cpu"},
            "device_types=cpu",
            "torchrun",
        ),
    ],
)
def test_what_cannot_be_said_is_refused(
    target: str, changes: dict[str, Any], field: str, remedy: str
) -> None:
    message = _refused(target, **changes)
    assert field in message
    assert remedy in message.partition(". nearest")[0]


def test_attention_that_is_not_causal_is_refused_where_it_would_be_made_so() -> None:
    plan = PLANS["context"]
    model = plan.model.model_copy(update={"attention": "full"})
    with pytest.raises(ExportError, match="makes every attention causal"):
        export_files(plan.model_copy(update={"model": model}), "accelerate")


def test_a_search_may_ask_before_the_model_is_cut() -> None:
    strategy = Strategy(
        mesh=PLANS["pipeline"].strategy.mesh,
        schedule="1F1B",
        num_microbatches=16,
        stages=tuple(Stage(rank=rank, modules=()) for rank in range(4)),
    )
    early = Case(strategy=strategy, layers=False, placed=False)
    assert not get_target("nanotron").violations(early)
    assert get_target("nanotron").violations(Case(strategy=strategy, placed=False))
