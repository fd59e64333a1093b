"""Frameworks of torch, DeepSpeed and XLA."""

from __future__ import annotations

from dataclasses import replace

from planner.calibration.frameworks.framework import (
    CAUSAL,
    COMPILED_LAUNCH,
    LAUNCH,
    OVERLAP_COST,
    PARTIAL,
    SUMMED,
    Framework,
)
from planner.cost import RECIPES, Recipe

__all__ = ["OTHERS"]


OTHERS: dict[str, Framework] = {
    # What executors/ composes, block by block in eager mode.
    "torch": Framework(
        recipe=replace(
            RECIPES["torch"],
            overlap_cost=OVERLAP_COST,
            launch=LAUNCH,
            causal_share=CAUSAL,
            ampere_attention=True,
        ),
        zero_stage=3,
    ),
    "torchtitan": Framework(
        host="compiled",
        recipe=Recipe(
            name="torchtitan",
            overlap_cost=OVERLAP_COST,
            launch=COMPILED_LAUNCH,
            ampere_attention=True,
            elementwise=0.5,
            causal_share=CAUSAL,
            loss_parallel=True,
            # torchao/float8/float8_tensor_parallel.py.
            narrow_gathers=True,
            recompute_ends=False,
            selective="alternate",
        ),
        zero_stage=3,
        recompute="selective",
        sequence_parallel=True,
        # pipeline_parallel_microbatches is pipeline_parallel_degree where it is not
        # given: torchtitan/parallelisms/pipelining_utils.py, December 2024.
        microbatches="stages",
        why="torchtitan: FSDP2, torch.compile a block, loss parallel by default",
    ),
    "fsdp": Framework(
        recipe=Recipe(
            name="fsdp",
            overlap_cost=OVERLAP_COST,
            launch=LAUNCH,
            ampere_attention=True,
            newer_products=0.9,
            elementwise=0.8,
            causal_share=CAUSAL,
            recompute_ends=False,
        ),
        zero_stage=3,
        # mixed_precision: PURE in the yamls of its benchmark.
        reduce="bfloat16",
        why="llm-foundry: FSDP1 and flash attention",
    ),
    "internevo": Framework(
        recipe=Recipe(
            name="internevo",
            receive_buffers="in_flight",
            overlap_cost=OVERLAP_COST,
            launch=LAUNCH,
            ampere_attention=True,
            elementwise=0.6,
            causal_share=CAUSAL,
            gradient_passes=SUMMED,
            loss_parallel=True,
            recompute_ends=False,
            reduces_whole=True,
        ),
        zero_stage=1,
        # Buckets of the gradients' own dtype, whole on all ranks. Source: InternEvo,
        # internlm/solver/optimizer/hybrid_zero_optim.py, _reduce_and_copy.
        reduce="bfloat16",
        why="InternEvo: hybrid ZeRO 1 and flash attention",
    ),
    "nanotron": Framework(
        recipe=Recipe(
            name="nanotron",
            receive_buffers="in_flight",
            overlap_cost=OVERLAP_COST,
            launch=LAUNCH,
            causal_share=CAUSAL,
            ampere_attention=True,
            gradient_passes=SUMMED,
            loss_parallel=True,
            recompute_ends=False,
        ),
        zero_stage=1,
        sequence_parallel=True,
        # Into a buffer in float32, as Megatron-LM of 2021.
        bfloat16_passes=5.0,
        dealing="weights",
        why="nanotron: eager modules and FlashAttention-2, tp_mode REDUCE_SCATTER, "
        "sharded cross entropy, float32 sums of gradients",
    ),
    "jax": Framework(
        host="compiled",
        recipe=Recipe(
            name="jax",
            receive_buffers="in_flight",
            overlap_cost=OVERLAP_COST,
            launch=COMPILED_LAUNCH,
            elementwise=0.4,
            causal_share=CAUSAL,
            loss_parallel=True,
            recompute_ends=False,
        ),
        zero_stage=3,
        # gradient_accumulation_steps is 1: MaxText, configs/base.yml.
        microbatches="whole",
        why="XLA with fused attention",
    ),
    "deepspeed": Framework(
        recipe=Recipe(
            name="deepspeed",
            receive_buffers="in_flight",
            launch=LAUNCH,
            causal_share=CAUSAL,
            fused_attention=False,
            overlap=0.0,
            recompute_ends=False,
            pieces=12.0,
            partial_rails=PARTIAL,
            # Weights and gradients of 2 bytes, 12 of fp32 weights and moments:
            # Rajbhandari et al. 2020 (ZeRO), section 3.1.
            gradients="computed",
        ),
        zero_stage=2,
        why="DeepSpeed: under ZeRO 3 parameters gathered one by one, 12 tensors a "
        "layer",
    ),
}
