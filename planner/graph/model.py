"""ModelGraph: the computation graph of a model, coarsened into blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from planner.errors import StrategyError
from planner.schema.fused_kernels import KernelKind as FusedKind
from planner.schema.halo import SpatialLayer

__all__ = [
    "WHOLE_BATCH",
    "Block",
    "BlockKind",
    "Edge",
    "Fusion",
    "Fusions",
    "Kernel",
    "KernelKind",
    "ModelGraph",
    "Parameter",
]

BlockKind = Literal[
    "attention",
    "mlp",
    "expert",
    "conv",
    "recurrent",
    "scan",
    "embedding",
    "norm",
    "head",
    "other",
]
KernelKind = Literal["matmul", "attention", "conv", "embedding", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Equal ops of one block, counted.

    For ``matmul`` an output of m x n with inner length k, ``batch`` times; m is the
    dimension that grows with the microbatch (tokens). For ``attention`` batch is
    samples x heads, m query length, n key length, k head size (mean of the sizes of
    keys and values). For ``memory`` (elementwise, norms, copies) only bytes count.

    Attributes:
        kind: Kind of op, which chooses the efficiency curve.
        forward_flops: FLOPs of one op.
        backward_flops: FLOPs of its backward, without recomputation in fused attention.
        recompute_flops: FLOPs that fused attention repeats in its backward.
        forward_bytes: Activation bytes one forward op reads and writes.
        backward_bytes: Activation bytes its backward reads and writes.
        weight_bytes: Parameter bytes that one op reads.
        count: Number of such ops in the block.
        trained: Whether its backward makes a gradient of its weights; without meaning
            if it has none.
        style: Division by tp: ``colwise`` divides n, ``rowwise`` divides k,
            ``local`` divides batch or features without communication (attention heads,
            activations between a colwise and a rowwise product), ``both`` divides n and
            k, where copies compute parts of the layers alone, ``stream`` is the
            residual stream (divided by sequence parallelism alone), ``none`` is not
            divided.
        expert: Whether ep divides its weights.
    """

    kind: KernelKind
    batch: int = 1
    m: int = 1
    n: int = 1
    k: int = 1
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    recompute_flops: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    weight_bytes: float = 0.0
    count: int = 1
    trained: bool = True
    style: Literal["colwise", "rowwise", "local", "stream", "none", "both"] = "none"
    expert: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One distinct parameter tensor.

    Attributes:
        name: FQN under which ``named_parameters()`` lists it first.
        shape: Shape of the whole tensor.
        dtype: Torch name, without ``torch.``.
        block: Index of the block that uses it first.
        aliases: Further FQNs of the same tensor (tied weights).
        readers: Indices of all blocks that read it, if it is tied and they lie in more
            than one unit: every stage with one of them holds a copy of its own.
        trainable: Whether it needs a gradient.
        expert: Whether ep divides it.
        style: Division by tp; ``none`` if every tp rank has it whole, ``both`` if
            both dimensions are divided.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    block: int
    aliases: tuple[str, ...] = ()
    readers: tuple[int, ...] = ()
    trainable: bool = True
    expert: bool = False
    style: Literal["colwise", "rowwise", "vocab", "none", "both"] = "none"

    @property
    def numel(self) -> int:
        """Number of scalars."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A vertex of the graph: ops that stay together, with figures of the traced batch.

    Attributes:
        index: Position in program order, which is topological.
        name: FQN of the module that the ops belong to, ``model.layers.3.self_attn``.
        layer: FQN of the pipeline unit it lies in, ``model.layers.3``; blocks of one
            unit are contiguous, a stage holds whole units.
        kind: Kind of its main ops.
        modules: FQNs of all leaf modules whose ops are in it.
        repeat: Equal for blocks of equal structure and cost.
        forward_flops: FLOPs of one forward.
        backward_flops: FLOPs of one backward, recomputation apart.
        recompute_flops: FLOPs that fused attention repeats in backward.
        parameter_count: Scalars of the parameters first used here.
        parameter_bytes: Bytes of these parameters, as traced.
        saved_bytes: Bytes kept for backward with ``recompute="none"``, storages once.
        saved_tensor_bytes: The part of saved_bytes that tp divides (inside
            colwise ... rowwise, heads); the rest is the residual stream.
        saved_gathered_bytes: The part of the rest that colwise layers read: sequence
            parallelism has it whole on every rank.
        saved_selective_bytes: Bytes kept under ``recompute="selective"``: outputs of
            products and fused attention, the rest computed again.
        saved_selective_tensor_bytes: The part of that which tp divides.
        boundary_bytes: Tensors that enter the unit; kept under ``recompute="full"``.
            Set on the first block of each unit, 0 on the others.
        transient_bytes: Largest working set of one op beyond what is saved.
        kernels: The ops, equal ones counted.
        heads: Attention heads, as the fused op saw them; 0 without attention.
        kv_heads: Key/value heads before they are repeated.
        tp_collectives: All-reduces of ``tp_collective_bytes`` that tp needs in one
            forward (rowwise outputs, or the all-gather + reduce-scatter pair that
            replaces each under sequence parallelism); backward needs as many.
        tp_collective_bytes: Bytes of all of them, at the traced batch.
        tp_again_bytes: The part of them that recomputation repeats, which ends where
            the unit has saved its last tensor.
        expert_bytes: Activation bytes that one forward sends to experts and gets
            back, tokens x top-k x hidden x bytes, counted once; 0 without experts.
        expert_parameter_count: The part of parameter_count that ep divides.
        sequence_bytes: Bytes of keys and values that context parallelism passes on
            in one forward; 0 without attention.
        spatial: Convolutions and poolings that ranks can compute on shards of samples.
        whole: Whether every rank computes all of it where ranks have shards.
        sample_bytes: Bytes of whole samples that it then gathers in one forward.
        measured_forward_s: Seconds of one forward where a profile gave them.
        measured_backward_s: Seconds of one backward where a profile gave them.
    """

    index: int
    name: str
    layer: str
    kind: BlockKind
    modules: tuple[str, ...] = ()
    repeat: str = ""
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    recompute_flops: float = 0.0
    parameter_count: int = 0
    parameter_bytes: float = 0.0
    saved_bytes: float = 0.0
    saved_tensor_bytes: float = 0.0
    saved_gathered_bytes: float = 0.0
    saved_selective_bytes: float = 0.0
    saved_selective_tensor_bytes: float = 0.0
    boundary_bytes: float = 0.0
    transient_bytes: float = 0.0
    kernels: tuple[Kernel, ...] = ()
    heads: int = 0
    kv_heads: int = 0
    tp_collectives: int = 0
    tp_collective_bytes: float = 0.0
    tp_again_bytes: float = 0.0
    expert_bytes: float = 0.0
    expert_parameter_count: int = 0
    sequence_bytes: float = 0.0
    spatial: tuple[SpatialLayer, ...] = ()
    whole: bool = False
    sample_bytes: float = 0.0
    measured_forward_s: float | None = None
    measured_backward_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Tensors that one block makes and another reads.

    Attributes:
        source: Index of the making block.
        target: Index of the reading block, larger than source.
        tensors: (shape, dtype) of each tensor, once.
        bytes: Sum of their bytes.
        recomputable: Bytes that need no sending because they are made from inputs
            and constants alone (position tables, masks).
        identities: A number for each tensor; the same tensor on several edges has the
            same one. Empty where only sizes are known.
        sent: Bytes that must be sent for each tensor, 0 for a recomputable one.
    """

    source: int
    target: int
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    bytes: float
    recomputable: float = 0.0
    identities: tuple[int, ...] = ()
    sent: tuple[float, ...] = ()


#: Begins the assumption that says why a batch is not divided.
WHOLE_BATCH = "batches stay whole: "
#: Which ops of a block become one kernel: none; those of a norm; those that other
#: hand-written kernels cover, too; whatever a compiler fuses.
Fusion = Literal["none", "norms", "kernels", "compiled"]


@runtime_checkable
class Fusions(Protocol):
    """Blocks of a model by the kernels that a framework makes of their ops."""

    def blocks(self, fusion: Fusion, *, loss: bool) -> tuple[Block, ...]:
        """Return the blocks under a fusion, with or without a fused loss."""

    def reordered(self, order: Sequence[int]) -> Fusions:
        """Return the same for blocks in another order."""


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """Directed acyclic graph of blocks, with what a planner must know of the model.

    All FLOPs and bytes are of one forward and backward of ``batch`` samples, in
    ``dtype``; they grow in proportion to the batch, parameters excepted.

    Attributes:
        name: Name for readers.
        ref: Origin of the model; see :class:`planner.schema.ModelReference`.
        batch: Samples in the traced batch.
        seq_len: Tokens per sample; None without a sequence.
        dtype: Compute dtype of the trace.
        inputs: (keyword, shape, dtype, high) of each traced input, batch dim first;
            ``high`` bounds synthetic integers, None for floats.
        values: Input to known integers of its first sample, as (value, times),
            None standing for any.
        sized_by: Inputs whose values are known, if sizes follow from them.
        in_turn: Units between which no pipeline can be cut, as they run in turn, in
            words; None if there are none.
        frozen: What forward changes or draws in Python, which stages of a pipeline
            would keep as it was; None if nothing is known to be.
        hooked: Parameter with a hook on its gradient; None if there is none.
        blocks: Blocks in program order.
        edges: Edges between blocks, sorted by (source, target).
        parameters: Every distinct parameter.
        buffers_bytes: Bytes of registered buffers.
        tp_dims: Dimension name to size that tp must divide, e.g. num_heads: 32.
        sharding: Pattern to style, ready for :class:`planner.schema.TensorSharding`.
        whole: Pattern of linear layers that tp cannot split although they pair up, to
            the reason, in words that may follow their names.
        whole_stream: Reason why sequence parallelism cannot divide the residual stream;
            None if it can.
        mixing: Patterns of the layers between which tokens mix; sequence parallelism
            needs all of them split by tp.
        batch_norm_values: Fewest values a channel that a batch norm takes its
            statistics of in one sample; None without batch norms.
        spatial_sizes: Sizes of a sample along the dimensions that convolutions go
            over; empty unless ranks can have shards of it.
        whole_sample: Reason why they cannot; None if they can.
        num_experts: Experts per MoE layer; 0 without.
        attention: Whether every attention is causal, or every one full; None if there
            are several kinds, masks or dropout, other ops that mix tokens, or no
            positions to tell: then cp does not apply.
        whole_sequence: Reason why context parallelism cannot divide sequences; None if
            ``attention`` is known.
        causal: Whether every fused kernel of attention is causal, where ``attention``
            does not say so.
        fused: Kind of assumed kernel to the number of places in which it stands in for
            captured code, see :mod:`planner.graph.fused_kernels`; None if the code is
            priced as it is.
        captured: The model with the code that it was read with, where others stand in.
        assumptions: Guesses made while tracing.
        config: Facts to show (hidden size, layers …), JSON scalars.
        fusions: The blocks with fused kernels; None where the ops are not known.
    """

    #: For documents that hold graphs.
    __pydantic_config__: ClassVar = {"arbitrary_types_allowed": True}

    name: str
    ref: str | None = None
    batch: int
    seq_len: int | None
    dtype: str
    inputs: tuple[tuple[str, tuple[int, ...], str, int | None], ...] = ()
    sized_by: tuple[str, ...] = ()
    in_turn: str | None = None
    frozen: str | None = None
    hooked: str | None = None
    values: Mapping[str, tuple[tuple[int | None, int], ...]] = field(
        default_factory=dict
    )
    blocks: tuple[Block, ...] = field(repr=False)
    edges: tuple[Edge, ...] = field(repr=False)
    parameters: tuple[Parameter, ...] = field(repr=False)
    buffers_bytes: float = 0.0
    tp_dims: Mapping[str, int] = field(default_factory=dict)
    sharding: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    whole_stream: str | None = None
    mixing: tuple[str, ...] = ()
    batch_norm_values: int | None = None
    spatial_sizes: tuple[int, ...] = ()
    whole_sample: str | None = None
    num_experts: int = 0
    attention: Literal["causal", "full"] | None = None
    whole_sequence: str | None = None
    causal: bool = False
    fused: Mapping[FusedKind, int] | None = None
    captured: ModelGraph | None = field(default=None, repr=False, compare=False)
    assumptions: tuple[str, ...] = ()
    config: Mapping[str, int | float | str] = field(default_factory=dict)
    fusions: Fusions | None = field(default=None, repr=False, compare=False)

    @property
    def whole_batch(self) -> str:
        """Reason why a batch is not divided; empty if it may be, or none is known."""
        told = (one for one in self.assumptions if one.startswith(WHOLE_BATCH))
        return next(told, "").removeprefix(WHOLE_BATCH)

    @property
    def uncut(self) -> str | None:
        """Reason why no pipeline can cut the model; None if one can."""
        if self.sized_by:
            return (
                f"a model in which sizes follow from the values of "
                f"{', '.join(self.sized_by)}, and stages have fixed sizes"
            )
        if self.frozen:
            return (
                f"a model of which forward {self.frozen}, which stages, whose graphs "
                f"are made once, would keep as it was"
            )
        if self.in_turn:
            return (
                f"a model in which {self.in_turn}, and a stage runs once a microbatch"
            )
        return None

    @cached_property
    def spatial(self) -> tuple[SpatialLayer, ...]:
        """Convolutions and poolings on shards of samples; empty if there are none."""
        if not self.spatial_sizes:
            return ()
        return tuple(layer for block in self.blocks for layer in block.spatial)

    @cached_property
    def num_parameters(self) -> int:
        """Number of scalars, tied tensors once."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of the forward of the traced batch."""
        return sum(block.forward_flops for block in self.blocks)

    @cached_property
    def backward_flops(self) -> float:
        """FLOPs of its backward, recomputation inside fused attention apart."""
        return sum(block.backward_flops for block in self.blocks)

    @cached_property
    def saved_bytes(self) -> float:
        """Bytes kept for backward, at the traced batch, without recomputation."""
        return sum(block.saved_bytes for block in self.blocks)

    @cached_property
    def units(self) -> tuple[tuple[int, int], ...]:
        """Half-open block ranges of the pipeline units, in order."""
        starts = [
            block.index
            for previous, block in zip((None, *self.blocks), self.blocks, strict=False)
            if previous is None or previous.layer != block.layer
        ]
        return tuple(zip(starts, [*starts[1:], len(self.blocks)], strict=True))

    @cached_property
    def unit_names(self) -> tuple[str, ...]:
        """FQN of each pipeline unit."""
        return tuple(self.blocks[start].layer for start, _ in self.units)

    @cached_property
    def unit_of_block(self) -> np.ndarray:
        """Index of the pipeline unit that each block lies in. Shape [blocks]."""
        bounds = np.array(self.units, dtype=np.int64).reshape(-1, 2)
        return np.repeat(np.arange(len(bounds)), bounds[:, 1] - bounds[:, 0])

    @cached_property
    def cut_bytes(self) -> np.ndarray:
        """Bytes that cross the cut after each unit but the last. Shape [units - 1].

        A tensor that several later units read crosses each cut once; recomputable
        bytes are left out. Source: difference array over producer to last reader.
        """
        steps = np.zeros(len(self.units) + 1)
        for source, readers, sent in self.unit_tensors:
            steps[source] += sent
            steps[max(readers)] -= sent
        return np.cumsum(steps)[: len(self.units) - 1]

    @cached_property
    def unit_tensors(self) -> tuple[tuple[int, frozenset[int], float], ...]:
        """Tensors between blocks: unit that makes each, units that read it, bytes.

        Recomputable bytes, which need no sending, are left out.
        """
        unit_of = self.unit_of_block
        readers: dict[tuple[int, object], set[int]] = {}
        size: dict[tuple[int, object], float] = {}
        for edge in self.edges:
            parts: tuple[tuple[object, float], ...] = tuple(
                zip(edge.identities, edge.sent, strict=True)
            ) or ((edge.tensors, edge.bytes - edge.recomputable),)
            for identity, sent in parts:
                key = (edge.source, identity)
                readers.setdefault(key, set()).add(int(unit_of[edge.target]))
                size[key] = sent
        return tuple(
            (int(unit_of[key[0]]), frozenset(units), size[key])
            for key, units in readers.items()
        )

    @cached_property
    def unit_reads(self) -> tuple[frozenset[int], ...]:
        """Units of which each unit reads something that must be sent."""
        found: list[set[int]] = [set() for _ in self.units]
        for source, readers, sent in self.unit_tensors:
            for unit in readers - {source}:
                if sent > 0:
                    found[unit].add(source)
        return tuple(frozenset(units) for units in found)

    def with_kernels(self, fusion: Fusion, *, loss: bool) -> ModelGraph:
        """Return the model as a framework runs it; see :mod:`planner.graph.fusion`.

        Args:
            fusion: Which ops become one kernel.
            loss: Whether softmax and cross entropy do.
        """
        if self.fusions is None or (fusion == "none" and not loss):
            return self
        return replace(self, blocks=self.fusions.blocks(fusion, loss=loss))

    def reordered(self, names: Sequence[str]) -> ModelGraph:
        """Return the model with its units in another order.

        Args:
            names: All units, each after the units that it reads.

        Raises:
            StrategyError: If a unit comes before one that it reads.
        """
        number = {name: index for index, name in enumerate(self.unit_names)}
        order = [number[name] for name in names]
        done: set[int] = set()
        for unit in order:
            late = self.unit_reads[unit] - done
            if late:
                raise StrategyError(
                    f"the order differs: {self.unit_names[unit]!r} stands before "
                    f"{self.unit_names[min(late)]!r}, which it reads; put it behind"
                )
            done.add(unit)
        blocks = [block for unit in order for block in range(*self.units[unit])]
        place = {old: new for new, old in enumerate(blocks)}
        captured = self.captured and self.captured.reordered(names)
        moved = (
            replace(edge, source=place[edge.source], target=place[edge.target])
            for edge in self.edges
        )
        # Edges that are turned round are recomputable: each stage makes them anew.
        edges = (edge for edge in moved if edge.source < edge.target)
        return replace(
            self,
            blocks=tuple(
                replace(self.blocks[old], index=new) for new, old in enumerate(blocks)
            ),
            edges=tuple(sorted(edges, key=lambda edge: (edge.source, edge.target))),
            parameters=tuple(
                replace(
                    one,
                    block=min(place[block] for block in one.readers or (one.block,)),
                    readers=tuple(sorted(place[block] for block in one.readers)),
                )
                for one in self.parameters
            ),
            fusions=self.fusions and self.fusions.reordered(blocks),
            captured=captured,
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data, for caches and ``meshwright explain --json``."""
        plain = asdict(replace(self, fusions=None, captured=None))
        del plain["fusions"], plain["captured"]
        return json.loads(json.dumps(plain))  # type: ignore[no-any-return]
