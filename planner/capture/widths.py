"""One run of ops beside another with twice the features: may ranks share them?

Ranks share the features in equal runs. That is right if every op treats each run on
its own: the doubled dimension stays one dimension with the same elements outside of
it, is never summed, cut or joined, and arrives whole in the layer that sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Op", "Shape", "why_not_divided"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """What one op read and made.

    Attributes:
        name: Of its schema, without a namespace of ``aten``; ``rowwise`` stands for a
            layer that sums over the divided features.
        inputs: Shapes of the tensors read.
        outputs: Shapes of the tensors made.
        dim: Dimension that it was told to work along.
    """

    name: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...] = ()
    dim: int | None = None


_VIEWS = frozenset({"view", "_unsafe_view", "_reshape_alias", "reshape", "as_strided"})
#: They pick elements, or lay copies side by side.
_CUTS = frozenset(
    {
        "slice",
        "split",
        "split_with_sizes",
        "unsafe_split",
        "unbind",
        "select",
        "narrow",
        "index_select",
        "constant_pad_nd",
        "repeat",
        "unfold",
    }
)
#: Along their dimension, they mix elements or change their order.
_MIXES = frozenset(
    {
        "_softmax",
        "_log_softmax",
        "cat",
        "cumsum",
        "cumprod",
        "flip",
        "gather",
        "glu",
        "logcumsumexp",
        "roll",
        "scatter",
        "sort",
        "topk",
    }
)
_FIXED = "cut their features at fixed places ({})"
_MIXED = "mix their features before they are summed ({})"


def why_not_divided(whole: Sequence[Op], wide: Sequence[Op]) -> str | None:
    """What stands against sharing the features.

    Args:
        whole: Ops of the run as it is.
        wide: Of the run with twice the features.

    Returns:
        Words that may follow the names of the layers; None if nothing does.
    """
    if [op.name for op in whole] != [op.name for op in wide]:
        return "run other ops with other numbers of features"
    for one, two in zip(whole, wide, strict=True):
        reason = _why(one, two)
        if reason is not None:
            return reason.format(one.name)
    return None


def _doubled(one: Shape, two: Shape) -> int | None:
    """Index of the one dimension that doubled; None without, -1 if else differs."""
    if one == two:
        return None
    if len(one) != len(two):
        return -1
    at, *more = [at for at, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    return at if not more and two[at] == 2 * one[at] else -1


def _why(one: Op, two: Op) -> str | None:
    if len(one.inputs) != len(two.inputs) or len(one.outputs) != len(two.outputs):
        return _FIXED
    ins = [_doubled(a, b) for a, b in zip(one.inputs, two.inputs, strict=True)]
    outs = [_doubled(a, b) for a, b in zip(one.outputs, two.outputs, strict=True)]
    if -1 in ins or -1 in outs:
        return _MIXED
    if one.name == "rowwise":
        return None if ins and ins[0] == len(one.inputs[0]) - 1 else _MIXED
    if all(axis is None for axis in ins):
        return None
    if all(axis is None for axis in outs):
        return _MIXED
    if one.name == "meshwright::attention":
        # Heads: the third dimension from the right, of all three.
        at = [len(shape) - 3 for shape in one.inputs]
        return None if ins == at else _FIXED
    axis, shape = next(
        (a, s) for a, s in zip(ins, one.inputs, strict=True) if a is not None
    )
    if one.dim is not None and one.name in _MIXES and one.dim % len(shape) == axis:
        return _MIXED
    if one.name in _CUTS:
        made = zip(outs, one.outputs, strict=True)
        same = all(a is not None and s[a] == shape[axis] for a, s in made)
        return None if same else _FIXED
    if one.name in _VIEWS:
        out = outs[0]
        kept = out is not None and _in_place(shape, axis, one.outputs[0], out)
        return None if kept else _FIXED
    return None


def _in_place(before: Shape, axis: int, after: Shape, at: int) -> bool:
    """Whether a view leaves the shared dimension where it was in memory."""
    outside, now = math.prod(before[:axis]), math.prod(after[:at])
    if outside == now:
        return True
    # Products of matrices take [batch x heads] as one dimension, and give it back.
    merged = len(after) == 3 and not at and after[0] == math.prod(before[: axis + 1])
    parted = len(before) == 3 and not axis and before[0] == math.prod(after[: at + 1])
    return (now < outside and merged) or (now > outside and parted)
