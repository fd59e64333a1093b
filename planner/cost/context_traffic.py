"""What dividing a sequence costs: attention must see keys and values of all of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.classes import BlockClasses
from planner.cost.collectives import time_of
from planner.cost.combinations import Combinations
from planner.cost.orders import Orders
from planner.graph import ModelGraph
from planner.schema.strategy import ContextAlgorithm
from planner.units import dtype_bytes

__all__ = [
    "FORWARD_SHARE",
    "ContextTraffic",
    "context_algorithms",
    "context_traffic",
]

Array = NDArray[np.float64]

#: Of a forward's and backward's traffic, what the forward has: a ring's backward passes
#: on the gradients of keys and values, too.
FORWARD_SHARE: dict[ContextAlgorithm, float] = {"ring": 1 / 3, "all_to_all": 1 / 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextTraffic:
    """Traffic of cp. Shapes [combinations, classes].

    Attributes:
        seconds: Exposed, of one forward and backward.
        sent: Bytes that one device sends in them.
        payload: Of a forward's all-to-alls: what a rank holds before them. 0 of a ring.
    """

    seconds: Array
    sent: Array
    payload: Array


def context_algorithms(
    graph: ModelGraph, *, cp: int, tp: int
) -> tuple[ContextAlgorithm, ...]:
    """What a sequence can be divided by: trading it for heads needs heads to deal out.

    Args:
        graph: The model.
        cp: Context parallel degree.
        tp: Tensor parallel degree, which has divided the heads before.
    Returns:
        A ring first, and alone where cp is 1.
    """
    if cp == 1:
        return ("ring",)
    heads = {
        kernel.batch // graph.batch
        for block in graph.blocks
        for kernel in block.kernels
        if kernel.kind == "attention"
    }
    if not heads or any(count % (cp * tp) for count in heads):
        return ("ring",)
    return ("ring", "all_to_all")


def context_traffic(
    algorithm: ContextAlgorithm,
    orders: Orders,
    classes: BlockClasses,
    combos: Combinations,
    scale: Array,
    attention_s: Array,
) -> ContextTraffic:
    """Traffic of every class of blocks under every combination.

    Args:
        algorithm: How attention sees the whole sequence.
        orders: What ``combos.order`` refers to.
        classes: Blocks.
        combos: Degrees.
        scale: Of a rank's activations over those of the trace. Shape [combinations].
        attention_s: Kernels of forward and backward that a ring hides under.
            Shape [combinations, classes].
    """
    if algorithm == "ring":
        return _ring(orders, classes, combos, scale, attention_s)
    return _all_to_all(orders, classes, combos, scale)


def _ring(
    orders: Orders,
    classes: BlockClasses,
    combos: Combinations,
    scale: Array,
    attention_s: Array,
) -> ContextTraffic:
    """Keys and values passed round the ring, hidden under attention where it lasts.

    Each of cp - 1 hops sends 1/cp of keys and values; backward also sends gradients
    back, twice the bytes. Source: Liu et al. 2023, Ring Attention, section 3.
    """
    groups = orders.groups(combos.cp, combos.tp, combos.orders)
    # ``scale`` is of one rank's part of the sequence; the ring passes on all of it.
    ring = scale * combos.cp / combos.tp
    whole = classes.column("sequence_bytes") * ring[:, None]
    share = (combos.cp - 1) / combos.cp
    wire = np.zeros_like(whole)
    measured = orders.setting.cluster.document.collectives
    for index, block in enumerate(classes.blocks):
        if not block.sequence_bytes:
            continue
        wire[:, index] = 3 * time_of("all_gather", whole[:, index], groups, measured)
    return ContextTraffic(
        seconds=np.maximum(0.0, wire - attention_s),
        sent=3 * whole * share[:, None],
        payload=np.zeros_like(whole),
    )


def _all_to_all(
    orders: Orders, classes: BlockClasses, combos: Combinations, scale: Array
) -> ContextTraffic:
    """Parts of the sequence traded for heads, and back: four exchanges a forward.

    Queries, keys and values go, outputs come back, and as many gradients in backward;
    attention cannot begin before. Keys and values of fewer heads than cp can deal out
    are repeated for every query, as the executors do.
    Source: Jacobs et al. 2023, DeepSpeed-Ulysses, section 3.
    """
    groups = orders.groups(combos.cp, combos.tp, combos.orders)
    graph = orders.setting.graph
    measured = orders.setting.cluster.document.collectives
    shape = (len(combos), len(classes.blocks))
    seconds, payload = np.zeros(shape), np.zeros(shape)
    part = scale / combos.tp
    for index, block in enumerate(classes.blocks):
        kernels = [one for one in block.kernels if one.kind == "attention"]
        if not block.sequence_bytes or not kernels:
            continue
        elements = sum(one.batch * one.m * one.k * one.count for one in kernels)
        queries = elements * dtype_bytes(graph.dtype)
        heads = kernels[0].batch / graph.batch / combos.tp
        shared = np.round(heads * block.sequence_bytes / (2 * queries))
        dealt = (shared >= combos.cp) & (shared % combos.cp == 0)
        both = np.where(dealt, block.sequence_bytes, 2 * queries)
        one = time_of("all_to_all", queries * part, groups, measured)
        other = time_of("all_to_all", both / 2 * part, groups, measured)
        divided = combos.cp > 1
        seconds[:, index] = 4 * (one + other) * divided
        payload[:, index] = (2 * queries + both) * part * divided
    share = (combos.cp - 1) / combos.cp
    return ContextTraffic(
        seconds=seconds, sent=2 * payload * share[:, None], payload=payload
    )
