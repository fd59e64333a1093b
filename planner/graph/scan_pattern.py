"""A selective scan token by token, and the fused kernel that stands in for it.

Recognised is the loop of state space models as transformers writes it: a product of
each token's state with C, all of them stacked, with what discretises A, B and x before
and the skip and the gate behind. The kernel reads x, dt, z, B and C, keeps them and the
states between chunks, and makes all other states again in its backward.
Source: Gu and Dao 2023, arXiv:2312.00752, section 3.3.2; state-spaces/mamba,
ops/selective_scan_interface.py and csrc/selective_scan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.graph.ops import KernelCost
from planner.graph.rewriting import NewOp, OpIndex, Rewrite

__all__ = ["fused_scans"]

#: Fewest tokens of a loop.
_FEWEST = 64
#: Tokens of a chunk. Source: csrc/selective_scan/selective_scan.cpp (n_chunks).
_CHUNK = 2048
_STACKS = frozenset({"aten::stack", "aten::cat"})


def fused_scans(index: OpIndex) -> Iterator[Rewrite]:
    """Yield a rewrite for each selective scan that goes token by token."""
    for row, name in enumerate(index.graph.names):
        if name in _STACKS and len(index.graph.inputs[row]) >= _FEWEST:
            found = _rewrite(index, row)
            if found is not None:
                yield found


def _rewrite(index: OpIndex, stack: int) -> Rewrite | None:
    """Return the scan whose outputs are stacked; None if it is no selective one."""
    graph = index.graph
    products = [index.maker(storage) for storage in graph.inputs[stack]]
    loop = {
        row
        for row in products
        if row is not None
        and index.is_product(row, weighted=False)
        and graph.kernels[row].n == 1
    }
    shapes = {
        (graph.kernels[r].batch, graph.kernels[r].m, graph.kernels[r].k) for r in loop
    }
    if len(loop) != len(products) or len(shapes) != 1:
        return None
    ((batch, width, state),) = shapes
    last = _behind(index, stack)
    rows = _before(index, {stack, *loop, *last})
    place = max(rows)
    if not index.is_closed(rows, set(graph.outputs[place])):
        return None
    tokens = len(products)
    op = _kernel(index, sorted(rows), batch, width, state, tokens)
    return (
        None
        if op is None
        else Rewrite(kind="scan", rows=tuple(sorted(rows)), ops=(op,))
    )


def _behind(index: OpIndex, stack: int) -> list[int]:
    """Return the ops that follow the scan one by one in its module: skip and gate."""
    graph, found, row = index.graph, list[int](), stack
    while True:
        readers = {r for i in graph.outputs[row] for r in index.readers.get(i, ())}
        if len(readers) != 1:
            return found
        (row,) = readers
        plain = graph.fusible[row] and min(graph.inputs[row]) >= 0
        if not plain or graph.modules[row] != graph.modules[stack]:
            return found
        found.append(row)


def _before(index: OpIndex, rows: set[int]) -> set[int]:
    """Add the ops whose results the scan alone reads, but those of parameters."""
    graph, structure = index.graph, index.structure
    found, row = set(rows), max(rows)
    while row > 0 and structure.blocks[row - 1] == structure.blocks[max(rows)]:
        row -= 1
        reads = graph.inputs[row]
        if row in found or graph.kernels[row].flops or not index.is_read_in(row, found):
            continue
        if not reads or any(i >= 0 and not _of_parameters(index, i) for i in reads):
            found.add(row)
    return found


def _of_parameters(index: OpIndex, storage: int) -> bool:
    """Return True for a tensor that is made of parameters alone."""
    if storage < 0:
        return True
    row = index.maker(storage)
    if row is None or not index.graph.inputs[row]:
        return False
    return all(_of_parameters(index, i) for i in index.graph.inputs[row])


def _kernel(
    index: OpIndex, rows: list[int], batch: int, width: int, state: int, tokens: int
) -> NewOp | None:
    """Return the kernel of a scan; None if something else than a scan's inputs enter.

    Args:
        index: Of the graph.
        rows: The scan's ops.
        batch: Samples.
        width: Channels.
        state: Numbers of a channel's state.
        tokens: Of a sample.
    """
    graph = index.graph
    (out,) = graph.outputs[rows[-1]]
    entering = index.entering(rows)
    fixed = [i for i in entering if _of_parameters(index, i)]
    moving = [i for i in entering if i not in fixed]
    wide = [i for i in moving if index.numel(i) >= batch * tokens * width]
    if not 2 <= len(wide) <= 3 or len(moving) - len(wide) not in (1, 2):
        return None
    size = batch * tokens * width
    inputs = size * sum(index.element(i) for i in wide)
    groups = 2 * batch * tokens * state
    shared = groups * index.element(moving[0])
    constants = sum(index.bytes[i] for i in fixed)
    chunks = math.ceil(tokens / _CHUNK)
    states = index.new((batch, width, chunks, 2 * state), "float32")
    kept = [*entering, states]
    written = size * index.element(out)
    ungated = 0.0
    if len(wide) == 3:
        # The gate's gradient wants what it was multiplied with.
        kept.append(index.new((batch, width, tokens), index.tensors[out][1]))
        ungated = index.bytes[kept[-1]]
    read = inputs + shared + constants
    gradients = inputs + constants + 4.0 * groups
    return NewOp(
        name="meshwright::selective_scan",
        kernel=KernelCost(flops=sum(graph.kernels[row].flops for row in rows)),
        inputs=tuple(entering),
        outputs=(out, *(i for i in kept if i not in entering)),
        saves=tuple(kept),
        forward_bytes=read + written + ungated + index.bytes[states],
        backward_bytes=read + written + ungated + index.bytes[states] + gradients,
        backward_flops=float(graph.backward_flops[rows].sum()),
        transient=written + gradients,
    )
