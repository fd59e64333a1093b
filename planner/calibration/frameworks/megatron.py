"""Megatron-LM, what is built on it, and Alpa, which was measured against it."""

from __future__ import annotations

from dataclasses import replace

from planner.calibration.frameworks.framework import (
    CAUSAL,
    COMPILED_LAUNCH,
    LAUNCH,
    NEMO_REDUCE,
    ONCE,
    OVERLAP_COST,
    PARTIAL,
    SUMMED,
    Framework,
)
from planner.cost import Recipe

__all__ = ["MEGATRON"]


def _megatron(name: str, **facts: object) -> Recipe:
    """Megatron-LM: tp ranks keep their part of the logits, layers alone recompute."""
    return replace(
        Recipe(name=name),
        overlap_cost=OVERLAP_COST,
        loss_parallel=True,
        experts_on_shards=True,
        # TransformerEngine's layers: pytorch/module/linear.py.
        narrow_gathers=True,
        scattered_transfers=True,
        recompute_ends=False,
        causal_share=CAUSAL,
        receive_buffers="in_flight",
        regathers=True,
        keeps_graph=False,
        **{"launch": LAUNCH, **facts},  # type: ignore[arg-type]
    )


def _before_flash_attention(name: str) -> Recipe:
    return _megatron(
        name,
        overlap=0.0,
        partial_rails=PARTIAL,
        gradient_passes=SUMMED,
        elementwise=0.6,
        fused_attention=False,
        selective="attention",
        dropout=True,
    )


MEGATRON: dict[str, Framework] = {
    "megatron-2021": Framework(
        host="megatron",
        recipe=_before_flash_attention("megatron-2021"),
        recompute="full",
        # Into a buffer in float32 (megatron/model/distributed.py, 2021).
        bfloat16_passes=5.0,
        why="Megatron-LM before flash attention: scores in memory, gradients "
        "all-reduced after the last backward",
    ),
    "megatron-deepspeed": Framework(
        host="megatron",
        recipe=_before_flash_attention("megatron-deepspeed"),
        recompute="full",
        # Cast to float32, then added to a sum in float32, after each microbatch of a
        # pipeline: update_hp_grads in DeepSpeed's runtime/bf16_optimizer.py.
        bfloat16_passes=9.0,
        # Those in bfloat16 stay until the next backward begins: clear_lp_grads there.
        bfloat16_gradients="both",
        why="Megatron-DeepSpeed: as Megatron-LM of 2021",
    ),
    "megatron": Framework(
        host="megatron",
        recipe=_megatron(
            "megatron",
            elementwise=0.4,
            overlap=0.9,
            layer_overlap=0.3,
            expert_overlap=0.3,
            pipeline_overlap=True,
            routed_share=ONCE,
        ),
        zero_stage=1,
        sequence_parallel=True,
        reduce=NEMO_REDUCE,
        why="NeMo and Megatron-Core: Transformer Engine, distributed optimizer with "
        "overlap, sequence parallelism, nothing recomputed unless said",
    ),
    "megatron-lm": Framework(
        host="megatron",
        recipe=_megatron("megatron-lm", elementwise=0.6, overlap=0.0),
        zero_stage=1,
        sequence_parallel=True,
        # accumulate_allreduce_grads_in_fp32 is set with --bf16, the three overlaps
        # (--overlap-grad-reduce, --overlap-param-gather, --tp-comm-overlap) are off:
        # megatron/training/arguments.py, 2024. MegaScale (Jiang et al. 2024,
        # arXiv:2402.15627) counts overlap among what it adds to Megatron-LM.
        why="Megatron-LM from 2023 in other hands than NVIDIA's: flash attention, no "
        "flag that overlaps",
    ),
    "megatron-2025": Framework(
        host="megatron",
        recipe=_megatron(
            "megatron-2025",
            elementwise=0.6,
            overlap=0.9,
            layer_overlap=0.2,
            expert_overlap=0.1,
            pipeline_overlap=True,
        ),
        zero_stage=1,
        sequence_parallel=True,
        reduce=NEMO_REDUCE,
        why="NeMo before container 25.11: as megatron, but tokens go to their experts "
        "one by one",
    ),
    "alpa": Framework(
        host="compiled",
        recipe=_megatron(
            "alpa",
            launch=COMPILED_LAUNCH,
            overlap=0.0,
            elementwise=0.4,
            fused_attention=False,
            # XLA: one program with all gathers and reductions, softmax and cross
            # entropy in one kernel. Alpa's TrainState keeps fp16 weights beside a
            # master copy (alpa/model/model_util.py), so that gradients are fp16.
            fused_loss=True,
            gradients="computed",
            gathers_whole=True,
            gradient_passes=SUMMED,
            # Gradients are summed up where they are and reduced once: Zheng et al. 2022
            # (Alpa), section 8.1, "gradient accumulation".
            reduces_each=False,
            # The peak is what XLA's allocator gave out, without context.
            reserve_bytes=0.0,
            fragmentation=0.0,
        ),
        recompute="full",
        # xla_bridge.py of JAX 0.3: 90 % of a device's memory is set aside.
        memory_share=0.9,
        why="Alpa: XLA, scores in memory",
    ),
}
