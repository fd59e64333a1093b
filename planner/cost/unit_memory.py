"""Bytes of activations that every unit saves, and its working sets.

For each combination of tp, cp, ep and microbatch (C) by class of blocks, or by unit (U)
and kind of recomputation: none, selective, full.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import Combinations, PricingContext
from planner.cost.kernels.blocks import (
    KERNEL_KINDS,
    BlockClasses,
    KernelTable,
    count_parameters,
)
from planner.graph import ModelGraph
from planner.graph.memo import once_per_graph
from planner.units import dtype_bytes

__all__ = [
    "alone_bytes_of",
    "between_halves",
    "cast_bytes_of",
    "loss_bytes_of",
    "saved_bytes_of",
    "transient_bytes_of",
    "whole_bytes_of",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Place of selective recomputation among its kinds.
_SELECTIVE = 1


def _weight_gradient_bytes(table: KernelTable, element: float, tp: Array) -> Array:
    """Gradients from which weight gradients are made. Shape [combinations, kernels].

    Of everything that reads trained weights: the gradient of its output, which is
    what torch keeps between the two halves of a split backward.
    Source: torch.distributed.pipelining._backward, stage_backward_input, torch 2.13.

    Args:
        table: Kernels at the traced batch.
        element: Bytes of an activation as traced.
        tp: Shape [combinations].
    """
    product = (table.kind != KERNEL_KINDS.index("attention")) & (
        table.kind != KERNEL_KINDS.index("memory")
    )
    # What is no product writes as much as it reads.
    output = np.where(
        product, table.batch * table.m * table.n * element, table.forward_bytes / 2
    )
    kept = np.where(table.trained, table.count * output, 0.0)
    divided = np.isin(table.style, (0, 2, 5))
    return np.asarray(np.where(divided, kept / tp[:, None], kept))


#: Bytes that backward wants of a score of attention that is not fused: what softmax and
#: dropout put out in half precision, and the mask. Source: Korthikanti et al. 2022,
#: section 4.1.
_SCORE_BYTES = 5.0


def saved_bytes_of(
    context: PricingContext,
    classes: BlockClasses,
    combos: Combinations,
    scale: Array,
    scores: Array,
) -> tuple[Array, Array]:
    """Kept and working bytes. Shapes [3, C, classes] by recompute kind, [C, classes].

    The working set is that of one op; what recomputation makes again comes on top.
    Sequence parallelism divides the stream, but not what colwise layers read, nor the
    sums that rowwise ones have a part of.
    """
    tp = combos.tp[:, None].astype(float)
    split = (combos.sequence_parallel[:, None] > 0) & classes.streamed
    stream = np.where(split, tp, 1.0)
    column = classes.activation_scale(scale, combos.cp)

    def divided(total: str, inside: str, whole: Array) -> Array:
        tensor = classes.column(inside)
        rest = classes.column(total) - tensor - whole
        return np.asarray(column * (tensor / tp + rest / stream + whole))

    gathered, boundary = (
        classes.column(name) for name in ("saved_gathered_bytes", "boundary_bytes")
    )
    if context.recipe.regathers:
        gathered = np.zeros_like(gathered)
    none = divided("saved_bytes", "saved_tensor_bytes", gathered)
    kinds = ("saved_selective_bytes", "saved_selective_tensor_bytes")
    sums = classes.column(kinds[0]) - classes.column(kinds[1]) - boundary
    sums = np.zeros_like(sums) if context.recipe.regathers else np.maximum(sums, 0.0)
    selective = np.minimum(none, divided(*kinds, sums))
    full = column * boundary / stream
    if context.recipe.recompute_ends:
        loss = loss_bytes_of(context, classes, combos, scale)
        loss = np.minimum(loss, np.maximum(none - full, 0.0))
        full = full + loss
        if not context.recipe.fused_loss:
            selective = np.where(loss > 0, divided(*kinds, sums) + loss, selective)
    if context.recipe.selective == "alternate":
        selective = selective - _every_second(context, classes, combos, stream)
        selective = np.maximum(selective, full)
    none = none + column * _mask_bytes(context, classes) / stream
    if context.recipe.selective == "attention":
        selective = none
    if not context.recipe.fused_attention:
        kept = _SCORE_BYTES * scores * classes.kernels.count
        none = none + kept @ classes.members
    working = column * classes.column("transient_bytes")
    apart = classes.streamed
    if context.facts.loss_parallel:
        apart = apart | (classes.logit_bytes > 0)
    working = np.where(apart, working / tp, working)
    return np.stack([none, selective, full]), working


def loss_bytes_of(
    context: PricingContext, classes: BlockClasses, combos: Combinations, scale: Array
) -> Array:
    """Bytes of logits that a loss keeps: fp32, unless it is fused. [C, classes].

    It is no part of the unit that recomputation makes again.
    """
    element = dtype_bytes(context.graph.dtype)
    wide = 1.0 if context.recipe.fused_loss else 4.0 / element
    ways = combos.tp if context.facts.loss_parallel else np.ones_like(combos.tp)
    return np.asarray(wide * classes.loss_bytes * (scale / ways)[:, None])


def _every_second(
    context: PricingContext, classes: BlockClasses, combos: Combinations, stream: Array
) -> Array:
    """Outputs of products that alternate recomputation makes again. [C, classes].

    Of a layer's products with weights it makes every second one again: half of their
    bytes, as several of them may have been merged into one. Source: torchtitan,
    torchtitan/parallelisms/parallelize_llama.py of December 2024, whose op-wise
    checkpointing recomputes every other mm.
    """
    table = classes.kernels
    tokens = (combos.microbatch / context.graph.batch / combos.cp)[:, None]
    tp = combos.tp[:, None].astype(float)
    heads = np.array([block.kind == "head" for block in classes.blocks])
    product = (table.kind == 0) & (table.weight_bytes > 0) & ~heads[table.owner]
    made = np.where(product, table.batch * table.m * table.n * table.count, 0.0)
    # Colwise products put out what tp divides, the others the stream.
    ways = np.where(np.isin(table.style, (0, 5)), tp, stream[:, table.owner])
    half = 0.5 * dtype_bytes(context.activation_dtype)
    return np.asarray(half * (tokens * made / ways) @ classes.members)


def _mask_bytes(context: PricingContext, classes: BlockClasses) -> Array:
    """Masks of dropout behind attention and MLP, a byte an element. [classes].

    Source: Korthikanti et al. 2022, section 4.1.
    """
    if not context.recipe.dropout:
        return np.zeros(len(classes.blocks))
    element = dtype_bytes(context.graph.dtype)
    stream = float(np.max(context.graph.cut_bytes, initial=0.0)) / element
    ends = ("attention", "mlp", "expert")
    inside = np.array([block.kind in ends for block in classes.blocks])
    # A mask is a byte whatever the activations have: undo what scales those.
    return np.where(inside, stream, 0.0) / context.element_ratio


def transient_bytes_of(
    saved: Array, working: Array, to_units: Array, repeated: NDArray[np.bool_]
) -> Array:
    """Working set of each unit by recompute kind. Shape [3, C, U], as ``saved``.

    A unit is recomputed as a whole, so that in its backward all that it would have
    kept without recomputation is there at once; of units that are not ``repeated``
    that is kept anyway.
    """
    largest = np.zeros((working.shape[0], to_units.shape[1]))
    for index, present in enumerate(to_units > 0):
        np.maximum(largest, working[:, index, None] * present, out=largest)
    none, selective, full = saved
    again = np.where(repeated, np.maximum(none - full, 0.0), 0.0)
    more = np.maximum(none - selective, 0.0)
    return np.stack([largest, largest + more, largest + again])


def whole_bytes_of(
    context: PricingContext,
    saved: Array,
    transient: Array,
    parameters: dict[str, Array],
    logits: Array,
    apart: NDArray[np.bool_],
) -> Array:
    """Most that a device with all units needs beyond what they have all saved.

    Backward goes from the last unit to the first, and lets go of what each has saved.
    With a unit's weights it gathers those of the unit before; when it is done with the
    unit it lets go of the weights, where they are not wanted in another backward, then
    copies its gradients to reduce them, and keeps the copy until the next are copied. A
    head's weights are not wanted until its loss is done with; their gradient
    is made beside that of the logits. Experts that ep divides are gathered and reduced
    on their own, before the rest of their unit.
    Source: torch.distributed.fsdp, _fully_shard/_fsdp_param_group.py (pre_backward,
    post_backward), torch 2.13.

    Args:
        context: The request.
        saved: Shape [3, C, U].
        transient: Shape [3, C, U].
        parameters: Scalars of units, [C, U] each.
        logits: Gradient of logits. Shape [C, U].
        apart: Whether experts are gathered on their own. Shape [C, 1].

    Returns:
        Beyond all that is saved, then that of the first two units alone, which are the
        last to be done; by what is in flight and recompute kind. Shape [2, 4, 3, C].
    """
    of, heads = context.scalar_bytes, _with_kind(context.graph, "head")
    root = heads | _with_kind(context.graph, "embedding")
    root &= context.recipe.root_stays
    dense, experts = parameters["dense_parameters"], parameters["expert_parameters"]
    trained, more = parameters["trained_dense"], parameters["trained_experts"]
    together = np.where(apart, 0.0, 1.0)
    earlier, later = context.facts.gathered_beside
    gathered = of.compute * (dense + experts)
    gathered += of.compute * _taken(dense + together * experts, earlier)
    copied = of.reduce * _taken(trained + together * more, later)
    first = trained + together * more >= more
    trained = np.where(first, trained + together * more, more)
    # Of what is reduced first, the weights go before its gradients are copied.
    freed = of.compute * np.where(first, dense + together * experts, experts)
    made = of.compute * trained
    released = made + np.maximum(of.reduce * trained - freed, logits)
    narrower = np.zeros_like(dense)
    if context.regime.loss_chunks > 1:
        # Where logits are small it counts that weights go before gradients are copied.
        narrower = np.where(heads, of.compute * dense, 0.0)
    made = made + np.maximum(of.reduce * trained - narrower, logits)
    before = np.cumsum(saved, axis=-1)
    # Weights of a root stay gathered from the first forward on.
    stays = of.compute * np.where(root, dense, 0.0).sum(axis=-1, keepdims=True)
    gathered = np.where(root, 0.0, gathered)
    behind, begun = before - saved, np.where(heads, 0.0, gathered)
    most = np.stack(
        [
            before + transient,
            np.maximum(before + transient + copied, behind + made),
            np.maximum(before + transient + copied + begun, behind + made + gathered)
            + stays,
            np.maximum(before + transient + copied, behind + released),
        ]
    )
    beyond = most.max(axis=-1) - before[..., -1]
    return np.stack([beyond, most[..., :2].max(axis=-1)])


def alone_bytes_of(
    context: PricingContext,
    saved: Array,
    transient: Array,
    parameters: dict[str, Array],
    logits: Array,
) -> Array:
    """Most that a device with whole weights needs, in the backward of one microbatch.

    Where ``fully_shard`` or ``replicate`` casts weights, those of a unit are freed when
    the unit is done; its gradients are copied to be reduced, and once more to where the
    optimizer finds them. Weights that units share, and their gradients, stay as they
    are to the end. Without a cast gradients are made where they stay.
    Source: torch.distributed.fsdp, _fully_shard/_fsdp_param_group.py (post_backward)
    and _fsdp_collectives.py (foreach_reduce) on a mesh of one rank, torch 2.13.

    Args:
        context: The request.
        saved: Shape [3, C, U].
        transient: Shape [3, C, U].
        parameters: Scalars of units and of ties, by field of ``UnitCosts``.
        logits: Gradient of logits. Shape [C, U].

    Returns:
        Cast weights, gradients, and the rest beyond all that is saved, at the worst
        moment; by recompute kind. Shape [3, 3, C].
    """
    of, ties = context.scalar_bytes, context.facts.parameter_counts.ties
    cast = of.compute if of.compute != of.stored else 0.0
    units = np.arange(saved.shape[-1])
    shares = np.isin(units, [*ties.first, *ties.second])
    whole = parameters["dense_parameters"] + parameters["expert_parameters"]
    trained = parameters["trained_dense"] + parameters["trained_experts"]
    early, own = np.where(shares, 0.0, trained), np.where(shares, 0.0, whole)
    stays = cast * (whole - own).sum(axis=-1, keepdims=True)
    weights = cast * np.cumsum(own, axis=-1) + stays
    reduced = of.stored * np.cumsum(early[:, ::-1], axis=-1)[:, ::-1]
    first, second = ties.first[:, None], ties.second[:, None]
    tied = of.compute * parameters["tied_trained"]
    held = tied @ ((first <= units) & (units < second))
    begun = tied @ ((first < units) & (units <= second))
    # What a unit's gradients were copied to stays until the next are copied.
    copies, narrow = (of.reduce, of.compute - of.stored) if cast else (0.0, 0.0)
    copied = copies * _taken(early, context.facts.gathered_beside[1])
    latest = copied[:, :2].max(axis=-1, keepdims=True)
    before = np.cumsum(saved, axis=-1)
    behind, none = before - saved, np.zeros_like(before[..., :1])
    each, last = (part.sum(axis=-1, keepdims=True) for part in (early, trained - early))
    both = tied.sum(axis=-1, keepdims=True)
    moments = [
        # A unit is computed; its gradients are there, beside that of its output; they
        # are copied.
        (weights, reduced - of.stored * early + held, before + transient + copied),
        (weights, reduced + begun, behind + narrow * early + logits + copied),
        (weights - cast * own, reduced + begun, behind + copies * early),
        # Gradients of tied weights are added up, perhaps before the second unit is
        # reduced; then they are copied.
        (stays, of.stored * each + both, none + 2 * both + latest),
        (0.0 * each, of.stored * (each + last), none + copies * last),
    ]
    return _at_worst(moments, before[..., -1])


def cast_bytes_of(
    context: PricingContext,
    saved: Array,
    transient: Array,
    parameters: dict[str, Array],
    logits: Array,
) -> Array:
    """Like :func:`alone_bytes_of`, of a device whose units cast their own weights.

    A weight's cast is gone when its gradient has been made, and at once, unless it is
    made again, if backward does not read it: an embedding's. Gradients of a unit are
    widened when all of them are made, those of its first weight last; what is added to
    the gradient of a tied weight is widened besides. See
    :class:`executors.strategies.casts.WeightCasts`.
    """
    of, ties = context.scalar_bytes, context.facts.parameter_counts.ties
    if of.compute == of.stored:
        return alone_bytes_of(context, saved, transient, parameters, logits)
    graph, units = context.graph, np.arange(saved.shape[-1])
    heads, read = _with_kind(graph, "head"), ~_with_kind(graph, "embedding")
    tied, again = parameters["tied_trained"], parameters["tied_parameters"]
    earlier, later = ties.first[:, None] == units, ties.second[:, None] == units
    trained = parameters["trained_dense"] + parameters["trained_experts"]
    whole = parameters["dense_parameters"] + parameters["expert_parameters"]
    own, made = of.compute * (whole + again @ later), trained + tied @ later
    casts = np.stack([np.cumsum(own * read, axis=-1) + own * ~read, own, own])
    # A tied weight gets its gradient where it is read last.
    new = (trained - tied @ earlier + tied @ later)[:, ::-1]
    behind_u = of.stored * np.cumsum(new, axis=-1)[:, ::-1]
    begun = behind_u - of.stored * new[:, ::-1]
    first = of.compute * made * _share_of_first(graph) + of.stored * (tied @ earlier)
    before = np.cumsum(saved, axis=-1)
    behind = before - saved
    moments = [
        # A unit is computed; the gradients of a head are there beside that of its
        # output; those of a unit are widened.
        (casts, begun, before + transient),
        (casts - own * ~heads, begun, behind + of.compute * made + logits),
        (casts - own, behind_u, behind + first),
    ]
    found = _at_worst(moments, before[..., -1])
    if context.regime.compile:
        # Blocks of which a compiler recomputes parts are wrapped.
        wrapped = alone_bytes_of(context, saved, transient, parameters, logits)
        found[:, _SELECTIVE] = wrapped[:, _SELECTIVE]
    return found


@once_per_graph
def _with_kind(graph: ModelGraph, kind: str) -> NDArray[np.bool_]:
    """Units that have a block of a kind. Shape [U]."""
    return np.array(
        [
            any(block.kind == kind for block in graph.blocks[start:stop])
            for start, stop in graph.units
        ]
    )


def _at_worst(moments: Sequence[Sequence[Array]], saved: Array) -> Array:
    """Three kinds of bytes at the moment when their sum is largest.

    Args:
        moments: Cast weights, gradients and the rest, which broadcast to [3, C, U].
        saved: What is taken off the rest. Shape [3, C].

    Returns:
        Shape [3, 3, C].
    """
    parts = np.concatenate(
        [np.stack(np.broadcast_arrays(*moment)) for moment in moments], axis=-1
    )
    worst = parts.sum(axis=0).argmax(axis=-1)
    found = np.take_along_axis(parts, worst[None, ..., None], axis=-1)[..., 0]
    found[2] -= saved
    return np.asarray(found)


@once_per_graph
def _share_of_first(graph: ModelGraph) -> Array:
    """Share of the first trained weight in those of its unit. Shape [U]."""
    shares, unit_of_block = np.zeros(len(graph.units)), graph.unit_of_block.tolist()
    sizes: dict[int, list[int]] = {}
    for one in graph.parameters:
        if one.trainable:
            sizes.setdefault(unit_of_block[one.block], []).append(one.numel)
    for unit, found in sizes.items():
        shares[unit] = found[0] / sum(found)
    # A head whose weight is an embedding's has none of its own.
    ends = {int(unit) for unit in count_parameters(graph).ties.second}
    shares[[unit for unit in ends if unit not in sizes]] = 1.0
    return shares


def _taken(values: Array, units: Index) -> Array:
    """Values [C, U] of other units, 0 where there is none. Shape [C, U]."""
    return np.asarray(np.where(units < 0, 0.0, values[:, units]))


def between_halves(
    context: PricingContext, classes: BlockClasses, combos: Combinations, scale: Array
) -> tuple[Array, Array]:
    """Bytes that a split backward keeps besides, and those that the model returns.

    A head's loss is done with at the input gradient: what was saved behind the head's
    input goes, and the gradient of its output comes. Where nothing else of the graph
    stays either, the latter is mostly less.

    Returns:
        Bytes of one microbatch. Shapes [C, U] and [C].
    """
    table = classes.kernels
    element = float(dtype_bytes(context.graph.dtype))
    kept = (
        _weight_gradient_bytes(table, element, combos.tp.astype(float))
        @ classes.members
    )
    whole = _weight_gradient_bytes(table, element, np.ones(1)) @ classes.members
    head = np.array([block.kind == "head" for block in classes.blocks])
    last = head & (classes.count[:, -1] > 0)
    freed = classes.column("saved_bytes") - classes.column("boundary_bytes")
    if context.recipe.keeps_graph:
        kept = np.where(head, np.maximum(kept - freed, 0.0), kept)
    else:
        kept = np.where(head, kept - freed, 0.0)
    kept = kept * scale[:, None]
    return kept @ classes.count, scale * float(whole[0, last].sum())
