"""What a trace leaves behind: forward ops as columns, and calls of repeated modules."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from planner.graph.ops import KernelCost

__all__ = ["Call", "Trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a repeated module.

    Attributes:
        module: FQN of the module called.
        template: Index of the traced call that this one repeats; -1 for a traced one.
        rows: Half-open range of ops traced; of a repeated call the one op that
            stands for it.
        saves: Half-open range of ``Trace.saves`` made by it.
        inputs: Storage of each tensor that went in.
        outputs: Storage of each tensor that came out.
    """

    module: str
    template: int
    rows: tuple[int, int]
    saves: tuple[int, int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(slots=True)
class Trace:
    """Forward ops in program order, as columns; views are left out.

    A backward op adds its cost to the forward op it belongs to. Storages have ids in
    order of appearance; parameters have negative ones, ``-1 - index``.

    Attributes:
        names: Schema name of each op, ``aten::mm``.
        modules: FQN of the module in whose forward it ran; "" outside any.
        kernels: Class and arithmetic of the forward op.
        inputs: Storages that it reads.
        outputs: Storages that it writes.
        random: Whether it draws random numbers.
        weight_bytes: Parameter bytes that it reads.
        transient: Bytes of the largest working set among its backward ops beyond
            what is saved.
        storage_bytes: Of each storage.
        storage_tensor: (shape, dtype) under which each storage was seen first.
        sources: Storages that hold inputs, buffers and constants.
        constants: Storages of registered buffers.
        saves: (op, storage, module) of each tensor kept for backward, as kept.
        calls: Of repeated modules, in order of their return.
        operations: Ops seen, backward and repeated ones included.
    """

    names: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    kernels: list[KernelCost] = field(default_factory=list)
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    random: list[bool] = field(default_factory=list)
    forward_bytes: array[float] = field(default_factory=lambda: array("d"))
    weight_bytes: array[float] = field(default_factory=lambda: array("d"))
    backward_flops: array[float] = field(default_factory=lambda: array("d"))
    backward_bytes: array[float] = field(default_factory=lambda: array("d"))
    recompute_flops: array[float] = field(default_factory=lambda: array("d"))
    transient: array[float] = field(default_factory=lambda: array("d"))
    storage_bytes: array[float] = field(default_factory=lambda: array("d"))
    storage_tensor: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)
    saves: list[tuple[int, int, str]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    operations: int = 0
