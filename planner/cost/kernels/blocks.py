"""A model as arrays: its distinct blocks, their kernels, and its parameters.

Blocks of equal cost form a class, so that a hundred equal layers are priced once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.graph import Block, Kernel, ModelGraph
from planner.graph.memo import once_per_graph

__all__ = [
    "KERNEL_KINDS",
    "KERNEL_STYLES",
    "BlockClasses",
    "KernelTable",
    "ParameterCounts",
    "Ties",
    "count_parameters",
    "gathered_beside",
    "group_blocks",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


#: In the order of :attr:`KernelTable.style` and :attr:`KernelTable.kind`.
KERNEL_STYLES = ("colwise", "rowwise", "local", "stream", "none", "both")

KERNEL_KINDS = ("matmul", "attention", "conv", "embedding", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """Distinct kernels of a model as arrays of shape [kernels].

    Attributes:
        owner: Index of the block class that each kernel belongs to.
        style: Index into colwise, rowwise, local, stream, none, both.
        kind: Index into matmul, attention, conv, embedding, memory.
        expert: Whether ep divides the weights.
        trained: Whether there are weights that get a gradient.
        low_precision: Whether recipes for float8 and float4 convert it: products with
            weights but those of heads. Sources: torchtitan, docs/float8.md, which
            filters ``output``; Megatron-Core, GPTModel.output_layer, which is no module
            of Transformer Engine.
    """

    owner: NDArray[np.int64]
    style: NDArray[np.int64]
    kind: NDArray[np.int64]
    batch: Array
    m: Array
    n: Array
    k: Array
    count: Array
    forward_flops: Array
    backward_flops: Array
    recompute_flops: Array
    forward_bytes: Array
    backward_bytes: Array
    weight_bytes: Array
    expert: NDArray[np.bool_]
    trained: NDArray[np.bool_]
    low_precision: NDArray[np.bool_]

    @classmethod
    def build(
        cls,
        kernels: Sequence[tuple[int, Kernel]],
        heads: Collection[int] = (),
    ) -> KernelTable:
        """Build a table of (owner, kernel); ``heads`` are owners."""

        def column(name: str) -> Array:
            return np.array([float(getattr(kernel, name)) for _, kernel in kernels])

        return cls(
            owner=np.array([owner for owner, _ in kernels], dtype=np.int64),
            style=np.array(
                [KERNEL_STYLES.index(k.style) for _, k in kernels], dtype=np.int64
            ),
            kind=np.array(
                [KERNEL_KINDS.index(k.kind) for _, k in kernels], dtype=np.int64
            ),
            expert=np.array([k.expert for _, k in kernels], dtype=bool),
            trained=np.array(
                [k.trained and k.weight_bytes > 0 for _, k in kernels], dtype=bool
            ),
            low_precision=np.array(
                [
                    k.kind == "matmul" and k.weight_bytes > 0 and owner not in heads
                    for owner, k in kernels
                ],
                dtype=bool,
            ),
            **{
                name: column(name)
                for name in (
                    "batch",
                    "m",
                    "n",
                    "k",
                    "count",
                    "forward_flops",
                    "backward_flops",
                    "recompute_flops",
                    "forward_bytes",
                    "backward_bytes",
                    "weight_bytes",
                )
            },
        )


@dataclass(frozen=True, kw_only=True)
class BlockClasses:
    """Distinct blocks and where they are.

    Attributes:
        blocks: One of each class.
        count: How many blocks of a class a unit has. Shape [classes, units].
        kernels: Of all classes; ``owner`` is the class.
        streamed: Per class, whether sequence parallelism divides its residual stream:
            it reaches from the first unit that tp reduces in to the last.
        region: Those units.
        gathered_bytes: Outputs that tp gathers whole, at the traced batch. [classes].
        logit_bytes: Logits of heads that tp splits, at the traced batch. [classes].
        loss_bytes: Logits of all heads. Shape [classes].
        entered_bytes: Inputs of the same, whose gradients tp sums up. [classes].
    """

    blocks: tuple[Block, ...]
    count: Array
    kernels: KernelTable
    streamed: NDArray[np.bool_]
    region: range
    gathered_bytes: Array
    logit_bytes: Array
    loss_bytes: Array
    entered_bytes: Array

    @property
    def low_precision(self) -> NDArray[np.bool_]:
        """Blocks with products that recipes for float8 and float4 convert. [blocks]."""
        found = np.zeros(len(self.blocks), dtype=bool)
        found[self.kernels.owner[self.kernels.low_precision]] = True
        return found

    @cached_property
    def whole(self) -> NDArray[np.bool_]:
        """Blocks of which every rank of cp computes all. Shape [classes]."""
        return np.array([block.whole for block in self.blocks], dtype=bool)

    def activation_scale(self, scale: Array, cp: Index) -> Array:
        """Activations of a rank over those of the trace. Shape [combinations, classes].

        Args:
            scale: Of blocks that cp divides. Shape [combinations].
            cp: Degree. Shape [combinations].
        """
        ways = np.where(self.whole, cp[:, None], 1)
        return np.asarray(scale[:, None] * ways)

    @cached_property
    def members(self) -> Array:
        """1 where a kernel belongs to a class. Shape [kernels, classes]."""
        owner = self.kernels.owner
        found = np.zeros((len(owner), len(self.blocks)))
        found[np.arange(len(owner)), owner] = 1.0
        return found

    def per_unit(self, values: Array) -> Array:
        """Sums of the blocks of each unit. Shape [..., classes] to [..., U].

        Models without tp or experts have nothing but zeros to sum.
        """
        if not values.any():
            return np.zeros((*values.shape[:-1], self.count.shape[1]))
        return np.asarray(values @ self.count)

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
    return BlockClasses(
        blocks=tuple(blocks),
        count=count[: len(blocks)],
        kernels=KernelTable.build(
            [(owner, k) for owner, block in enumerate(blocks) for k in block.kernels],
            heads=[owner for owner, block in enumerate(blocks) if block.kind == "head"],
        ),
        streamed=np.array(streamed, dtype=bool),
        region=region,
        gathered_bytes=np.array(
            [0.0 if loss_parallel else _head_bytes(block)[1] for block in blocks]
        ),
        logit_bytes=np.array([_head_bytes(block)[1] for block in blocks]),
        loss_bytes=np.array([_logit_bytes(block) for block in blocks]),
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


def _logit_bytes(block: Block) -> float:
    """Bytes of a head's logits, whether tp splits them or not."""
    if block.kind != "head":
        return 0.0
    made = [
        k.count * k.forward_bytes / (k.k + k.n) * k.n
        for k in block.kernels
        if k.kind == "matmul"
    ]
    return max(made, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """Weights that several units read, as links between neighbouring readers.

    A stage holds one copy of a tied weight, whichever of its readers it has: a copy
    more than the model for each link whose ends lie on different stages. Arrays of
    shape [links].

    Attributes:
        first: Unit of the earlier reader.
        second: Unit of the next reader, after ``first``.
        split: 1 if tp divides the weight.
        scalars: Of the weight.
        trained: Of its gradient: ``scalars``, or 0 if it is frozen.
    """

    first: Index
    second: Index
    split: Index
    scalars: Array
    trained: Array

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Scalars of every unit, tied ones in the unit that reads them first.

    Attributes:
        scalars: By [of experts, dimensions that tp splits, unit]. Shape [2, 3, units].
        trained: Those of them that have a gradient. Shape [2, 3, units].
        tensors: Trained parameter tensors. Shape [units].
        ties: What further units read.
    """

    scalars: Array
    trained: Array
    tensors: Array
    ties: Ties


#: Dimensions of a parameter that tp splits, by style; one for all others.
_SPLIT_DIMS = {"none": 0, "both": 2}


@once_per_graph
def gathered_beside(graph: ModelGraph) -> tuple[Index, Index]:
    """Units that are gathered before and after each, -1 for none. Shapes [U].

    Units of vectors alone are gathered along with the root.
    """
    matrices = [p.block for p in graph.parameters if len(p.shape) > 1]
    alone = np.unique(graph.unit_of_block[np.array(matrices, dtype=np.int64)])
    units = np.arange(len(graph.units))
    groups = np.array([-1, *alone, -1])
    before = np.searchsorted(alone, units)
    behind = np.searchsorted(alone, units, side="right") + 1
    return groups[before], groups[behind]


@once_per_graph
def count_parameters(graph: ModelGraph) -> ParameterCounts:
    """Count a model's parameters unit by unit."""
    unit_of_block = graph.unit_of_block.tolist()
    scalars, trained = np.zeros((2, 2, 3, len(graph.units)))
    tensors = np.zeros(len(graph.units))
    links: list[tuple[int, int, int, float, float]] = []
    for parameter in graph.parameters:
        split, size = _SPLIT_DIMS.get(parameter.style, 1), float(parameter.numel)
        unit = unit_of_block[parameter.block]
        place = int(parameter.expert), split, unit
        scalars[place] += size
        if parameter.trainable:
            trained[place] += size
            tensors[unit] += 1
        own = size if parameter.trainable else 0.0
        readers = sorted({unit_of_block[block] for block in parameter.readers})
        ways = min(split, 1)
        links += [
            (first, second, ways, size, own) for first, second in pairwise(readers)
        ]
    columns = np.array(links, dtype=np.float64).reshape(-1, 5).T
    first, second, divided = columns[:3].astype(np.int64)
    return ParameterCounts(
        scalars=scalars,
        trained=trained,
        tensors=tensors,
        ties=Ties(
            first=first,
            second=second,
            split=divided,
            scalars=columns[3].copy(),
            trained=columns[4].copy(),
        ),
    )
