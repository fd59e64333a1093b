"""Distinct kernels of a model as arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.graph import Kernel

__all__ = ["KERNEL_KINDS", "KERNEL_STYLES", "KernelTable"]

Array = NDArray[np.float64]

#: In the order of :attr:`KernelTable.style` and :attr:`KernelTable.kind`.
KERNEL_STYLES = ("colwise", "rowwise", "local", "stream", "none")
KERNEL_KINDS = ("matmul", "attention", "conv", "embedding", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """Distinct kernels of a model as arrays of shape [kernels].

    Attributes:
        owner: Index of the block class that each kernel belongs to.
        style: Index into colwise, rowwise, local, stream, none.
        kind: Index into matmul, attention, conv, embedding, memory.
        expert_share: Share of the weights that ep divides.
        trained: Whether there are weights that get a gradient.
        narrow: Whether recipes for float8 and float4 convert it: products with weights
            but those of heads. Sources: torchtitan, docs/float8.md, which filters
            ``output``; Megatron-Core, GPTModel.output_layer, which is no module of
            Transformer Engine.
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
    expert_share: Array
    trained: NDArray[np.bool_]
    narrow: NDArray[np.bool_]

    @classmethod
    def build(
        cls,
        kernels: Sequence[tuple[int, float, Kernel]],
        heads: Collection[int] = (),
    ) -> KernelTable:
        """From (owner, expert share, kernel) triples; ``heads`` are owners."""

        def column(name: str) -> Array:
            return np.array([float(getattr(kernel, name)) for _, _, kernel in kernels])

        return cls(
            owner=np.array([owner for owner, _, _ in kernels], dtype=np.int64),
            style=np.array(
                [KERNEL_STYLES.index(k.style) for _, _, k in kernels], dtype=np.int64
            ),
            kind=np.array(
                [KERNEL_KINDS.index(k.kind) for _, _, k in kernels], dtype=np.int64
            ),
            expert_share=np.array([share for _, share, _ in kernels]),
            trained=np.array(
                [k.trained and k.weight_bytes > 0 for _, _, k in kernels], dtype=bool
            ),
            narrow=np.array(
                [
                    k.kind == "matmul" and k.weight_bytes > 0 and owner not in heads
                    for owner, _, k in kernels
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
