"""Parameters and activations of every unit under every combination of degrees."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.classes import BlockClasses
from planner.cost.combinations import Combinations
from planner.cost.compute import weight_gradient_bytes
from planner.cost.efficiency import score_elements
from planner.cost.setting import Setting
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
    none = divided("saved_bytes", "saved_tensor_bytes", gathered)
    kinds = ("saved_selective_bytes", "saved_selective_tensor_bytes")
    sums = classes.column(kinds[0]) - classes.column(kinds[1]) - boundary
    selective = np.minimum(none, divided(*kinds, np.maximum(sums, 0.0)))
    if setting.recipe.selective == "attention":
        selective = none
    none = none + _score_bytes(setting, classes, combos)
    full = column * boundary / stream
    working = column * classes.column("transient_bytes")
    working = np.where(classes.streamed, working / tp, working)
    return np.stack([none, selective, full]), working


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


def transient_bytes(saved: Array, working: Array, to_units: Array) -> Array:
    """Working set of each unit by recompute kind. Shape [3, C, U], as ``saved``.

    A unit is recomputed as a whole, so that in its backward all that it would have
    kept without recomputation is there at once.
    """
    largest = np.zeros((working.shape[0], to_units.shape[1]))
    for index, present in enumerate(to_units > 0):
        np.maximum(largest, working[:, index, None] * present, out=largest)
    none, selective, _ = saved
    return np.stack([largest, largest + none - selective, largest + none])


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
    input goes, and the gradient of its output comes.

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
    kept = np.where(head, np.maximum(kept - freed, 0.0), kept) * scale[:, None]
    return kept @ classes.count, scale * float(whole[0, last].sum())
