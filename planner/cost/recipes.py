"""Differences between frameworks at the same strategy, as a few named constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.errors import UnknownNameError
from planner.graph import Fusion

__all__ = ["RECIPES", "Recipe", "get_recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Constants of one framework.

    Attributes:
        name: Registered name.
        overlap: Share of a stage's compute under which collectives of data
            parallelism (ZeRO gathers, gradient reductions) can hide.
        overlap_cost: Share of the time that those are hidden for which compute loses.
        attention_forward: Share of the matmul rate that fused attention reaches.
        attention_backward: The same in backward.
        fused_attention: Whether scores stay on the chip; else they are written and
            read, and kept for backward.
        selective: What selective recomputation computes again: ``light``, everything
            but products and fused attention; ``alternate``, every second product, too;
            ``attention``, the scores alone, as Megatron-LM does.
        attention_speed: Speed of fused attention over FlashAttention-2's.
        ampere_attention: Whether fused attention is FlashAttention-2 or older, which
            was written for Ampere and leaves newer devices idle.
        newer_products: Share that products reach, on devices newer than Ampere, of what
            libraries written for these do.
        recompute_ends: Whether recomputation covers embedding and head, too.
        causal_share: Share of the scores of causal attention that fused kernels
            compute; 1 where they skip nothing.
        receive_buffers: ``all``: pipelines hold receive buffers of every microbatch
            (torch.distributed.pipelining, stage.py, seen on 2.11 to 2.13);
            ``in_flight``: of one microbatch.
        layer_overlap: Share of tp's collectives that hides under products.
        expert_overlap: Share of the exchanges of ep that hides under compute.
        replica_efficiency: Share of what the links reach that gathers and reductions of
            data parallelism do, in pieces and beside compute.
        partial_rails: Share of their hosts' network interfaces that the groups of an
            axis drive of which a host holds several members, but other groups the rest.
        pieces: Collectives that gather or reduce one unit.
        routed_share: Share of the bytes routed to experts that crosses the slower
            links outside a host: less than 1 where a token goes to a host once.
        imbalance: Tokens that the busiest rank's experts get over the mean: for so much
            longer do exchanges and blocks with experts take, while all others wait. 1
            in published runs, which force routers to balance; what a router of one's
            own does is to be measured (1 + MaxVio of Wang et al. 2024,
            arXiv:2408.15664).
        loss_parallel: Whether tp ranks take the loss of their part of the vocabulary;
            else they gather the logits.
        experts_on_shards: Whether, under sequence parallelism, each tp rank routes the
            tokens of its shard; else experts see the whole stream on every tp rank.
        low_precision_gathers: Whether tp ranks cast operands of low-precision products
            before they gather them, where the format allows; else behind the gather.
        scattered_transfers: Whether tp ranks share what goes from stage to stage, and
            gather it behind.
        reduces_each: Whether ZeRO 2 and 3 reduce gradients after every microbatch; else
            once a step.
        reduces_whole: Whether ZeRO 1 reduces gradients whole on every rank, with twice
            the bytes of one that scatters them.
        pipeline_overlap: Whether copies are made alike behind the first forward and
            the last backward of a pipeline; else nothing hides it there.
        fusion: Which ops of the graph are one kernel: ``none``; ``norms``, and products
            of one input; ``kernels``, rotations and activations, too; ``compiled``,
            whatever ``torch.compile`` or XLA fuse. See :mod:`planner.graph.fusion`.
        fused_loss: Whether softmax and cross entropy are one kernel over logits in the
            compute dtype; else fp32 copies of the logits stand beside them.
        regathers: Whether tp gathers what colwise layers read once more in backward
            where sequence parallelism splits it; else it is kept whole.
        dropout: Whether attention and MLP end in dropout, whose masks are kept.
        gradients: ``kept``: in the dtype of the parameters, sharded as ZeRO says;
            ``computed``: in the dtype that backward makes them in, without a copy;
            ``both``: as kept, and where they are summed up whole in a wider dtype,
            those that backward makes stay beside their sum.
        gradients_ahead: Whether memory for gradients is there before the first
            backward; else they come as they are made.
        gradient_passes: How often the bytes of a gradient in the compute dtype are
            moved to add a microbatch's to the sum: 3 where a kernel reads both and
            writes the sum; 0 where the product that makes it adds to the sum itself.
        keeps_graph: Whether all that was saved waits for the second half of a split
            backward, beside the gradients that half takes; else what the first half is
            done with makes room for them.
        gathers_whole: Whether a step is one program, which under ZeRO 3 gathers all
            weights before the first layer, and below it reduces gradients last.
        root_stays: Whether ZeRO 3 has embedding, last norm and head in one group, whose
            weights are there from the first forward to the last backward.
        ring_outputs: How often the bytes of its outputs, in the dtype of activations, a
            hop of ring attention moves to add them to those of earlier hops; likewise
            ring_queries, of the gradients of queries in backward.
        ring_launches: Ops that a hop adds to its attention kernel, each way.
        reserve_bytes: What context, communicators and the allocator keep on a GPU.
        fragmentation: Share of the activations lost to the caching allocator.
        reserved: Share of the peak that the caching allocator holds beyond it: what
            ``max_memory_reserved`` shows over ``max_memory_allocated``. It lets go of
            that before memory runs out, so that no plan is refused for it.
        launch: Time in which a GPU's host launches what stands for one of the graph's
            kernels, over the device's kernel_overhead_s. Hidden under kernels that take
            longer, but for experts', which wait for their routing.
        unit_launches: Launches that take a GPU's host as long as the hooks, the gather
            and the reduction of a unit that is sharded, or cast, on its own. They hide
            like other launches.
        own_casts: Whether weights that are neither sharded nor summed are cast without
            such hooks. Memory follows; steps are priced with hooks.
        local_copies: Whether a device copies weights that it gathers, and gradients
            that it reduces, between its parameters and the buffers of collectives.
        launches: Launches over those that ``launch`` stands for: more where layers are
            cut into pieces that take turns.
        captured: Share of the launches of blocks without experts that a CUDA graph
            plays back, which takes its host no time.
        captured_routing: The same of blocks with experts; where it is all of them, no
            host waits for their routing.
        blocking: Whether a GPU's host waits for each kernel before it launches the
            next (CUDA_LAUNCH_BLOCKING).
        op_overhead_factor: Host work of a kernel in training over that of a bare op,
            which is the device's kernel_overhead_s: autograd nodes, views, modules.
            On CPU devices, where nothing hides it.
        sharded_op_overhead_s: Host time that DTensor dispatch adds to an op of a
            module split along tp, on CPU devices where nothing hides it.
        collective_overhead_s: Host time that one FSDP or DDP collective adds on CPU
            devices (hooks, copy-in and copy-out), beyond the wire.
        core_wait_s: What a process that is sent to waits for a core, where there are
            fewer cores than processes and others compute: a turn of the scheduler.
    """

    name: str
    overlap: float = 0.9
    overlap_cost: float = 0.0
    attention_forward: float = 0.8
    attention_backward: float = 0.7
    fused_attention: bool = True
    selective: Literal["light", "alternate", "attention"] = "light"
    attention_speed: float = 1.0
    ampere_attention: bool = False
    newer_products: float = 1.0
    recompute_ends: bool = True
    causal_share: float = 1.0
    launch: float = 1.0
    launches: float = 1.0
    unit_launches: float = 0.0
    own_casts: bool = False
    local_copies: bool = False
    captured: float = 0.0
    captured_routing: float = 0.0
    blocking: bool = False
    layer_overlap: float = 0.0
    expert_overlap: float = 0.0
    replica_efficiency: float = 1.0
    partial_rails: float = 1.0
    pieces: float = 1.0
    routed_share: float = 1.0
    imbalance: float = 1.0
    loss_parallel: bool = False
    experts_on_shards: bool = False
    low_precision_gathers: bool = False
    scattered_transfers: bool = False
    reduces_each: bool = True
    reduces_whole: bool = False
    pipeline_overlap: bool = False
    receive_buffers: Literal["all", "in_flight"] = "all"
    fusion: Fusion = "none"
    fused_loss: bool = False
    regathers: bool = False
    dropout: bool = False
    gradients: Literal["kept", "computed", "both"] = "kept"
    gradients_ahead: bool = False
    gradient_passes: float = 0.0
    keeps_graph: bool = True
    gathers_whole: bool = False
    root_stays: bool = False
    # executors/strategies/ring.py: the sum in float32 is read and written to be scaled,
    # and once more to add a result, 18 bytes an element; gradients of queries are added
    # in float32, 10.
    ring_outputs: float = 9.0
    ring_queries: float = 5.0
    ring_launches: float = 14.0
    reserve_bytes: float = 1.5e9
    fragmentation: float = 0.03
    reserved: float = 0.0
    # In models of no size a kernel takes as long as 4.9 (Llama), 5.3 (Qwen2), 7.4
    # (GPT-2) and 8.7 (BERT) bare ops, forward and backward. Source: ours, torch 2.13,
    # `python -m benchmarks.host_overhead`.
    op_overhead_factor: float = 6.0
    sharded_op_overhead_s: float = 1.2e-4
    # Fully sharded against plain on one process: 0.8 to 1.0 ms for each gather or
    # reduction of next to no bytes. Source: as above.
    collective_overhead_s: float = 9e-4
    # 1.8 ms a hop of a gather among 4 processes on 2 cores. Source: as above.
    core_wait_s: float = 2e-3


RECIPES: dict[str, Recipe] = {
    # FSDP2, DTensor and torch.distributed.pipelining: what executors/ composes.
    # Attention shares after Dao 2023 (FlashAttention-2, figures 4 and 5: up to 73 %
    # forward and 63 % backward of A100 peak, against about 0.8 for large products).
    "torch": Recipe(name="torch"),
}


def get_recipe(name: str) -> Recipe:
    """Look a recipe up.

    Raises:
        UnknownNameError: If there is none of that name.
    """
    try:
        return RECIPES[name]
    except KeyError:
        raise UnknownNameError("recipe", name, RECIPES) from None
