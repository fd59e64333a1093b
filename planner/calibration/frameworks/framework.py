"""What is said of a framework that measurements were taken with, and shared facts.

What a framework does at a given plan (fused attention, when replicas average, who takes
the loss) is a fact about it and stands here with its source. How well it does it
(overlap, gaps, fusion) is fitted, see :mod:`planner.calibration.parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.cost import Recipe

__all__ = [
    "CAUSAL",
    "COMPILED_LAUNCH",
    "LAUNCH",
    "NEMO_REDUCE",
    "ONCE",
    "OVERLAP_COST",
    "PARTIAL",
    "SUMMED",
    "Framework",
]


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
        dealing: Whether stages get equal numbers of layers (``even``) or of weights.
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
    dealing: Literal["even", "weights"] = "even"
    bfloat16_passes: float | None = None
    bfloat16_gradients: Literal["both"] | None = None
    why: str = ""


#: Flash kernels skip blocks above the diagonal: what is left of s x s scores is half
#: and the diagonal blocks. Source: Dao 2023 (FlashAttention-2), section 3.1.
CAUSAL = 0.5


#: Of the bytes that 8 experts a token over 4 hosts would be sent, what leaves a host
#: when a token is sent to each of them once: 4 (1 - (3/4)^8) / 8. Source: DeepSeek-AI
#: 2024 (arXiv:2412.19437), section 3.2.2.
ONCE = 0.45


#: Of a second in which a collective hides, what compute loses. A product on H100 falls
#: from 80 to 47 % of the peak beside an all-gather of 24 blocks: its tiles, one a
#: multiprocessor, need a second wave. Source: NVIDIA developer forum, thread 337991,
#: 2025.
OVERLAP_COST = 0.4


#: What a host takes to launch what stands for one of a reference model's kernels, in
#: overheads of 4 us. Eager torch: a layer of Llama-7B, 15 kernels here, took 1.2 ms of
#: a forward that waited for its host (25.5 tokens/s on an A100: PyTorch team 2023,
#: "Accelerating Generative AI with PyTorch II"), 20 overheads each; an op by itself
#: takes 5 to 25 us, and 45 ops make such a layer: 4 to 19.
LAUNCH = 12.0


#: The same of a compiled program, whose fused kernels are about as many as the graph's:
#: an op's 5 to 25 us each, and no less, because a fit begins no nearer to its bounds
#: than a tenth of their distance.
COMPILED_LAUNCH = 6.5


#: Groups of data parallelism that hold a part of each host, tp the rest of it, by NCCL
#: of before 2.12 (March 2022), which had no rails across switches (PXN). No document
#: states the share: the runs of vTrain and SC21 with tp below 8 are 5 to 10 % slower
#: than with all interfaces, those of later frameworks are not.
PARTIAL = 0.5


#: What adds a gradient to those of other microbatches reads both and writes the sum,
#: all in half precision: torch.autograd's AccumulateGrad, and XLA's.
SUMMED = 3.0


#: NeMo's and Megatron-Bridge's recipes for performance set grad_reduce_in_fp32=False
#: (scripts/performance).
NEMO_REDUCE: Literal["bfloat16"] = "bfloat16"
