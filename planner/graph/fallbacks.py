"""Code that stands in for a kernel that is not installed, recognised in a graph.

It computes what the kernel does and takes many times as long, so that a price of it
says little about a run with the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.graph.model import Block, ModelGraph
from planner.units import format_bytes

__all__ = ["FALLBACK", "fallback_code"]

#: Start of every text of :func:`fallback_code`.
FALLBACK = "fallback code"
#: Fewest tokens of a sequence over which a loop is told from a layer of many ops.
_FEWEST = 64


def fallback_code(graph: ModelGraph) -> tuple[str, ...]:
    """Return a sentence for each kind of fallback, with what it costs.

    Recognised are loops over the tokens of a sequence, as reference code of
    state-space models has them, attention that writes its scores to memory, and loops
    over experts.
    """
    tokens = graph.seq_len or 0
    found = []
    loops = [b for b in graph.blocks if tokens >= _FEWEST and _loops(b, tokens)]
    if loops:
        most = max(sum(kernel.count for kernel in block.kernels) for block in loops)
        found.append(
            f"{FALLBACK}: {_named(loops)} goes through the sequence token by token, "
            f"{most:,} kernels in a forward of one layer, where a fused scan is one; "
            f"install its kernels (mamba_ssm and causal_conv1d for state-space models) "
            f"where you train, and read time and MFU as those of the loop"
        )
    eager = [b for b in graph.blocks if tokens >= _FEWEST and _scores(b, tokens)]
    if eager:
        written = sum(_scores(block, tokens) for block in eager)
        found.append(
            f"{FALLBACK}: attention of {_named(eager)} writes its scores to memory, "
            f"{format_bytes(2 * written / graph.batch)} a sample in 16 bits over all "
            f"layers, which a fused kernel never does; choose one "
            f"(attn_implementation) where you train, and read time and memory as those "
            f"of eager attention"
        )
    experts = [b for b in graph.blocks if _over_experts(b, graph.num_experts)]
    if experts:
        found.append(
            f"{FALLBACK}: {_named(experts)} goes through its {graph.num_experts} "
            f"experts one by one, where a grouped product is one kernel; choose "
            f"grouped_mm (experts_implementation) where you train"
        )
    return tuple(found)


def _named(blocks: Iterable[Block]) -> str:
    names = [block.name for block in blocks]
    others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]}{others}"


def _loops(block: Block, tokens: int) -> bool:
    return any(kernel.count >= tokens - 1 for kernel in block.kernels)


def _scores(block: Block, tokens: int) -> float:
    """Scores that a block's products of queries and keys write."""
    return sum(
        kernel.batch * kernel.m * kernel.n * kernel.count
        for kernel in block.kernels
        if kernel.kind == "matmul"
        and not kernel.weight_bytes
        and kernel.m == tokens
        and kernel.n == tokens
    )


def _over_experts(block: Block, experts: int) -> bool:
    # On stand-in values a loop meets half of the experts.
    return experts > 1 and any(
        kernel.kind == "matmul"
        and kernel.expert
        and kernel.batch == 1
        and kernel.count >= max(2, experts // 2)
        for kernel in block.kernels
    )
