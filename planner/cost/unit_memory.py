"""Parameters and activations of every unit under every combination of degrees."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.classes import BlockClasses
from planner.cost.combinations import Combinations
from planner.cost.efficiency import score_elements
from planner.cost.setting import Setting
from planner.cost.weight_gradients import weight_gradient_bytes
from planner.units import dtype_bytes

__all__ = [
    "between_halves",
    "cut_bytes",
    "parameters_of",
    "saved_bytes",
    "sent_bytes",
    "transient_bytes",
]

Array = NDArray[np.float64]


#: Bytes that backward wants of a score of attention that is not fused: what softmax and
#: dropout put out in half precision, and the mask. Source: Korthikanti et al. 2022,
#: section 4.1.
_SCORE_BYTES = 5.0


def saved_bytes(
    setting: Setting, classes: BlockClasses, combos: Combinations, scale: Array
) -> tuple[Array, Array]:
    """Kept and working bytes. Shapes [3, C, classes] by recompute kind, [C, classes].

    The working set is that of one op; what recomputation makes again comes on top.
    Sequence parallelism divides the stream, but not what colwise layers read, nor the
    sums that rowwise ones have a part of.
    """
    tp = combos.tp[:, None].astype(float)
    split = (combos.sequence_parallel[:, None] > 0) & classes.streamed
    stream = np.where(split, tp, 1.0)
    column = scale[:, None]

    def divided(total: str, inside: str, whole: Array) -> Array:
        tensor = classes.column(inside)
        rest = classes.column(total) - tensor - whole
        return np.asarray(column * (tensor / tp + rest / stream + whole))

    gathered, boundary = (
        classes.column(name) for name in ("saved_gathered_bytes", "boundary_bytes")
    )
    if setting.recipe.regathers:
        gathered = np.zeros_like(gathered)
    none = divided("saved_bytes", "saved_tensor_bytes", gathered)
    kinds = ("saved_selective_bytes", "saved_selective_tensor_bytes")
    sums = classes.column(kinds[0]) - classes.column(kinds[1]) - boundary
    if setting.recipe.regathers:
        sums = np.zeros_like(sums)
    selective = np.minimum(none, divided(*kinds, np.maximum(sums, 0.0)))
    full = column * boundary / stream
    if setting.recipe.selective == "alternate":
        selective = selective - _every_second(setting, classes, combos, stream)
        selective = np.maximum(selective, full)
    none = none + column * _mask_bytes(setting, classes) / stream
    if setting.recipe.selective == "attention":
        selective = none
    none = none + _score_bytes(setting, classes, combos)
    working = column * classes.column("transient_bytes")
    apart = classes.streamed
    if setting.recipe.loss_parallel:
        apart = apart | (classes.logit_bytes > 0)
    working = np.where(apart, working / tp, working)
    if setting.recipe.fused_loss:
        ways = tp if setting.recipe.loss_parallel else 1.0
        logits = column * classes.logit_bytes / ways
        # Logits, what their gradient is made of, and that: nothing is there in fp32.
        wide = (4.0 / dtype_bytes(setting.graph.dtype) - 1.0) * logits
        none = np.maximum(none - wide, full)
        selective = np.minimum(selective, none)
        working = np.where(logits > 0, 2.0 * logits, working)
    return np.stack([none, selective, full]), working


def _every_second(
    setting: Setting, classes: BlockClasses, combos: Combinations, stream: Array
) -> Array:
    """Outputs of products that alternate recomputation makes again. [C, classes].

    Of a layer's products with weights it makes every second one again: half of their
    bytes, as several of them may have been merged into one. Source: torchtitan,
    torchtitan/parallelisms/parallelize_llama.py of December 2024, whose op-wise
    checkpointing recomputes every other mm.
    """
    table = classes.kernels
    tokens = (combos.microbatch / setting.graph.batch / combos.cp)[:, None]
    tp = combos.tp[:, None].astype(float)
    heads = np.array([block.kind == "head" for block in classes.blocks])
    product = (table.kind == 0) & (table.weight_bytes > 0) & ~heads[table.owner]
    made = np.where(product, table.batch * table.m * table.n * table.count, 0.0)
    # Colwise products put out what tp divides, the others the stream.
    ways = np.where(table.style == 0, tp, stream[:, table.owner])
    member = np.zeros((len(table.owner), len(classes.blocks)))
    member[np.arange(len(table.owner)), table.owner] = 1.0
    half = 0.5 * dtype_bytes(setting.activation_dtype)
    return np.asarray(half * (tokens * made / ways) @ member)


def _mask_bytes(setting: Setting, classes: BlockClasses) -> Array:
    """Masks of dropout behind attention and MLP, a byte an element. [classes].

    Source: Korthikanti et al. 2022, section 4.1.
    """
    if not setting.recipe.dropout:
        return np.zeros(len(classes.blocks))
    element = dtype_bytes(setting.graph.dtype)
    stream = float(np.max(setting.graph.cut_bytes, initial=0.0)) / element
    ends = ("attention", "mlp", "expert")
    inside = np.array([block.kind in ends for block in classes.blocks])
    # A mask is a byte whatever the activations have: undo what scales those.
    return np.where(inside, stream, 0.0) / setting.element_ratio


def _score_bytes(
    setting: Setting, classes: BlockClasses, combos: Combinations
) -> Array:
    """Scores that backward keeps where attention is not fused. [C, classes]."""
    table = classes.kernels
    if setting.recipe.fused_attention:
        return np.zeros((len(combos.tp), len(classes.blocks)))
    tokens = combos.microbatch / setting.graph.batch / combos.cp
    scores = score_elements(table, tokens[:, None], combos.tp[:, None].astype(float))
    member = np.zeros((len(table.owner), len(classes.blocks)))
    member[np.arange(len(table.owner)), table.owner] = table.count
    return np.asarray(_SCORE_BYTES * scores @ member)


def transient_bytes(
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
    none, selective, _ = saved
    again = np.where(repeated, none, 0.0)
    return np.stack([largest, largest + none - selective, largest + again])


def cut_bytes(
    setting: Setting, classes: BlockClasses, combos: Combinations, scale: Array
) -> tuple[Array, Array]:
    """Bytes at the cut after each unit but the last, and those saved as they come.

    Sequence parallelism sends shards between the units that it divides the stream of.
    The first of them takes a part of its own of what comes whole.

    Returns:
        Shapes [C, U - 1] each.
    """
    split = ((combos.sequence_parallel > 0) & (combos.tp > 1))[:, None]
    after = np.arange(1, len(setting.graph.units))
    within = np.isin(after, classes.region[1:])
    entry = np.isin(after, classes.region[:1])
    ways = np.where(split & within, combos.tp[:, None], 1)
    cut = np.asarray(setting.graph.cut_bytes * scale[:, None] / ways)
    return cut, np.where(split & entry, 0.0, cut)


def sent_bytes(setting: Setting, combos: Combinations, cut: Array) -> Array:
    """What one device sends of the bytes at each cut. Shape [C, U - 1].

    Every tp rank has all of a stream that is not divided. Source: Narayanan et al.
    2021, section 4.1, "Scatter/gather communication optimization".
    """
    if not setting.recipe.scattered_transfers:
        return cut
    whole = combos.sequence_parallel == 0
    return cut / np.where(whole, combos.tp, 1)[:, None]


def parameters_of(whole: Array, combos: Combinations) -> tuple[Array, Array]:
    """Dense and expert scalars per device before ZeRO. Shapes [C, U].

    Args:
        whole: By [of experts, split along tp, unit]. Shape [2, 2, U].
        combos: Degrees.
    """
    tp, ep = combos.tp[:, None], combos.ep[:, None]
    dense = whole[0, 0] + whole[0, 1] / tp
    expert = (whole[1, 0] + whole[1, 1] / tp) / ep
    return dense, expert


def between_halves(
    setting: Setting, classes: BlockClasses, combos: Combinations, scale: Array
) -> tuple[Array, Array]:
    """What a split backward keeps besides, and what the model returns.

    A head's loss is done with at the input gradient: what was saved behind the head's
    input goes, and the gradient of its output comes. Where nothing else of the graph
    stays either, the latter is mostly less.

    Returns:
        Bytes of one microbatch. Shapes [C, U] and [C].
    """
    table = classes.kernels
    element = float(dtype_bytes(setting.graph.dtype))
    member = np.zeros((len(table.owner), len(classes.blocks)))
    member[np.arange(len(table.owner)), table.owner] = 1.0
    kept = weight_gradient_bytes(table, element, combos.tp.astype(float)) @ member
    whole = weight_gradient_bytes(table, element, np.ones(1)) @ member
    head = np.array([block.kind == "head" for block in classes.blocks])
    last = head & (classes.count[:, -1] > 0)
    freed = classes.column("saved_bytes") - classes.column("boundary_bytes")
    if setting.recipe.keeps_graph:
        kept = np.where(head, np.maximum(kept - freed, 0.0), kept)
    else:
        kept = np.where(head, kept - freed, 0.0)
    kept = kept * scale[:, None]
    return kept @ classes.count, scale * float(whole[0, last].sum())
