"""Plans that frameworks with trainers of their own are given beside ``PLANS``."""

from __future__ import annotations

from planner.schema import Optimizer, Overlap, Plan, Precision, Stage, TensorSharding
from tests.export.plans import LLAMA, PLANS, make_plan

__all__ = ["framework_plans", "sharding"]

_LAYER = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


def sharding(**fields: object) -> TensorSharding:
    """tp as Megatron does it."""
    patterns = {f"model.layers.*.{name}": style for name, style in _LAYER.items()}
    return TensorSharding.model_validate({"patterns": patterns, **fields})


def _experts(zero_stage: int, **mesh: int) -> Plan:
    """Plan of a model of 48 layers and 128 experts."""
    apart = {"model.layers.*.mlp.experts": "experts"}
    split = TensorSharding.model_validate({"patterns": apart})
    if "tp" in mesh:
        split = sharding(sequence_parallel=True)
        split = split.model_copy(update={"patterns": {**split.patterns, **apart}})
    plan = make_plan(
        ((2, 8),),
        mesh=mesh,
        zero_stage=zero_stage,
        sharding=split,
        name="qwen3-30b-a3b",
    )
    layers = tuple(f"model.layers.{index}" for index in range(48))
    stage = Stage(rank=0, modules=(LLAMA[0], *layers, *LLAMA[-2:]))
    model = plan.model.model_copy(update={"ref": "qwen3-30b-a3b"})
    strategy = plan.strategy.model_copy(update={"stages": (stage,)})
    return plan.model_copy(update={"model": model, "strategy": strategy})


def framework_plans(zero_stage: int) -> dict[str, Plan]:
    """By what they show.

    Args:
        zero_stage: Of those that shard: 1 for Megatron-LM, 2 for torchtitan, whose
            plain FSDP plans have 3 all the same.
    """
    own = {
        "dense": make_plan(
            ((2, 8),),
            mesh={"pp": 4, "dp_shard": 2, "tp": 2},
            zero_stage=zero_stage,
            schedule="1F1B",
            layers=(7, 9, 9, 7),
            num_microbatches=16,
            sharding=sharding(sequence_parallel=True),
            grad_clip_norm=1.0,
        ),
        "virtual": make_plan(
            mesh={"pp": 2, "dp_replicate": 2, "dp_shard": 2},
            zero_stage=zero_stage,
            schedule="Interleaved1F1B",
            virtual_stages=4,
            layers=(3, 4, 4, 4, 4, 4, 4, 5),
            recompute="selective",
            optimizer=Optimizer(weight_decay=0.1),
        ),
        "experts": _experts(zero_stage, dp_replicate=2, dp_shard=8, ep=4),
        "experts over tp": _experts(zero_stage, dp_shard=4, tp=4, ep=8),
        "ring": make_plan(
            mesh={"dp_shard": 2, "cp": 2, "tp": 2},
            zero_stage=zero_stage,
            context_algorithm="ring",
            sharding=sharding(sequence_parallel=True),
        ),
        "one sample": make_plan(
            mesh={"cp": 8}, zero_stage=zero_stage, context_algorithm="ring"
        ),
        "one": make_plan(((1, 1),), precision=Precision(compute="float32")),
    }
    if zero_stage == 1:
        own["half"] = make_plan(
            mesh={"dp_shard": 8}, zero_stage=1, precision=Precision(compute="float16")
        )
        own["ulysses"] = make_plan(
            mesh={"dp_shard": 4, "cp": 2},
            zero_stage=1,
            context_algorithm="all_to_all",
            precision=Precision(reduce="bfloat16"),
            optimizer=Optimizer(name="SGD", momentum=0.9),
            overlap=Overlap(bucket_bytes=100_000_000),
        )
    else:
        own["zero bubble"] = make_plan(
            mesh={"pp": 4, "dp_shard": 2},
            zero_stage=2,
            schedule="ZBVZeroBubble",
            virtual_stages=2,
            layers=(4, 4, 4, 4, 4, 4, 3, 5),
            compile=True,
            optimizer=Optimizer(name="Adam", weight_decay=0.1),
        )
    return {**PLANS, **own}
