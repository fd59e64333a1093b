"""A model whose last layer computes the loss in chunks: logits of some tokens at once.

The layer keeps its input and one number a token. Its product and what is made of the
logits are as many smaller kernels; backward runs those of the forward once more.
"""

from __future__ import annotations

from dataclasses import replace

from planner.graph.model import Block, Kernel, ModelGraph

__all__ = ["chunk_loss", "unchunkable"]

#: Bytes of a token's normaliser, in float32.
_NORMALISER_BYTES = 4.0


def unchunkable(graph: ModelGraph) -> str | None:
    """Reason why the loss of a model cannot be computed in chunks; None if it can."""
    if graph.config.get("loss", "cross_entropy") != "cross_entropy":
        return (
            f"the loss is {graph.config['loss']!r}, and chunks are of the cross "
            f"entropy of logits"
        )
    last = graph.unit_names[-1]
    start, stop = graph.units[-1]
    own = {
        name
        for parameter in graph.parameters
        for name in (parameter.name, *parameter.aliases)
        if name.startswith(f"{last}.")
    }
    plain = f"{last}.weight" in own and own <= {f"{last}.weight", f"{last}.bias"}
    if not plain or {block.kind for block in graph.blocks[start:stop]} != {"head"}:
        return f"the last unit {last} is no linear layer that makes the logits"
    return None


def chunk_loss(graph: ModelGraph, chunks: int) -> ModelGraph:
    """Return a model with its loss in chunks; 1 for the model as it is.

    What backward computes again is not in here.
    """
    if chunks == 1:
        return graph
    blocks = tuple(
        _chunked(block, chunks) if block.kind == "head" else block
        for block in graph.blocks
    )
    return replace(graph, blocks=blocks)


def _chunked(block: Block, chunks: int) -> Block:
    tokens = max(
        (k.m * k.batch for k in block.kernels if k.kind == "matmul"), default=1
    )
    kept = block.boundary_bytes + _NORMALISER_BYTES * tokens
    return replace(
        block,
        saved_bytes=kept,
        saved_tensor_bytes=0.0,
        saved_selective_bytes=kept,
        saved_selective_tensor_bytes=0.0,
        # The gradient of the input is there beside what the last chunk takes.
        transient_bytes=block.transient_bytes / chunks + block.boundary_bytes,
        kernels=tuple(_part(kernel, chunks) for kernel in block.kernels),
    )


def _part(kernel: Kernel, chunks: int) -> Kernel:
    """A kernel of one chunk, as often as there are chunks."""
    return replace(
        kernel,
        m=max(round(kernel.m / chunks), 1),
        forward_flops=kernel.forward_flops / chunks,
        backward_flops=kernel.backward_flops / chunks,
        forward_bytes=kernel.forward_bytes / chunks,
        backward_bytes=kernel.backward_bytes / chunks,
        count=kernel.count * chunks,
    )
