"""The op graph of a captured or profiled model, as a policy's encoder reads it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.ramp.graphs import OpGraph
from planner.graph import ModelGraph

__all__ = ["model_op_graph"]

Array = NDArray[np.float64]


def _over_mean(values: Array) -> Array:
    mean = values.mean()
    return np.log1p(values / mean) if mean > 0 else np.zeros_like(values)


def model_op_graph(graph: ModelGraph, name: str) -> OpGraph:
    """Both passes of a model: block i is mirrored by vertex n + i.

    Features are those of :func:`envs.ramp.graphs.op_graph`: compute is measured time
    where a profile has it and FLOPs elsewhere, memory what is kept of a block
    (parameters and saved tensors), activations what it sends on.

    Args:
        graph: The model.
        name: Of the job.
    """
    blocks, count = graph.blocks, len(graph.blocks)
    measured = any(block.measured_forward_s for block in blocks)
    forward = [
        b.measured_forward_s or 0.0 if measured else b.forward_flops for b in blocks
    ]
    backward = [
        b.measured_backward_s or 0.0 if measured else b.backward_flops for b in blocks
    ]
    compute = np.array([*forward, *backward], dtype=np.float64)
    memory = np.array([b.parameter_bytes + b.saved_bytes for b in blocks])
    sent, depth = np.zeros(count), np.zeros(count)
    # Sorted by source, and blocks are in topological order.
    for edge in graph.edges:
        sent[edge.source] = max(sent[edge.source], edge.bytes)
        depth[edge.target] = max(depth[edge.target], depth[edge.source] + 1)
    longest = 2 * depth.max() + 1
    nodes = np.stack(
        [
            np.repeat([0.0, 1.0], count),
            _over_mean(compute),
            np.tile(_over_mean(memory), 2),
            np.tile(_over_mean(sent), 2),
            np.concatenate([depth, longest - depth]) / longest,
        ],
        axis=1,
    )
    edges = np.array(
        [(edge.source, edge.target) for edge in graph.edges], dtype=np.int64
    ).reshape(-1, 2)
    back = edges[:, ::-1] + count
    turn = [[count - 1, 2 * count - 1]]
    return OpGraph(
        name=name,
        nodes=nodes.astype(np.float32),
        edge_index=np.ascontiguousarray(np.concatenate([edges, turn, back]).T),
    )
