"""Bytes that optimizers keep of parameters, and products that they make of them.

Most keep a few tensors of a parameter's size. Muon keeps one of matrices of hidden
layers, and AdamW, which has embeddings, the head, vectors and all else, two. Adafactor
keeps a row and a column of each matrix. States of 8 bits have a scale for 256 numbers,
and small parameters none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.cost.kernels.low_precision import peak_flops_per_s
from planner.graph import ModelGraph, Parameter
from planner.schema import Optimizer
from planner.schema.optimizers import OPTIMIZERS
from planner.units import dtype_bytes

if TYPE_CHECKING:
    from planner.cost.context import PricingContext

__all__ = ["matrix_seconds", "mean_state_bytes", "state_shares"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Numbers of the smallest parameter whose states have 8 bits, and of one scale.
#: Source: torchao.optim, adam.py (_new_buffer).
_LEAST_8BIT, _BLOCK = 4096, 256

#: Iterations of Newton and Schulz in ``torch.optim.Muon``.
_ITERATIONS = 5


def _hidden(graph: ModelGraph, parameter: Parameter) -> bool:
    """True for matrices that are neither an embedding's nor the head's."""
    readers = {parameter.block, *parameter.readers}
    kinds = {graph.blocks[index].kind for index in readers}
    return len(parameter.shape) == 2 and not kinds & {"embedding", "head"}


def _state_bytes(
    optimizer: Optimizer, graph: ModelGraph, parameter: Parameter
) -> float:
    kind, size = OPTIMIZERS[optimizer.name], float(parameter.numel)
    each = float(dtype_bytes(optimizer.state_dtype))
    more = bool(optimizer.momentum) + (optimizer.ema is not None)
    states = kind.states * size
    if kind.matrix_states is not None and _hidden(graph, parameter):
        states = kind.matrix_states * size
    if kind.factored and len(parameter.shape) > 1:
        states = size / parameter.shape[-1] + size / parameter.shape[-2]
    narrow = size >= _LEAST_8BIT and size % _BLOCK == 0
    wide = each if kind.state_bytes is None or not narrow else kind.state_bytes
    return states * wide + more * size * each


def _trained(graph: ModelGraph) -> Iterator[Parameter]:
    return (parameter for parameter in graph.parameters if parameter.trainable)


def mean_state_bytes(optimizer: Optimizer, graph: ModelGraph) -> float:
    """Bytes of all states of a trained scalar, on the mean over a model."""
    kind = OPTIMIZERS[optimizer.name]
    if kind.elementwise:
        size = dtype_bytes(optimizer.state_dtype)
        return float(optimizer.states_per_parameter * size)
    total = sum(parameter.numel for parameter in _trained(graph))
    found = sum(_state_bytes(optimizer, graph, p) for p in _trained(graph))
    return found / max(total, 1)


def state_shares(optimizer: Optimizer, graph: ModelGraph) -> Array:
    """Bytes of states of each unit's trained scalars over the mean. Shape [units].

    1 where a unit has none.
    """
    if OPTIMIZERS[optimizer.name].elementwise:
        return np.ones(len(graph.units))
    found, sizes = np.zeros((2, len(graph.units)))
    starts = np.array([start for start, _ in graph.units])
    for parameter in _trained(graph):
        unit = int(np.searchsorted(starts, parameter.block, side="right")) - 1
        found[unit] += _state_bytes(optimizer, graph, parameter)
        sizes[unit] += parameter.numel
    mean = mean_state_bytes(optimizer, graph)
    each = np.divide(found, sizes * mean, out=np.ones_like(found), where=sizes > 0)
    return np.asarray(each)


def matrix_seconds(trained: Array, types: Index, context: PricingContext) -> Array:
    """Seconds of the products that one update makes of matrices. Shape [n].

    An iteration of m x n, m <= n: a product with the transpose, the square of that,
    and its product with the matrix, in bfloat16. Every rank that has a part of a matrix
    makes them all.

    Args:
        trained: Scalars of the layers that a device has a part of. Shape [n].
        types: Device type of each. Shape [n].
        context: The request.
    """
    optimizer, graph = context.optimizer, context.graph
    if OPTIMIZERS[optimizer.name].matrix_states is None:
        return np.zeros(len(trained))
    shapes = [sorted(p.shape) for p in _trained(graph) if _hidden(graph, p)]
    flops = _ITERATIONS * sum(4.0 * m * m * n + 2.0 * m**3 for m, n in shapes)
    total = sum(parameter.numel for parameter in _trained(graph))
    rates = np.array(
        [
            peak_flops_per_s(device, "bfloat16") * device.matmul_efficiency
            for device in context.cluster.device_types
        ]
    )
    return np.asarray(trained / max(total, 1) * flops / rates[types])
