"""A model as it would run with fused kernels, where it was read with other code.

One recogniser for each kind of kernel finds the code that it stands in for
(:data:`PATTERNS`); the ops then change, and blocks, edges and saved bytes follow from
them as they do of a model that was read with the kernels. The divisions that the model
allows (tensor, sequence, context parallelism) stay those of the code that was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from planner.graph.attention_pattern import fused_attention
from planner.graph.coarsen import coarsen
from planner.graph.experts_pattern import grouped_experts
from planner.graph.fallbacks import FALLBACK, fallback_code
from planner.graph.fusion import OpFusions
from planner.graph.model import ModelGraph
from planner.graph.rewriting import OpIndex, Rewrite, rewrite_ops
from planner.graph.scan_pattern import fused_scans
from planner.graph.sharding import with_config_heads
from planner.schema.fused_kernels import FUSED_KERNELS, KernelKind

__all__ = ["PATTERNS", "with_fused_kernels"]

#: Recogniser of the code that each kernel stands in for.
PATTERNS: Mapping[KernelKind, Callable[[OpIndex], Iterator[Rewrite]]] = {
    "attention": fused_attention,
    "scan": fused_scans,
    "experts": grouped_experts,
}


def with_fused_kernels(graph: ModelGraph) -> ModelGraph:
    """Return a model with fused kernels in place of the code that they stand in for.

    ``fused`` of the result counts them by kind, and its ``captured`` is the model as it
    was given. A model of which no ops are known, or in which nothing is recognised, has
    ``fused`` empty.

    Args:
        graph: A model, its units in the order in which they were read.
    """
    if graph.fused is not None:
        return graph
    known = graph.fusions
    nothing = replace(graph, fused={})
    if not isinstance(known, OpFusions) or known.order is not None:
        return nothing
    index = OpIndex(known.graph, known.structure, known.dims, graph.batch)
    rewrites: list[Rewrite] = []
    taken: set[int] = set()
    for kind in FUSED_KERNELS:
        for one in PATTERNS[kind](index):
            if taken.isdisjoint(one.rows):
                rewrites.append(one)
                taken.update(one.rows)
    if not rewrites:
        return nothing
    ops, structure, roles = rewrite_ops(index, known.roles, rewrites)
    made = coarsen(ops, structure, roles)
    counts = {kind: sum(one.kind == kind for one in rewrites) for kind in FUSED_KERNELS}
    found = replace(
        graph,
        blocks=with_config_heads(made.blocks, known.dims),
        edges=made.edges,
        parameters=made.parameters,
        causal=_is_causal(graph, rewrites),
        fused={kind: count for kind, count in counts.items() if count},
        captured=graph,
        fusions=replace(known, graph=ops, structure=structure, roles=roles, made={}),
    )
    told = [text for text in graph.assumptions if not text.startswith(FALLBACK)]
    return replace(found, assumptions=(*told, *fallback_code(found)))


def _is_causal(graph: ModelGraph, rewrites: list[Rewrite]) -> bool:
    """Return True if every attention of the model is causal."""
    new = [one.causal for one in rewrites if one.kind == "attention"]
    fused = any(k.kind == "attention" for b in graph.blocks for k in b.kernels)
    return bool(new) and all(new) and (not fused or graph.attention == "causal")
