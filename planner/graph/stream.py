"""Checks that sequence parallelism may divide the residual stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.graph.model import Block, Edge, Kernel
from planner.schema.strategy_parts import matches_pattern

__all__ = ["mixing_layers", "why_whole_stream"]

#: Blocks in which one token sees another.
_MIXING = frozenset({"conv", "recurrent", "scan"})


def why_whole_stream(blocks: Sequence[Block], edges: Sequence[Edge]) -> str | None:
    """Return the reason why the stream cannot be divided along the sequence, or None.

    From the first unit that tp splits to the last one each rank has some tokens of the
    stream, and has all of them only between a colwise and a rowwise layer. So ops that
    mix tokens must lie there, and the stream alone may pass from unit to unit.

    Args:
        blocks: Blocks with kernels' styles.
        edges: Edges between the blocks.

    Returns:
        A clause that names the block; None if there is none, or tp splits nothing.
    """
    layers = list(dict.fromkeys(block.layer for block in blocks))
    number = {layer: index for index, layer in enumerate(layers)}
    unit = [number[block.layer] for block in blocks]
    split = [
        unit[block.index]
        for block in blocks
        if any(kernel.style == "rowwise" for kernel in block.kernels)
        and block.kind != "embedding"
    ]
    if not split:
        return None
    first, last = min(split), max(split)
    for block in blocks:
        if first <= unit[block.index] <= last and _mixes_whole(block):
            return f"tp leaves {block.name} whole, which mixes tokens"
    for edge in edges:
        source, target = unit[edge.source], unit[edge.target]
        passed = edge.bytes > edge.recomputable and target - source > 1
        if passed and source <= last and target > first:
            return (
                f"{blocks[edge.target].name} reads what {blocks[edge.source].name} "
                f"made beside the residual stream"
            )
    return None


def mixing_layers(
    blocks: Sequence[Block], sharding: Mapping[str, str]
) -> tuple[str, ...]:
    """Return patterns of the layers that make features local where tokens mix.

    Args:
        blocks: Blocks with kernels' styles.
        sharding: Pattern to style for the whole model.

    Returns:
        The colwise and rowwise patterns that have a layer in a block in which tokens
        mix, in the order of ``sharding``.
    """
    inside = {
        module
        for block in blocks
        if any(_mixes(kernel) for kernel in block.kernels)
        for module in block.modules
    }
    return tuple(
        pattern
        for pattern, style in sharding.items()
        if style in {"colwise", "rowwise"}
        and any(matches_pattern(pattern, module) for module in inside)
    )


def _mixes_whole(block: Block) -> bool:
    """Return True if tokens mix where tp has not made features local."""
    return block.kind in _MIXING or any(
        kernel.style == "none" and _mixes(kernel) for kernel in block.kernels
    )


def _mixes(kernel: Kernel) -> bool:
    """Return True if an op's output at one token depends on other tokens."""
    return kernel.kind in {"attention", "conv"} or (
        # A product of activations alone: scores of attention, or their use.
        kernel.kind == "matmul" and not kernel.weight_bytes
    )
