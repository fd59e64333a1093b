"""Facts of a request that neither the order of devices nor fitted constants change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.cost.kernels.blocks import (
    BlockClasses,
    ParameterCounts,
    count_parameters,
    gathered_beside,
    group_blocks,
)
from planner.cost.kernels.low_precision import peak_flops_per_s
from planner.graph import Fusion, ModelGraph
from planner.graph.chunked_loss import chunk_loss
from planner.graph.memo import once_per_graph
from planner.graph.residual import find_residual_blocks

__all__ = ["SharedFacts"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SharedFacts:
    """Everything that neither the order of devices nor fitted constants change.

    Found when first asked for; contexts of one request share one of these.

    Attributes:
        graph: The model.
        cluster: The machines.
        compute: Dtype that device types are compared in.
        loss_parallel: As :attr:`planner.cost.recipes.Recipe.loss_parallel`, or where
            the loss is computed in chunks; likewise experts_on_shards, fusion and
            fused_loss.
        loss_chunks: As in :class:`planner.schema.Strategy`.
    """

    graph: ModelGraph
    cluster: Cluster
    compute: str
    loss_parallel: bool
    experts_on_shards: bool
    fusion: Fusion
    fused_loss: bool
    loss_chunks: int

    @cached_property
    def on_gpu(self) -> bool:
        """True if no device type is a CPU process."""
        return all(device.backend != "gloo" for device in self.cluster.device_types)

    @cached_property
    def speed(self) -> Array:
        """Peak of each device type in the compute dtype (FLOP/s). Shape [T]."""
        return np.array(
            [
                peak_flops_per_s(device, self.compute)
                for device in self.cluster.device_types
            ]
        )

    @cached_property
    def memory_bytes(self) -> Array:
        """Memory of each device type. Shape [T]."""
        return np.array([device.memory_bytes for device in self.cluster.device_types])

    @cached_property
    def classes(self) -> BlockClasses:
        """Blocks of equal cost."""
        return _classes_as_run(
            self.graph,
            self.fusion,
            self.fused_loss,
            self.loss_chunks,
            self.loss_parallel,
            self.experts_on_shards,
        )

    @cached_property
    def parameter_counts(self) -> ParameterCounts:
        """Scalars of each unit."""
        return count_parameters(self.graph)

    @cached_property
    def gathered_beside(self) -> tuple[Index, Index]:
        """Units that are gathered before and after each, -1 for none. Shapes [U]."""
        return gathered_beside(self.graph)

    @cached_property
    def residual_blocks(self) -> NDArray[np.bool_]:
        """Mask of the units that are equal residual blocks. Shape [units]."""
        blocks = find_residual_blocks(self.graph).units
        return np.isin(self.graph.unit_names, blocks)


@once_per_graph
def _classes_as_run(
    graph: ModelGraph,
    fusion: Fusion,
    fused_loss: bool,
    loss_chunks: int,
    loss_parallel: bool,
    experts_on_shards: bool,
) -> BlockClasses:
    """Blocks of equal cost as executors run them, given fields of a request's facts."""
    run = chunk_loss(graph.with_kernels(fusion, loss=fused_loss), loss_chunks)
    found = group_blocks(run, loss_parallel, experts_on_shards)
    return replace(found, loss_bytes=found.loss_bytes / loss_chunks)
