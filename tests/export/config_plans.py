"""Plans that accelerate, DeepSpeed and nanotron can express, for files and parsers."""

from __future__ import annotations

from planner.schema import (
    Communication,
    Offload,
    Optimizer,
    Plan,
    Precision,
    TensorSharding,
)
from planner.schema.strategy_parts import ShardTraffic
from tests.export.plans import PLANS, make_plan

__all__ = ["ACCELERATE", "DEEPSPEED", "EXPRESSIBLE", "NANOTRON", "SCRIPTS"]

_HYBRID_TENSOR = {"dp_replicate": 2, "dp_shard": 4, "tp": 2}
_BF16 = Precision(parameter="bfloat16", reduce="bfloat16")

ACCELERATE: dict[str, Plan] = {
    "replicas": PLANS["replicas"],
    "zero3": PLANS["zero3"],
    "hybrid": PLANS["hybrid"],
    "context": PLANS["context"],
    "hybrid-tensor": make_plan(((2, 8),), mesh=_HYBRID_TENSOR, zero_stage=3),
    "zero2": make_plan(
        mesh={"dp_shard": 8},
        zero_stage=2,
        recompute="full",
        compile=True,
        grad_clip_norm=1.0,
    ),
    "offloaded": make_plan(
        mesh={"dp_shard": 8}, zero_stage=3, offload=Offload(states="parameters")
    ),
    "some-devices": make_plan(
        ((2, 8),),
        mesh={"dp_shard": 8},
        zero_stage=3,
        device_ranges=((4, 8), (12, 16)),
    ),
    "low-precision": make_plan(
        mesh={"dp_shard": 8},
        zero_stage=3,
        precision=_BF16,
        optimizer=Optimizer(state_dtype="bfloat16"),
    ),
    "cpu": make_plan(
        ((1, 2),),
        "cpu",
        mesh={"dp_replicate": 2},
        precision=Precision(compute="float32"),
    ),
    "two-cpus": make_plan(
        ((2, 2),),
        "cpu",
        mesh={"dp_replicate": 4},
        precision=Precision(compute="float32"),
    ),
}

DEEPSPEED: dict[str, Plan] = {
    "replicas": PLANS["replicas"],
    "zero3": PLANS["zero3"],
    "mics": PLANS["hybrid"],
    "offloaded": make_plan(
        mesh={"dp_shard": 8}, zero_stage=3, offload=Offload(states="parameters")
    ),
    "zero-plus-plus": make_plan(
        ((2, 4),),
        mesh={"dp_shard": 8},
        zero_stage=3,
        communication=Communication(
            shards=ShardTraffic(second_copy=4, weight_bits=8, gradient_bits=4)
        ),
        semantics="approximate",
    ),
    "offloaded-optimizer": make_plan(
        mesh={"dp_shard": 8}, zero_stage=1, offload=Offload(states="optimizer")
    ),
    "tensor": PLANS["tensor"],
    "tensor-zero2": make_plan(
        mesh={"dp_shard": 4, "tp": 2},
        zero_stage=2,
        sharding=TensorSharding(
            patterns={
                "layers.*.mlp.up_proj": "colwise",
                "layers.*.mlp.down_proj": "rowwise",
                "lm_head": "colwise",
            }
        ),
    ),
    "context": make_plan(
        mesh={"dp_shard": 4, "cp": 2},
        zero_stage=3,
        context_algorithm="all_to_all",
    ),
    "low-precision": make_plan(
        mesh={"dp_shard": 8},
        zero_stage=1,
        precision=_BF16,
        optimizer=Optimizer(name="Adam", state_dtype="bfloat16"),
    ),
    "sgd": make_plan(
        mesh={"dp_shard": 8},
        zero_stage=2,
        optimizer=Optimizer(name="SGD", momentum=0.9, learning_rate=0.1),
        precision=Precision(compute="float16"),
        compile=True,
    ),
    "some-devices": make_plan(
        ((2, 8),),
        mesh={"dp_shard": 8},
        zero_stage=1,
        device_ranges=((4, 8), (12, 16)),
    ),
}

NANOTRON: dict[str, Plan] = {
    "replicas": PLANS["replicas"],
    "pipeline": PLANS["pipeline"],
    "all-forward": make_plan(
        mesh={"pp": 2, "dp_replicate": 2, "tp": 2},
        sharding=TensorSharding(sequence_parallel=True, loss_parallel=True),
        grad_clip_norm=1.0,
    ),
    "low-precision": make_plan(
        mesh={"dp_shard": 8},
        zero_stage=1,
        precision=_BF16,
        optimizer=Optimizer(state_dtype="bfloat16", weight_decay=0.1),
    ),
    "some-devices": make_plan(
        ((2, 8),),
        mesh={"dp_shard": 8},
        zero_stage=1,
        device_ranges=((4, 8), (12, 16)),
    ),
}

#: Target to plans that it can express.
EXPRESSIBLE = {"accelerate": ACCELERATE, "deepspeed": DEEPSPEED, "nanotron": NANOTRON}

#: The same whatever the plan; they stand in planner/export.
SCRIPTS = frozenset({"train.py", "merge.py"})
