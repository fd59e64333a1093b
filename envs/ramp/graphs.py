"""Graphs for the encoders of policies: ops of each job, servers of the cluster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envs.ramp.job import RampJob
from envs.ramp.topology import RampTopology
from planner.graph import ModelGraph

__all__ = [
    "NUM_OP_FEATURES",
    "OpGraph",
    "device_edges",
    "model_op_graph",
    "op_graph",
]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Index = NDArray[np.int64]

#: Features of an op: its pass, three shares and its depth.
NUM_OP_FEATURES = 5


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class OpGraph:
    """Graph of a job's ops: n forward ops, then their mirror images.

    Attributes:
        name: Name of the job.
        nodes: 1 for an op of the backward pass; its compute time, memory and
            activations as log(1 + value over the job's mean), so that neither units nor
            the size of a job matter; its depth over the largest. Shape [2 n,
            NUM_OP_FEATURES].
        edge_index: Sources and targets. Shape [2, edges].
    """

    name: str
    nodes: Floats
    edge_index: Index


def _over_mean(values: Array) -> Array:
    mean = values.mean()
    return np.log1p(values / mean) if mean > 0 else np.zeros_like(values)


def op_graph(job: RampJob) -> OpGraph:
    """Make the graph of both passes of a job: op n + i mirrors forward op i."""
    count = len(job.ids)
    depth = np.zeros(count)
    for op in job.order.tolist():
        parents = job.edges[job.edges[:, 1] == op, 0]
        depth[op] = 1 + depth[parents].max(initial=-1)
    longest = 2 * depth.max() + 1
    nodes = np.stack(
        [
            np.repeat([0.0, 1.0], count),
            _over_mean(np.concatenate([job.forward, job.backward])),
            np.tile(_over_mean(job.memory), 2),
            np.tile(_over_mean(job.activations), 2),
            np.concatenate([depth, longest - depth]) / longest,
        ],
        axis=1,
    )
    last = job.position[-1]
    back = job.edges[:, ::-1] + count
    edges = np.concatenate([job.edges, [[last, last + count]], back])
    return OpGraph(
        name=job.name,
        nodes=nodes.astype(np.float32),
        edge_index=np.ascontiguousarray(edges.T),
    )


def device_edges(topology: RampTopology) -> Index:
    """Return pairs of servers that differ in one coordinate. Shape [2, edges]."""
    shape = (topology.groups, topology.racks, topology.servers)
    places = np.array(list(np.ndindex(shape)))
    differ = (places[:, None, :] != places[None, :, :]).sum(axis=2)
    return np.stack(np.nonzero(differ == 1)).astype(np.int64)


def model_op_graph(graph: ModelGraph, name: str) -> OpGraph:
    """Make the graph of both passes of a captured model: vertex n + i mirrors block i.

    Features are those of :func:`op_graph`: compute is measured time where a profile has
    it, else FLOPs; memory is parameters and saved tensors; activations are the largest
    tensor that a block sends.

    Args:
        graph: The model.
        name: Name of the job.
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
