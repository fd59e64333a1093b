"""Ops of a model that ranks can compute on shards of samples, and where these end.

Convolutions and poolings read the halo of a shard, batch norms put statistics
together, and ops on single values run on a shard as they are; everything else reads
whole samples, which are gathered before it. It is what
:mod:`executors.strategies.shards` does to the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.graph.ops import OpGraph
from planner.schema.halo import SpatialLayer, best_split

__all__ = ["Space", "read_space"]

#: Ops that compilers fuse and that read more than single values.
_REDUCTIONS = frozenset(
    {
        "_fused_rms_norm",
        "_log_softmax",
        "_softmax",
        "amax",
        "index",
        "index_select",
        "mean",
        "native_dropout",
        "native_layer_norm",
        "nll_loss_forward",
        "sum",
        "var_mean",
    }
)
_BATCH_NORMS = frozenset(
    {
        "_batch_norm_with_update",
        "_native_batch_norm_legit",
        "cudnn_batch_norm",
        "native_batch_norm",
    }
)
#: Least share of the FLOPs that shards must take from a rank.
_LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Division of a model's samples.

    Attributes:
        sizes: Of a sample along its spatial dimensions; empty if it is not divided.
        layers: Convolutions and poolings on shards, by op.
        divided: Ops on shards.
        gathered: Bytes that are gathered before an op, by op.
        whole: Reason why samples cannot be divided; None if they can.
    """

    sizes: tuple[int, ...] = ()
    layers: Mapping[int, SpatialLayer] = field(default_factory=dict)
    divided: frozenset[int] = frozenset()
    gathered: Mapping[int, float] = field(default_factory=dict)
    whole: str | None = None


def read_space(graph: OpGraph) -> Space:
    """Follow samples from the inputs of a model to the ops that need them whole.

    Args:
        graph: All forward ops.
    """
    first = next((cost for cost in graph.kernels if cost.windows), None)
    if first is None:
        return Space(whole="it has no convolutions")
    dims = len(first.sizes)
    inputs = {
        storage
        for storage in graph.sources - graph.constants
        if _spatial(graph, storage, dims) and _is_float(graph, storage)
    }
    largest = max((_spatial(graph, i, dims) for i in inputs), default=())
    inputs = {i for i in inputs if _spatial(graph, i, dims) == largest}
    if not inputs:
        return Space(whole="no input of its forward is an image or a volume")
    return _Walk(graph, dims, inputs).space(largest)


def _spatial(graph: OpGraph, storage: int, dims: int) -> tuple[int, ...]:
    """Spatial sizes of a storage; empty if it has none."""
    shape = graph.storage_tensor[storage][0]
    return tuple(shape[2:]) if len(shape) == dims + 2 else ()


def _is_float(graph: OpGraph, storage: int) -> bool:
    return "float" in graph.storage_tensor[storage][1]


class _Walk:
    """One pass over the ops of a model."""

    def __init__(self, graph: OpGraph, dims: int, inputs: set[int]) -> None:
        self.graph, self.dims = graph, dims
        self.shards = set(inputs)
        #: Shards without a gradient: inputs, and what is made of these alone.
        self.untrained = set(inputs)
        #: Storages that were made of samples, divided or not.
        self.samples = set(inputs)
        self.layers: dict[int, SpatialLayer] = {}
        self.divided: set[int] = set()
        self.gathered: dict[int, float] = {}
        self.whole: str | None = None
        for row in range(len(graph)):
            self._step(row)

    def space(self, sizes: tuple[int, ...]) -> Space:
        """Return the result, or why there is none."""
        costs = self.graph.kernels
        total = sum(cost.flops for cost in costs)
        shared = sum(costs[row].flops for row in self.divided)
        if self.whole is None and shared < _LEAST_SHARE * total:
            self.whole = (
                f"shards of a sample would take {shared / max(total, 1):.0%} of its "
                f"FLOPs, the rest needs whole samples"
            )
        layers = tuple(self.layers.values())
        if self.whole is None and best_split(layers, 2) is None:
            self.whole = "no split of a sample serves every convolution"
        if self.whole is not None:
            return Space(whole=self.whole)
        return Space(
            sizes=sizes,
            layers=self.layers,
            divided=frozenset(self.divided),
            gathered=self.gathered,
        )

    def _is_loss(self, row: int, name: str) -> bool:
        """Return True for the parts of a cross entropy of every value's classes."""
        graph = self.graph
        if name == "_log_softmax":
            made = set(graph.outputs[row])
            return any(
                made & set(graph.inputs[later])
                and graph.names[later] == "aten::nll_loss2d_forward"
                for later in range(row + 1, len(graph))
            )
        return name == "nll_loss2d_forward"

    def _step(self, row: int) -> None:
        graph = self.graph
        reads = [i for i in graph.inputs[row] if i >= 0]
        shards = [i for i in reads if i in self.shards]
        if any(i in self.samples for i in reads):
            self.samples.update(graph.outputs[row])
        if shards and self._on_shards(row, shards[0]):
            self.divided.add(row)
            if all(i in self.untrained for i in graph.inputs[row]):
                self.untrained.update(graph.outputs[row])
            made = graph.outputs[row]
            self.shards.update(i for i in made if _spatial(graph, i, self.dims))
            return
        if shards:
            self._gather(row, shards)
        elif graph.kernels[row].windows and any(i in self.samples for i in reads):
            self._refuse(row, "convolves what was made of whole samples")
        self.shards.difference_update(graph.outputs[row])

    def _gather(self, row: int, shards: list[int]) -> None:
        graph = self.graph
        self.gathered[row] = sum(float(graph.storage_bytes[i]) for i in shards)
        if graph.kernels[row].windows:
            self._refuse(row, "is a convolution that shards cannot make")
        elif graph.random[row]:
            self._refuse(row, "draws random numbers for samples that ranks would share")

    def _refuse(self, row: int, why: str) -> None:
        if self.whole is None:
            where = self.graph.modules[row] or "its forward"
            name = self.graph.names[row].removeprefix("aten::")
            self.whole = f"{where} ({name}) {why}"

    def _on_shards(self, row: int, shard: int) -> bool:
        """Return True if an op runs on shards."""
        graph, dims = self.graph, self.dims
        cost, name = graph.kernels[row], graph.names[row].removeprefix("aten::")
        sizes = _spatial(graph, shard, dims)
        if cost.windows:
            if cost.sizes[-dims:] != sizes or len(cost.windows) < dims:
                return False
            layer = SpatialLayer(
                name=graph.modules[row],
                sizes=sizes,
                windows=cost.windows[-dims:],
                channels=cost.channels,
                trained=shard not in self.untrained,
            )
            if best_split((layer,), 2) is None:
                return False
            self.layers[row] = layer
            return True
        if graph.random[row] or not sizes:
            return False
        if name in _BATCH_NORMS or self._is_loss(row, name):
            return True
        if not graph.fusible[row] or name in _REDUCTIONS:
            return False
        return all(_spatial(graph, i, dims) == sizes for i in graph.outputs[row])
