"""What each framework does that measurements were taken with.

What a framework does at a given plan (fused attention, when replicas average, who takes
the loss) is a fact about it and stands here with its source. How well it does it
(overlap, gaps, fusion) is fitted, see :mod:`planner.calibration.parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from planner.cost import RECIPES, Recipe

__all__ = ["FRAMEWORKS", "Framework"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework at a certain age.

    Attributes:
        recipe: Facts, and starting values of what is fitted.
        zero_stage: Where a row does not say.
        recompute: Where a row does not say.
        sequence_parallel: Whether it comes with tp.
        virtual_stages: Of an interleaved schedule where a row does not say.
        memory_share: Of a device's memory that it fills before it fails.
        reduce: Dtype of gradient reductions, of runs in bfloat16 and narrower.
        microbatches: ``stages``: where a row infers the microbatch, a pipeline cuts
            its batch into as many as it has ranks; ``whole``: where a row leaves it
            out, and there is no pipeline, the batch is not cut.
        host: What keeps the host busy that launches kernels: ``eager`` modules of
            torch, ``megatron``'s and TransformerEngine's, or a ``compiled`` program.
        bfloat16_passes: ``gradient_passes`` of runs in bfloat16, if others.
        bfloat16_gradients: ``gradients`` of runs in bfloat16, if others.
        why: What these stand on.
    """

    recipe: Recipe
    zero_stage: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    virtual_stages: int = 2
    memory_share: float = 1.0
    reduce: Literal["float32", "bfloat16"] = "float32"
    microbatches: Literal["given", "stages", "whole"] = "given"
    host: Literal["eager", "megatron", "compiled"] = "eager"
    bfloat16_passes: float | None = None
    bfloat16_gradients: Literal["both"] | None = None
    why: str = ""


#: Flash kernels skip blocks above the diagonal: what is left of s x s scores is half
#: and the diagonal blocks. Source: Dao 2023 (FlashAttention-2), section 3.1.
_CAUSAL = 0.5


#: Of the bytes that 8 experts a token over 4 hosts would be sent, what leaves a host
#: when a token is sent to each of them once: 4 (1 - (3/4)^8) / 8. Source: DeepSeek-AI
#: 2024 (arXiv:2412.19437), section 3.2.2.
_ONCE = 0.45


#: Of a second in which a collective hides, what compute loses. A product on H100 falls
#: from 80 to 47 % of the peak beside an all-gather of 24 blocks: its tiles, one a
#: multiprocessor, need a second wave. Source: NVIDIA developer forum, thread 337991,
#: 2025.
_OVERLAP_COST = 0.4


#: What a host takes to launch what stands for one of a reference model's kernels, in
#: overheads of 4 us. Eager torch: a layer of Llama-7B, 15 kernels here, took 1.2 ms of
#: a forward that waited for its host (25.5 tokens/s on an A100: PyTorch team 2023,
#: "Accelerating Generative AI with PyTorch II"), 20 overheads each; an op by itself
#: takes 5 to 25 us, and 45 ops make such a layer: 4 to 19.
_LAUNCH = 12.0


#: The same of a compiled program, whose fused kernels are about as many as the graph's:
#: an op's 5 to 25 us each, and no less, because a fit begins no nearer to its bounds
#: than a tenth of their distance.
_COMPILED_LAUNCH = 6.5


#: Groups of data parallelism that hold a part of each host, tp the rest of it, by NCCL
#: of before 2.12 (March 2022), which had no rails across switches (PXN). No document
#: states the share: the runs of vTrain and SC21 with tp below 8 are 5 to 10 % slower
#: than with all interfaces, those of later frameworks are not.
_PARTIAL = 0.5


#: What adds a gradient to those of other microbatches reads both and writes the sum,
#: all in half precision: torch.autograd's AccumulateGrad, and XLA's.
_SUMMED = 3.0


#: NeMo's and Megatron-Bridge's recipes for performance set grad_reduce_in_fp32=False
#: (scripts/performance).
_NEMO_REDUCE: Literal["bfloat16"] = "bfloat16"


def _megatron(name: str, **facts: object) -> Recipe:
    """Megatron-LM: tp ranks keep their part of the logits, layers alone recompute."""
    return replace(
        Recipe(name=name),
        overlap_cost=_OVERLAP_COST,
        loss_parallel=True,
        experts_on_shards=True,
        # TransformerEngine's layers: pytorch/module/linear.py.
        narrow_gathers=True,
        scattered_transfers=True,
        recompute_ends=False,
        causal_share=_CAUSAL,
        receive_buffers="in_flight",
        regathers=True,
        keeps_graph=False,
        **{"launch": _LAUNCH, **facts},  # type: ignore[arg-type]
    )


FRAMEWORKS: dict[str, Framework] = {
    # What executors/ composes, block by block in eager mode.
    "torch": Framework(
        recipe=replace(
            RECIPES["torch"],
            overlap_cost=_OVERLAP_COST,
            launch=_LAUNCH,
            causal_share=_CAUSAL,
            ampere_attention=True,
        ),
        zero_stage=3,
    ),
    "torchtitan": Framework(
        host="compiled",
        recipe=Recipe(
            name="torchtitan",
            overlap_cost=_OVERLAP_COST,
            launch=_COMPILED_LAUNCH,
            ampere_attention=True,
            elementwise=0.5,
            causal_share=_CAUSAL,
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
            overlap_cost=_OVERLAP_COST,
            launch=_LAUNCH,
            ampere_attention=True,
            newer_products=0.9,
            elementwise=0.8,
            causal_share=_CAUSAL,
            recompute_ends=False,
        ),
        zero_stage=3,
        # mixed_precision: PURE in the yamls of its benchmark.
        reduce="bfloat16",
        why="llm-foundry: FSDP1 and flash attention",
    ),
    "megatron-2021": Framework(
        host="megatron",
        recipe=_megatron(
            "megatron-2021",
            overlap=0.0,
            partial_rails=_PARTIAL,
            gradient_passes=_SUMMED,
            elementwise=0.6,
            fused_attention=False,
            selective="attention",
            dropout=True,
        ),
        recompute="full",
        # Into a buffer in float32 (megatron/model/distributed.py, 2021).
        bfloat16_passes=5.0,
        why="Megatron-LM before flash attention: scores in memory, gradients "
        "all-reduced after the last backward",
    ),
    "megatron-deepspeed": Framework(
        host="megatron",
        recipe=_megatron(
            "megatron-deepspeed",
            overlap=0.0,
            partial_rails=_PARTIAL,
            gradient_passes=_SUMMED,
            elementwise=0.6,
            fused_attention=False,
            selective="attention",
            dropout=True,
        ),
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
            routed_share=_ONCE,
        ),
        zero_stage=1,
        sequence_parallel=True,
        reduce=_NEMO_REDUCE,
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
        # arXiv:2402.15627), table 3, counts overlap among what it adds to Megatron-LM.
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
        reduce=_NEMO_REDUCE,
        why="NeMo before container 25.11: as megatron, but tokens go to their experts "
        "one by one",
    ),
    "alpa": Framework(
        host="compiled",
        recipe=_megatron(
            "alpa",
            launch=_COMPILED_LAUNCH,
            overlap=0.0,
            elementwise=0.4,
            fused_attention=False,
            # XLA: one program with all gathers and reductions, softmax and cross
            # entropy in one kernel. Alpa's TrainState keeps fp16 weights beside a
            # master copy (alpa/model/model_util.py), so that gradients are fp16.
            fused_loss=True,
            gradients="computed",
            gathers_whole=True,
            gradient_passes=_SUMMED,
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
    "internevo": Framework(
        recipe=Recipe(
            name="internevo",
            overlap_cost=_OVERLAP_COST,
            launch=_LAUNCH,
            ampere_attention=True,
            elementwise=0.6,
            causal_share=_CAUSAL,
            gradient_passes=_SUMMED,
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
    "jax": Framework(
        host="compiled",
        recipe=Recipe(
            name="jax",
            overlap_cost=_OVERLAP_COST,
            launch=_COMPILED_LAUNCH,
            elementwise=0.4,
            causal_share=_CAUSAL,
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
            launch=_LAUNCH,
            causal_share=_CAUSAL,
            fused_attention=False,
            overlap=0.0,
            recompute_ends=False,
            pieces=12.0,
            partial_rails=_PARTIAL,
            # Weights and gradients of 2 bytes, 12 of fp32 weights and moments:
            # Rajbhandari et al. 2020 (ZeRO), section 3.1.
            gradients="computed",
        ),
        zero_stage=2,
        why="DeepSpeed: parameters gathered one by one, 12 tensors a layer",
    ),
}
