"""Blocks of equal cost, so that a hundred equal layers are priced once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.kernel_table import KernelTable
from planner.graph import Block, Kernel, ModelGraph

__all__ = ["BlockClasses", "group_blocks"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockClasses:
    """Distinct blocks and where they are.

    Attributes:
        blocks: One of each class.
        count: How many blocks of a class a unit has. Shape [classes, units].
        kernels: Of all classes; ``owner`` is the class.
        has_attention: Per class.
        streamed: Per class, whether sequence parallelism divides its residual stream:
            it reaches from the first unit that tp reduces in to the last.
        region: Those units.
        gathered_bytes: Outputs that tp gathers whole, at the traced batch. [classes].
        logit_bytes: Logits of heads, at the traced batch. [classes].
        entered_bytes: Inputs of the same, whose gradients tp sums up. [classes].
    """

    blocks: tuple[Block, ...]
    count: Array
    kernels: KernelTable
    has_attention: NDArray[np.bool_]
    streamed: NDArray[np.bool_]
    region: range
    gathered_bytes: Array
    logit_bytes: Array
    entered_bytes: Array

    @property
    def narrow(self) -> NDArray[np.bool_]:
        """Blocks with products that recipes for float8 and float4 convert. [blocks]."""
        found = np.zeros(len(self.blocks), dtype=bool)
        found[self.kernels.owner[self.kernels.narrow]] = True
        return found

    def column(self, name: str) -> Array:
        """A number of every class's block. Shape [classes]."""
        return np.array([float(getattr(block, name)) for block in self.blocks])


def group_blocks(
    graph: ModelGraph, loss_parallel: bool = False, experts_on_shards: bool = False
) -> BlockClasses:
    """Find the classes of a graph.

    Args:
        graph: The model.
        loss_parallel: Whether tp ranks take the loss of their part of the vocabulary.
        experts_on_shards: Whether tp ranks route the tokens of their shards.
    """
    seen: dict[object, int] = {}
    blocks: list[Block] = []
    streamed: list[bool] = []
    count = np.zeros((len(graph.blocks), len(graph.units)))
    region = _reduced_units(graph)
    for unit, (start, stop) in enumerate(graph.units):
        for block in graph.blocks[start:stop]:
            inside = unit in region
            # Equal structure is not enough: the first block of a run carries the
            # unit's boundary, and only one of several tied users owns the weight.
            key = (
                block.repeat or block.index,
                block.boundary_bytes,
                block.parameter_count,
                block.saved_bytes,
                block.tp_again_bytes,
                inside,
            )
            if key not in seen:
                seen[key] = len(blocks)
                run = _as_run(block, inside, loss_parallel)
                blocks.append(_on_shards(run) if experts_on_shards else run)
                streamed.append(inside)
            count[seen[key], unit] += 1
    attention = [any(k.kind == "attention" for k in block.kernels) for block in blocks]
    return BlockClasses(
        blocks=tuple(blocks),
        count=count[: len(blocks)],
        kernels=KernelTable.build(
            [
                (owner, block.expert_parameter_count / max(block.parameter_count, 1), k)
                for owner, block in enumerate(blocks)
                for k in block.kernels
            ],
            heads=[owner for owner, block in enumerate(blocks) if block.kind == "head"],
        ),
        has_attention=np.array(attention, dtype=bool),
        streamed=np.array(streamed, dtype=bool),
        region=region,
        gathered_bytes=np.array(
            [0.0 if loss_parallel else _head_bytes(block)[1] for block in blocks]
        ),
        logit_bytes=np.array([_head_bytes(block)[1] for block in blocks]),
        entered_bytes=np.array([_head_bytes(block)[0] for block in blocks]),
    )


def _reduced_units(graph: ModelGraph) -> range:
    """Units from the first with a rowwise layer to the last.

    What an embedding reduces, every rank has in full.
    """
    found = [
        unit
        for unit, (start, stop) in enumerate(graph.units)
        if any(
            block.tp_collectives and block.kind != "embedding"
            for block in graph.blocks[start:stop]
        )
    ]
    return range(found[0], found[-1] + 1) if found else range(0)


def _as_run(block: Block, inside: bool, loss_parallel: bool) -> Block:
    """A block as the executors run it under tp.

    Without loss parallelism the logits of a colwise head are gathered, so that loss and
    logits are whole on every tp rank; and outside the sequence-parallel region the
    residual stream is whole.
    """
    if block.kind == "head" and not loss_parallel:
        return replace(
            block,
            saved_tensor_bytes=0.0,
            saved_selective_tensor_bytes=0.0,
            kernels=tuple(_whole(k, {"local", "stream"}) for k in block.kernels),
        )
    if inside:
        return block
    return replace(block, kernels=tuple(_whole(k, {"stream"}) for k in block.kernels))


def _on_shards(block: Block) -> Block:
    """A block whose experts see a shard of the stream under sequence parallelism."""
    if block.kind != "expert":
        return block
    return replace(
        block,
        kernels=tuple(
            replace(k, style="stream") if k.style == "none" else k
            for k in block.kernels
        ),
    )


def _whole(kernel: Kernel, styles: set[str]) -> Kernel:
    return replace(kernel, style="none") if kernel.style in styles else kernel


def _head_bytes(block: Block) -> tuple[float, float]:
    """Bytes that a head's products read, m x k, and their logits, m x n."""
    if block.kind != "head":
        return 0.0, 0.0
    products = [k for k in block.kernels if k.kind == "matmul" and k.style == "colwise"]
    moved = [k.count * k.forward_bytes / (k.k + k.n) for k in products]
    return (
        sum(size * k.k for size, k in zip(moved, products, strict=True)),
        sum(size * k.n for size, k in zip(moved, products, strict=True)),
    )
