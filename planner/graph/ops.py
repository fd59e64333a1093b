"""The ops of one forward and backward, and the data dependences between them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from planner.graph.model import KernelKind
from planner.schema.halo import Window

__all__ = ["Flow", "KernelCost", "OpGraph", "ParameterTensor", "read_flow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """Class and arithmetic of one op.

    Attributes:
        kind: Kind of the op, as in :class:`planner.graph.Kernel`, like batch, m, n, k.
        flops: FLOPs of the op itself.
        recompute_flops: FLOPs that only repeat work of the forward; not in ``flops``.
        selective: Whether its outputs are kept under selective recomputation.
        heads: Query heads of an attention op.
        kv_heads: Heads of an attention op's keys and values.
        kv_bytes: Bytes of an attention op's keys and values.
        windows: Of a convolution or a pooling, along each spatial dimension.
        sizes: Of its input along these.
        channels: Of its input, times its samples.
    """

    kind: KernelKind = "memory"
    batch: int = 1
    m: int = 1
    n: int = 1
    k: int = 1
    flops: float = 0.0
    recompute_flops: float = 0.0
    selective: bool = False
    heads: int = 0
    kv_heads: int = 0
    kv_bytes: float = 0.0
    windows: tuple[Window, ...] = ()
    sizes: tuple[int, ...] = ()
    channels: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTensor:
    """One distinct parameter.

    Attributes:
        name: FQN under which ``named_parameters()`` lists it first.
        aliases: Further FQNs of the same tensor.
        shape: As stored.
        dtype: Torch name.
        trainable: Whether it needs a gradient.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    trainable: bool


@dataclass(slots=True, kw_only=True)
class OpGraph:
    """Forward ops in program order, each with the cost of its backward folded in.

    Columns of equal length; storages are numbered, parameters among the inputs are
    negative: ``-1 - index``.

    Attributes:
        origin: Number of each op that equal ops of repeated modules share.
        names: Schema name of each op.
        modules: FQN of the module in whose forward it ran; "" for the root.
        kernels: Class and arithmetic of the forward op.
        inputs: Storages read.
        outputs: Storages written.
        random: Whether it draws random numbers.
        fusible: Whether it is pointwise or a reduction, which kernels may take in.
        forward_bytes: Activation bytes read and written. Shape [ops].
        weight_bytes: Parameter bytes read. Shape [ops].
        backward_flops: FLOPs of its backward, recomputation apart. Shape [ops].
        backward_bytes: Activation bytes that its backward moves. Shape [ops].
        recompute_flops: FLOPs that fused attention repeats. Shape [ops].
        transient: Largest unsaved working set of a backward op. Shape [ops].
        storage_bytes: Size of each storage. Shape [storages].
        storage_tensor: (shape, dtype) of each storage.
        sources: Storages that hold inputs, buffers and constants.
        constants: Storages that hold registered buffers.
        saves: (op, storage) that autograd keeps, each storage where it is kept first
            in each module.
        parameters: Distinct parameters in order of ``named_parameters()``.
        module_types: FQN to the name of the module's class.
        children: FQN to (child name, child FQN), in order of registration.
        linear: FQNs of modules that tensor parallelism can split, to ``linear``
            (``nn.Linear``), ``transposed`` (a linear layer whose weight is [in, out])
            or ``embedding`` (``nn.Embedding``).
        module_lists: FQNs of containers whose elements run one after another.
        called: FQNs of modules that are called, so that hooks on them run.
        around: (module, one that holds it) where the first is called while the second
            is not, so that hooks on the second do not run.
        aliases: FQN of a module that several hold to its other FQNs.
    """

    origin: list[int]
    names: list[str]
    modules: list[str]
    kernels: list[KernelCost]
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    random: list[bool]
    fusible: list[bool]
    forward_bytes: np.ndarray
    weight_bytes: np.ndarray
    backward_flops: np.ndarray
    backward_bytes: np.ndarray
    recompute_flops: np.ndarray
    transient: np.ndarray
    storage_bytes: np.ndarray
    storage_tensor: list[tuple[tuple[int, ...], str]]
    sources: set[int]
    constants: set[int]
    saves: list[tuple[int, int]]
    parameters: list[ParameterTensor] = field(default_factory=list)
    module_types: dict[str, str] = field(default_factory=dict)
    children: dict[str, tuple[str, ...]] = field(default_factory=dict)
    linear: dict[str, str] = field(default_factory=dict)
    module_lists: frozenset[str] = frozenset()
    called: frozenset[str] = frozenset()
    around: frozenset[tuple[str, str]] = frozenset()
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Data dependences between ops.

    Attributes:
        reads: (op that wrote it last, storage) for every storage that an op reads and
            another one made, by op.
        recomputable: Storages made from inputs and constants alone, without weights
            or random numbers.
    """

    reads: list[tuple[tuple[int, int], ...]]
    recomputable: frozenset[int]


def read_flow(graph: OpGraph) -> Flow:
    """Follow every storage from the op that writes it to the ops that read it."""
    writer: dict[int, int] = {}
    reads: list[tuple[tuple[int, int], ...]] = []
    constant = set(graph.sources)
    free: set[int] = set()
    for row, (ins, outs) in enumerate(zip(graph.inputs, graph.outputs, strict=True)):
        reads.append(tuple((writer[i], i) for i in ins if i in writer))
        known = all(i >= 0 and (i in constant or i in free) for i in ins)
        for storage in outs:
            writer[storage] = row
            if known and not graph.random[row]:
                free.add(storage)
            else:
                free.discard(storage)
                constant.discard(storage)
    return Flow(reads=reads, recomputable=frozenset(free))
