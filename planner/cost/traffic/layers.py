"""Bytes and seconds of the collectives inside layers: of tp, cp and ep.

tp      A layer's region is entered and left. Whole streams are summed on leaving in
        forward, on entering in backward. With sequence parallelism each of the four is
        a gather or a scatter of the same bytes, and the stream is scattered before the
        first region (backward gathers) and gathered after the last. An embedding's rows
        are summed in forward alone; a head gathers logits in forward and sums its
        input's gradient in backward. Recomputation enters all regions again, and leaves
        those after which the unit saves something.
cp      Attention must see keys and values of all of a sequence; convolutions must see
        the edges of neighbouring shards of a sample.
ep      Tokens go to where their experts are, and come back.

Source: executors/strategies/tensor_parallel.py; Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import Combinations, PricingContext
from planner.cost.kernels.blocks import BlockClasses
from planner.cost.recipes import Recipe
from planner.cost.traffic.halos import halo_traffic
from planner.graph import ModelGraph
from planner.schema.strategy_parts import ContextAlgorithm
from planner.units import dtype_bytes

__all__ = [
    "FORWARD_SHARE",
    "ContextTraffic",
    "ExpertTraffic",
    "TensorTraffic",
    "context_algorithms",
    "context_traffic",
    "expert_payload",
    "expert_traffic",
    "exposed_exchanges",
    "tensor_traffic",
]

Array = NDArray[np.float64]


def _time(lines: Array, size_bytes: Array) -> Array:
    """Seconds of calls of a size by the faster of two algorithms. Shape [C].

    Args:
        lines: Fixed seconds and seconds per byte of each. Shape [C, 2, 2].
        size_bytes: Shape [C].
    """
    first, second = (lines[:, k, 0] + lines[:, k, 1] * size_bytes for k in range(2))
    return np.minimum(first, second)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTraffic:
    """Traffic of tp for one microbatch, by combination (C) and unit (U).

    Attributes:
        seconds: Half of what forward and backward take. Shape [C, U].
        again_s: What recomputation adds. Shape [C, U].
        sent: Bytes that leave a device in forward and backward. Shape [C, U].
        payload: Bytes by :data:`planner.cost.traffic.collectives.TP_KINDS`, then those
            of forward and backward, and what recomputation adds. Shape [3, 2, C, U].
    """

    seconds: Array
    again_s: Array
    sent: Array
    payload: Array


def tensor_traffic(
    context: PricingContext,
    classes: BlockClasses,
    combos: Combinations,
    lines: dict[str, Array],
    scale: Array,
) -> TensorTraffic:
    """Price the collectives of tensor parallelism.

    Args:
        context: The request.
        classes: Distinct blocks.
        combos: Degrees.
        lines: Of tp's collectives.
        scale: Bytes of each combination's microbatch for one traced. Shape [C].
    """
    split = combos.sequence_parallel > 0
    shares = np.where(classes.low_precision[:, None], context.gathered_share, 1.0).T
    seconds, again = _seconds(classes, lines, split, scale, shares)
    payload = _payload(classes, split, shares) * (scale * (combos.tp > 1))[:, None]
    exposed = 1 - context.recipe.layer_overlap
    seconds, again = (classes.per_unit(part * exposed) for part in (seconds, again))
    payload = classes.per_unit(payload)
    for unit, stream in _ends(classes):
        size = stream * scale * split
        # One of the two in forward, one in backward.
        gather = _time(lines["all_gather"], size)
        seconds[:, unit] += np.where(split, gather, 0.0) / 2
        payload[1, 0, :, unit] += size * (combos.tp > 1)
    # A reduction is a scatter and a gather.
    moved = 2 * payload[0, 0] + payload[1, 0] + payload[2, 0]
    tp = combos.tp[:, None]
    return TensorTraffic(
        seconds=seconds, again_s=again, sent=moved * (tp - 1) / tp, payload=payload
    )


def _seconds(
    classes: BlockClasses,
    lines: dict[str, Array],
    split: NDArray[np.bool_],
    scale: Array,
    shares: Array,
) -> tuple[Array, Array]:
    """Seconds and those of recomputation. Shapes [C, classes].

    ``shares`` is what gathers move of the bytes of a block's stream, forward and
    backward. Shape [2, classes].
    """
    seconds, again = np.zeros((2, len(scale), len(classes.blocks)))
    gathers, sums = lines["all_gather"], lines["all_reduce"]
    for index, block in enumerate(classes.blocks):
        number = block.tp_collectives
        if number:
            each = block.tp_collective_bytes / number
            plain = _time(sums, each * scale)
            scatter = _time(lines["reduce_scatter"], each * scale)
            gather, back = (
                _time(gathers, each * scale * share) for share in shares[:, index]
            )
            repeated = block.tp_again_bytes / each
            if block.kind == "embedding":
                seconds[:, index] = number * plain / 2
                again[:, index] = repeated * plain
            else:
                seconds[:, index] = number * np.where(
                    split, (gather + back) / 2 + scatter, plain
                )
                twice = number * gather + repeated * scatter
                again[:, index] = np.where(split, twice, repeated * plain)
        logits, entered = classes.gathered_bytes[index], classes.entered_bytes[index]
        if logits:
            seconds[:, index] += _time(gathers, logits * scale) / 2
        if entered:
            seconds[:, index] += _time(sums, entered * scale) / 2
    return seconds, again


def _payload(classes: BlockClasses, split: NDArray[np.bool_], shares: Array) -> Array:
    """Bytes at the traced batch, by kind. Shape [3, 2, C, classes]."""
    embedding = np.array([block.kind == "embedding" for block in classes.blocks])
    total = classes.column("tp_collective_bytes")
    repeated = classes.column("tp_again_bytes")
    layers, again = np.where(embedding, 0.0, total), np.where(embedding, 0.0, repeated)
    rows = np.where(embedding, total, 0.0)
    divided = split[:, None].astype(float)
    first = rows + classes.entered_bytes + (1 - divided) * 2 * layers
    gathers = classes.gathered_bytes + divided * layers * shares.sum(axis=0)
    return np.array(
        [
            [first, np.where(embedding, repeated, (1 - divided) * again)],
            [gathers, divided * layers * shares[0]],
            [divided * 2 * layers, divided * again],
        ]
    )


def _ends(classes: BlockClasses) -> list[tuple[int, float]]:
    """First and last unit of the region, with the bytes of the stream there."""
    if not classes.region:
        return []
    layers = np.array([block.kind != "embedding" for block in classes.blocks])
    total = (classes.column("tp_collective_bytes") * layers) @ classes.count
    number = (classes.column("tp_collectives") * layers) @ classes.count
    ends = classes.region[0], classes.region[-1]
    return [(unit, float(total[unit] / number[unit])) for unit in ends]


#: Of a forward's and backward's traffic, what the forward has: a ring's backward passes
#: on the gradients of keys and values, too.
FORWARD_SHARE: dict[ContextAlgorithm, float] = {
    "ring": 1 / 3,
    "all_to_all": 1 / 2,
    "halo": 1 / 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextTraffic:
    """Traffic of cp. Shapes [combinations, classes].

    Attributes:
        seconds: Exposed, of one forward and backward.
        sent: Bytes that one device sends in them.
        payload: Of a forward's all-to-alls: what a rank holds before them. 0 of a ring;
            of halos the whole samples that are gathered.
    """

    seconds: Array
    sent: Array
    payload: Array


def context_algorithms(
    graph: ModelGraph, *, cp: int, tp: int
) -> tuple[ContextAlgorithm, ...]:
    """Algorithms by which a sequence can be divided; all-to-all needs enough heads.

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
    context: PricingContext,
    classes: BlockClasses,
    combos: Combinations,
    lines: dict[str, Array],
    scale: Array,
    attention_s: Array,
) -> ContextTraffic:
    """Traffic of every class of blocks under every combination.

    Args:
        algorithm: How attention sees the whole sequence.
        context: The request.
        classes: Blocks.
        combos: Degrees.
        lines: Of cp's collectives.
        scale: Activations of a rank over those of the trace. Shape [combinations].
        attention_s: Attention kernels of forward and of backward, that a ring hides
            under. Shape [2, combinations, classes].
    """
    if algorithm == "halo":
        seconds, sent, payload = halo_traffic(
            context.graph, classes, combos, lines["send"], scale * combos.cp
        )
        return ContextTraffic(seconds=seconds, sent=sent, payload=payload)
    if algorithm == "ring":
        return _ring(classes, combos, lines["send"], scale, attention_s)
    return _all_to_all(context.graph, classes, combos, lines["all_to_all"], scale)


def _ring(
    classes: BlockClasses,
    combos: Combinations,
    line: Array,
    scale: Array,
    attention_s: Array,
) -> ContextTraffic:
    """Keys and values passed round the ring, hidden under attention where it lasts.

    Each of cp - 1 hops sends a rank's keys and values while attention to those before
    them is computed, 1/cp of all attention; in backward also gradients, a hop behind,
    the last of which nothing hides. Source: Liu et al. 2023, Ring Attention, section 3;
    executors/strategies/ring.py.

    Args:
        classes: Blocks.
        combos: Degrees.
        line: Of a message to the next rank.
        scale: Activations of a rank over those of the trace. Shape [combinations].
        attention_s: As of :func:`context_traffic`.
    """
    held = classes.column("sequence_bytes") * (scale / combos.tp)[:, None]
    seconds = np.zeros_like(held)
    hops = combos.cp - 1
    for index, block in enumerate(classes.blocks):
        if not block.sequence_bytes:
            continue
        once = _time(line, held[:, index])
        forward, backward = hops * attention_s[:, :, index] / combos.cp
        seconds[:, index] = (
            np.maximum(0.0, hops * once - forward)
            + np.maximum(0.0, (2 * hops - 1) * once - backward)
            + once
        ) * (hops > 0)
    return ContextTraffic(
        seconds=seconds,
        sent=held * 3 * hops[:, None],
        payload=np.zeros_like(held),
    )


def _all_to_all(
    graph: ModelGraph,
    classes: BlockClasses,
    combos: Combinations,
    line: Array,
    scale: Array,
) -> ContextTraffic:
    """Parts of the sequence traded for heads, and back: four exchanges a forward.

    Queries, keys and values go, outputs come back, and as many gradients in backward;
    attention cannot begin before. Keys and values of fewer heads than cp can deal out
    are repeated for every query, as the executors do.
    Source: Jacobs et al. 2023, DeepSpeed-Ulysses, section 3.
    """
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
        divided = (shared >= combos.cp) & (shared % combos.cp == 0)
        both = np.where(divided, block.sequence_bytes, 2 * queries)
        one, other = _time(line, queries * part), _time(line, both / 2 * part)
        several = combos.cp > 1
        seconds[:, index] = 4 * (one + other) * several
        payload[:, index] = (2 * queries + both) * part * several
    share = (combos.cp - 1) / combos.cp
    return ContextTraffic(
        seconds=seconds, sent=2 * payload * share[:, None], payload=payload
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraffic:
    """Traffic of ep. Shapes [combinations, classes].

    Attributes:
        seconds: Of the two all-to-alls of a forward, or of a backward.
        sent: Bytes that one device sends in a forward and backward.
        payload: What a rank holds before an all-to-all.
    """

    seconds: Array
    sent: Array
    payload: Array


def expert_traffic(
    context: PricingContext,
    classes: BlockClasses,
    combos: Combinations,
    line: Array,
    scale: Array,
) -> ExpertTraffic:
    """Tokens sent to their experts and back, as long as nothing hides it.

    An exchange lasts until the rank has all that most tokens go to.

    Args:
        context: The request.
        classes: Distinct blocks.
        combos: Degrees and microbatches.
        line: Of ep's all-to-all.
        scale: Activation bytes over those of the trace. Shape [combinations].
    """
    routed = classes.column("expert_bytes")
    seconds = np.zeros((len(combos), len(routed)))
    stream = np.where(combos.sequence_parallel > 0, combos.tp, 1)
    for index, total in enumerate(routed):
        if total:
            one = _time(line, total * scale / stream)
            seconds[:, index] = 2 * one * context.recipe.imbalance
    share = (combos.ep - 1) / combos.ep
    payload = expert_payload(classes, combos, scale)
    sent = 4 * payload * share[:, None]
    return ExpertTraffic(seconds=seconds, sent=sent, payload=payload)


def expert_payload(classes: BlockClasses, combos: Combinations, scale: Array) -> Array:
    """Bytes of one of a forward's two all-to-alls of ep. Shape [C, classes]."""
    stream = np.where(combos.sequence_parallel > 0, combos.tp, 1)
    share = (scale / stream * (combos.ep > 1))[:, None]
    return np.asarray(classes.column("expert_bytes") * share)


def exposed_exchanges(
    recipe: Recipe, exchanged: Array, forward: Array, backward: Array
) -> Array:
    """Seconds of exchanges of a direction that hide nowhere.

    exposed = exchanged - min(expert_overlap exchanged, (forward + backward) / 2)

    A unit's forward and backward stand beside as many exchanges each, of the same
    microbatch or of another one, which can hide no longer than these take.

    Args:
        recipe: Of the framework.
        exchanged: Seconds of a forward's exchanges, or of a backward's. [C, units].
        forward: Seconds of compute. [C, units]; likewise backward.
    Returns:
        Shape [C, units].
    """
    beside = (forward + backward) / 2
    hidden = np.minimum(recipe.expert_overlap * exchanged, beside)
    return np.asarray(exchanged - hidden)
