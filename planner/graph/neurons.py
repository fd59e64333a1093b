"""A model of which copies hold shares of the neurons, and compute on their own.

Neurons are what tp divides between colwise layers and the rowwise one behind them: all
else that it would divide stays whole, and nothing is sent inside of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from planner.graph.coarsen import coarsen
from planner.graph.fusion import OpFusions
from planner.graph.model import Block, Fusion, Fusions, ModelGraph, Parameter
from planner.graph.sharding import (
    Roles,
    chain_roles,
    infer_roles,
    parallel_dims,
    with_config_heads,
)
from planner.schema.strategy_parts import matches_pattern

__all__ = ["count_outside", "only_chains", "only_neurons"]

#: Dimensions that tp must divide, of parts that have no neurons.
_OTHERS = frozenset({"vocab_size", "moe_intermediate_size"})
_OF_HEADS = frozenset({"num_heads", "num_key_value_heads"})


def only_neurons(graph: ModelGraph) -> ModelGraph:
    """Return a model in which tp divides neurons alone, without its collectives.

    Left whole are embeddings, heads, experts, and attention of models without a
    config: their modules need not tell the size of a head. Where no unit has layers
    that are split together, such as in a plain ``nn.Sequential``, those of neighbouring
    units are: copies hold all units.
    """
    within = any(p.style == "rowwise" for p in graph.parameters)
    if not within:
        graph = _paired_across(graph)
    blocks = graph.blocks
    # A head is colwise too, but its unit has no rowwise layer.
    styles = {"rowwise"} if within else {"colwise", "rowwise"}
    paired = {blocks[p.block].layer for p in graph.parameters if p.style in styles}
    experts = {p.block for p in graph.parameters if p.expert}
    heads = "num_heads" in graph.config
    kept = frozenset(
        block.index
        for block in blocks
        if block.layer in paired
        and block.index not in experts
        and (heads or not block.heads)
    )
    parameters = tuple(
        p if p.block in kept and p.style != "vocab" else replace(p, style="none")
        for p in graph.parameters
    )
    split = {p.name.rpartition(".")[0] for p in parameters if p.style != "none"}
    left_out = _OTHERS if heads else _OTHERS | _OF_HEADS
    return replace(
        graph,
        blocks=_narrowed(blocks, kept),
        parameters=parameters,
        tp_dims={n: size for n, size in graph.tp_dims.items() if n not in left_out},
        sharding={
            pattern: style
            for pattern, style in graph.sharding.items()
            if style in {"colwise", "rowwise"}
            and any(matches_pattern(pattern, name) for name in split)
        },
        fusions=graph.fusions and _NarrowedFusions(graph.fusions, kept),
    )


def only_chains(graph: ModelGraph) -> ModelGraph:
    """Return a model in which the features of hidden layers are divided, and no others.

    Layers that follow each other without a norm or a residual between them are divided
    along all of their hidden features: see :func:`planner.graph.pairs.chain_linears`.
    A model of which no ops are known has none.
    """
    known = graph.fusions
    if not isinstance(known, OpFusions) or known.order is not None:
        return replace(
            graph,
            parameters=tuple(replace(p, style="none") for p in graph.parameters),
            sharding={},
            tp_dims={},
        )
    return _with_roles(graph, known, chain_roles(known.graph, known.structure))


def count_outside(graph: ModelGraph, core: Callable[[int], int]) -> int:
    """Trained scalars of the neurons outside of a core of each group of layers.

    Args:
        graph: From :func:`only_neurons`.
        core: Function from the neurons of a group to those of its core.
    """
    found = 0
    for parameter in graph.parameters:
        if parameter.style != "none" and parameter.trainable:
            neurons = _neurons_of(parameter, graph.blocks[parameter.block])
            found += parameter.numel // neurons * (neurons - core(neurons))
    return found


def _neurons_of(parameter: Parameter, block: Block) -> int:
    """Neurons, or heads with keys and values of their own, of a parameter."""
    if block.heads:
        return block.kv_heads or block.heads
    if len(parameter.shape) == 1:
        return parameter.shape[0]
    for kernel in block.kernels:
        # Columns of a product are its outputs, its inner length its inputs.
        size = kernel.n if parameter.style == "colwise" else kernel.k
        fits = kernel.kind == "matmul" and kernel.n * kernel.k == parameter.numel
        if fits and kernel.style == parameter.style:
            return size
    # Of a profile no products are known. Rounding alone depends on it.
    return max(parameter.shape)


def _paired_across(graph: ModelGraph) -> ModelGraph:
    """Return a model with pairs of layers across units, if its ops are known."""
    known = graph.fusions
    if not isinstance(known, OpFusions) or known.order is not None:
        return graph
    ops, structure = known.graph, known.structure
    one = replace(structure, units=[""] * len(structure.units))
    return _with_roles(graph, known, infer_roles(ops, one, {}))


def _with_roles(graph: ModelGraph, known: OpFusions, roles: Roles) -> ModelGraph:
    """Return a model whose ops have other roles."""
    ops = known.graph
    made = coarsen(ops, known.structure, roles)
    blocks = with_config_heads(made.blocks, known.dims)
    transposed = {fqn for fqn, kind in ops.linear.items() if kind == "transposed"}
    return replace(
        graph,
        blocks=blocks,
        parameters=made.parameters,
        sharding=roles.patterns,
        tp_dims=parallel_dims(blocks, made.parameters, transposed)[0],
        fusions=replace(known, roles=roles, made={}),
    )


@dataclass(frozen=True, slots=True)
class _NarrowedFusions:
    """Blocks under each fusion, of which some have neurons."""

    fusions: Fusions
    kept: frozenset[int]

    def blocks(self, fusion: Fusion, *, loss: bool) -> tuple[Block, ...]:
        """Return the blocks under a fusion, with or without a fused loss."""
        return _narrowed(self.fusions.blocks(fusion, loss=loss), self.kept)

    def reordered(self, order: Sequence[int]) -> _NarrowedFusions:
        """Return the same for blocks in another order."""
        kept = frozenset(new for new, old in enumerate(order) if old in self.kept)
        return _NarrowedFusions(self.fusions.reordered(order), kept)


def _narrowed(blocks: Sequence[Block], kept: Collection[int]) -> tuple[Block, ...]:
    silent = (
        replace(block, tp_collectives=0, tp_collective_bytes=0.0, tp_again_bytes=0.0)
        for block in blocks
    )
    return tuple(b if b.index in kept else _whole(b) for b in silent)


def _whole(block: Block) -> Block:
    return replace(
        block,
        saved_tensor_bytes=0.0,
        saved_gathered_bytes=0.0,
        saved_selective_tensor_bytes=0.0,
        kernels=tuple(replace(kernel, style="none") for kernel in block.kernels),
    )
