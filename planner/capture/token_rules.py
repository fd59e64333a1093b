"""Rules for what one op does with tokens and with samples, seen in two runs of it.

In the second run there are twice as many of them. The dimension that doubled is theirs,
in every tensor, and an op that has it is known to treat them one by one, or is not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from planner.random_draws import DRAWS, one_other_size

__all__ = [
    "READS_VALUES",
    "Op",
    "Shape",
    "doubled",
    "drawn_storages",
    "mixes_samples",
    "sums_of_losses",
    "token_violation",
]

Shape = tuple[int, ...]

# fmt: off
#: Ops that return the same elements, their dimensions in another order.
_MOVES = frozenset({
    "alias", "clone", "detach", "lift", "lift_fresh", "permute", "squeeze", "t",
    "transpose", "unsqueeze",
})
#: Ops that treat each element on its own, besides those that torch tags as such.
_POINTWISE = frozenset({
    "_to_copy", "bernoulli", "copy", "copy_", "masked_fill", "masked_fill_",
    "native_dropout", "where",
})
#: Ops whose results are equal along the tokens.
_UNIFORM = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "expand", "fill",
    "fill_", "full", "full_like", "new_empty", "new_empty_strided", "new_full",
    "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor", "zero_", "zeros",
    "zeros_like",
})
#: Ops that work along the dimensions that they are told, and nowhere else.
_ALONG = frozenset({
    "_fft_c2c", "_fft_c2r", "_fft_r2c", "_log_softmax", "_softmax", "all", "amax",
    "amin", "any", "argmax", "argmin", "argsort", "cat", "cumprod", "cumsum",
    "flip", "gather", "glu", "index_select", "linalg_vector_norm", "log_softmax",
    "logcumsumexp", "logsumexp", "max", "mean", "min", "norm", "prod", "roll",
    "scatter", "scatter_", "scatter_add", "select", "slice", "softmax", "sort",
    "split", "split_with_sizes", "stack", "std", "sum", "topk", "unbind", "unfold",
    "unsafe_split", "var", "var_mean",
})
_VIEWS = frozenset({
    "_reshape_alias", "_unsafe_view", "reshape", "view",
})
#: Norms over the last dimensions, whose shape they are told.
_NORMS = frozenset({
    "_fused_rms_norm", "native_layer_norm", "rms_norm",
})
#: Ops that bring together what lies along a dimension that they are told, or all.
_TOGETHER = _ALONG - frozenset({
    "all", "any", "cat", "gather", "glu", "index_select", "scatter", "scatter_",
    "scatter_add", "select", "slice", "split", "split_with_sizes", "stack", "unbind",
    "unfold", "unsafe_split",
})
#: Ops of which the result is a sum of what they read, by numbers.
_LINEAR = frozenset({
    "_to_copy", "_unsafe_view", "add", "add_", "alias", "cat", "clone", "detach", "div",
    "div_", "expand", "mean", "mul", "mul_", "neg", "rsub", "squeeze", "stack", "sub",
    "sub_", "sum", "unsqueeze", "view",
})
_PRODUCTS = frozenset({"div", "div_", "mul", "mul_"})
#: Ops that return what lies at one place, or in one range, of a dimension.
_CHOOSES = frozenset({"select", "slice"})
#: Ops that normalise channels by the statistics of samples, or running ones.
BATCH_NORMS = frozenset({
    "_batch_norm_with_update", "_native_batch_norm_legit", "cudnn_batch_norm",
    "native_batch_norm",
})
#: Those of which the result says where a token stands among those of all samples, or
#: what they have in common; sorting and counting them is what experts do.
_OF_ALL_TOKENS = frozenset({
    "_log_softmax", "_softmax", "cumprod", "cumsum", "linalg_vector_norm",
    "logcumsumexp", "logsumexp", "mean", "norm", "std", "var", "var_mean",
})
#: Ops that hand a value to Python, which may do anything with it.
READS_VALUES = frozenset({
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero",
})
# fmt: on
#: Arguments that say no more than shapes do.
_SIZES = _VIEWS | _UNIFORM | frozenset(["select", "slice", "split", "split_with_sizes"])
_COUNTS = "counts its tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op of one run.

    Attributes:
        name: Packet name, without ``aten::``.
        module: FQN of the module in whose forward it ran.
        reads: Storages of the tensors read.
        writes: Storages of the tensors made or written.
        inputs: Shapes of the tensors read.
        outputs: Shapes of the tensors made.
        dims: Dimensions that it was told to work along; None for none.
        others: Arguments that are no tensors.
        pointwise: True if torch says so.
        values: Values of each tensor read; None where not known.
        made: The same of each tensor made.
    """

    name: str
    module: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    dims: tuple[int, ...] | None = None
    others: tuple[str, ...] = ()
    pointwise: bool = False
    values: tuple[torch.Tensor | None, ...] = ()
    made: tuple[torch.Tensor | None, ...] = ()


# -- One op ----------------------------------------------------------------------


def doubled(one: Shape, two: Shape) -> int | None:
    """Index of the one dimension that doubled; None if equal, -1 if else differs."""
    return one_other_size(one, two, 2)


def token_violation(one: Op, two: Op, length: int) -> str | None:
    """Return what an op does to tokens beside treating them one by one, or None."""
    if one.name in {"repeat", "opaque"}:
        return None
    if len(one.inputs) != len(two.inputs) or len(one.outputs) != len(two.outputs):
        return "reads another number of tensors where there are more tokens"
    ins = [doubled(a, b) for a, b in zip(one.inputs, two.inputs, strict=True)]
    outs = [doubled(a, b) for a, b in zip(one.outputs, two.outputs, strict=True)]
    for axis, a, b in zip(ins, one.values, two.values, strict=True):
        if axis is None and a is not None and b is not None and not torch.equal(a, b):
            return "depends on the number of tokens"
    if one.others != two.others and one.name not in _SIZES:
        numbers = not any(axis is not None for axis in ins)
        return _COUNTS if numbers else "depends on the number of tokens"
    if -1 in ins or -1 in outs:
        return "lets tokens meet"
    if any(axis is not None for axis in outs) and _is_uniform(two, outs):
        return None
    axes = {axis for axis in ins if axis is not None}
    made = {axis for axis in outs if axis is not None}
    if not axes:
        return _COUNTS if made and one.name not in _UNIFORM else None
    if not made:
        return "sums tokens up, or chooses among them"
    whole = [
        shape[axis] % length == 0
        for axis, shape in zip((*ins, *outs), (*one.inputs, *one.outputs), strict=True)
        if axis is not None
    ]
    if not all(whole) or not _apart(one, ins, outs):
        return "lets tokens meet"
    return None


def _is_uniform(op: Op, axes: Sequence[int | None]) -> bool:
    """True if what an op makes is known to be equal along the tokens."""
    return all(
        axis is None
        or (value is not None and bool((value == value.narrow(axis, 0, 1)).all()))
        for axis, value in zip(axes, op.made, strict=True)
    )


def _apart(one: Op, ins: Sequence[int | None], outs: Sequence[int | None]) -> bool:
    """True if an op is known to treat tokens one by one."""
    sizes = {
        shape[axis]
        for axis, shape in zip((*ins, *outs), (*one.inputs, *one.outputs), strict=True)
        if axis is not None
    }
    first = next(at for at, axis in enumerate(ins) if axis is not None)
    axis, shape = ins[first], one.inputs[first]
    assert axis is not None
    if one.name in _VIEWS:
        after = outs[0]
        assert after is not None
        return math.prod(shape[axis + 1 :]) == math.prod(one.outputs[0][after + 1 :])
    if len(sizes) > 1:
        return False
    if one.name == "meshwright::attention":
        return ins == [2, 2, 2] and all(len(s) == 4 for s in one.inputs)
    if one.name in _MOVES:
        return True
    if one.name in _UNIFORM or one.name in _POINTWISE or one.pointwise:
        return _aligned(one, ins, outs)
    if one.name in _ALONG:
        rank = len(one.outputs[0]) if one.name == "stack" else len(shape)
        if one.dims is None:
            # Without one, these work along the first.
            first_by_default = one.name in {"cat", "slice", "split", "stack", "unbind"}
            return first_by_default and axis != 0
        along = {dim % rank for dim in one.dims}
        places = {outs[0] if one.name == "stack" else axis}
        return not along & places
    if one.name in _NORMS:
        return axis == outs[0] and shape[axis + 1 :] != () and ins.count(axis) == 1
    if one.name in {"mm", "addmm", "bmm", "baddbmm"}:
        return _product(one.name, ins, outs)
    if one.name == "embedding":
        return ins == [None, outs[0]]
    if one.name in {"constant_pad_nd", "view_as_complex", "view_as_real"}:
        return axis == outs[0]
    return False


def _aligned(one: Op, ins: Sequence[int | None], outs: Sequence[int | None]) -> bool:
    """True if the tokens are the same dimension from the right, in all tensors."""
    places = {
        axis - len(shape)
        for axis, shape in zip((*ins, *outs), (*one.inputs, *one.outputs), strict=True)
        if axis is not None
    }
    return len(places) == 1 and all(axis is not None for axis in outs)


def _product(name: str, ins: Sequence[int | None], outs: Sequence[int | None]) -> bool:
    """True if a product of matrices does not sum over tokens."""
    bias, (a, b) = (ins[0], ins[1:]) if len(ins) == 3 else (None, ins)
    batched = name in {"bmm", "baddbmm"}
    rows, columns = (1, 2) if batched else (0, 1)
    if batched and a == b == outs[0] == 0:
        return bias is None or bias == 0
    if bias is not None and bias != outs[0]:
        return False
    return (a, b, outs[0]) in {(rows, None, rows), (None, columns, columns)}


def mixes_samples(one: Op, two: Op, sizes: Collection[int]) -> bool:
    """True if an op is known to bring samples together.

    Ops that are not known are left to certificates: nearly all models treat samples
    one by one, and experts sort the tokens of all samples.

    Args:
        one: The op.
        two: The same with twice the samples.
        sizes: Sizes of dimensions that count samples, or their rows.
    """
    if one.name in {"repeat", "opaque"} or len(one.inputs) != len(two.inputs):
        return False
    ins = [doubled(a, b) for a, b in zip(one.inputs, two.inputs, strict=True)]
    outs = [doubled(a, b) for a, b in zip(one.outputs, two.outputs, strict=True)]
    rows = zip(ins, one.inputs, one.values, strict=True)
    held = [
        (axis, shape)
        for axis, shape, value in rows
        if axis is not None and axis >= 0 and shape[axis] in sizes and value is None
    ]
    if one.name == "randperm":
        return outs != [None]
    if one.pointwise and one.others != two.others:
        # A number of which only the batch is the cause.
        return any(axis is not None for axis in ins)
    if not held:
        return one.name in _OF_ALL_TOKENS and any(
            axis is not None
            and axis >= 0
            and value is None
            and axis in {dim % len(shape) for dim in one.dims or (axis,)}
            for axis, shape, value in zip(ins, one.inputs, one.values, strict=True)
        )
    if one.name in BATCH_NORMS:
        # Of channels, or in training no statistics.
        return "True" in one.others and any(axis != 1 for axis, _ in held)
    if one.name in {"mm", "addmm", "bmm", "baddbmm"}:
        # Each sample with each other, or a sum over them.
        return -1 in outs or outs == [None]
    if one.name in _CHOOSES and one.dims is not None:
        # Samples at places that do not grow with the batch.
        axis, shape = held[0]
        return outs in ([None], [-1]) and axis == one.dims[0] % len(shape)
    if one.name not in _TOGETHER:
        return False
    return any(
        not one.dims or axis in {dim % len(shape) for dim in one.dims}
        for axis, shape in held
    )


def drawn_storages(ops: Sequence[Op]) -> frozenset[int]:
    """Storages of which the values follow from random draws and constants alone."""
    found = set[int]()
    for op in ops:
        # A call that stands for others has no values.
        read = zip(op.reads, op.values or (None,) * len(op.reads), strict=True)
        follows = {s for s, value in read if value is None and s not in op.writes}
        # Of these, what is read is a size, or what they write over.
        own = op.name in DRAWS and (op.name.endswith(("_", "_like")) or not op.reads)
        if own or (follows and follows <= found):
            found.update(op.writes)
        else:
            found.difference_update(op.writes)
    return frozenset(found)


def sums_of_losses(
    pairs: Sequence[tuple[Op, Op]], losses: Collection[int], drawn: Collection[int]
) -> frozenset[int]:
    """Rows of ops that sum over samples what becomes a loss and nothing else.

    From the losses, ops are followed back through what is linear and has no dimension
    of samples. A loss that is a sum or mean of samples' own is no meeting of theirs.

    Args:
        pairs: Ops of a run that are of use, and the same with twice the samples.
        losses: Storages that are trained on.
        drawn: Storages of random draws; of their sums, numbers must show that they are
            those of each sample.
    """
    parts, elsewhere, found = set(losses), set[int](), set[int]()
    counts = _label_counts(pairs) | frozenset(drawn)
    for row, (one, two) in reversed([*enumerate(pairs)]):
        made = set(one.writes)
        only = bool(made) and made <= parts and not made & elsewhere
        if only and _is_linear(one, counts) and one.outputs == two.outputs:
            if one.inputs == two.inputs:
                parts.update(one.reads)
                continue
            found.add(row)
        elsewhere.update(one.reads)
    return frozenset(found)


def _label_counts(pairs: Sequence[tuple[Op, Op]]) -> frozenset[int]:
    """Storages that tell, or count, the labels that are no ``ignore_index``.

    Where none is ignored, they are as many as there are; executors weigh or refuse
    batches of which parts have different numbers of them.
    """
    found = set[int]()
    for one, _ in pairs:
        told = one.name in {"eq", "ne"} and _is_negative(one.others)
        counted = one.name in {"bitwise_not", "logical_not", "sum", "_to_copy"}
        if told or (counted and found.issuperset(one.reads)):
            found.update(one.writes)
    return frozenset(found)


def _is_negative(arguments: Sequence[str]) -> bool:
    """Return True for one integer below 0, which no class has."""
    return len(arguments) == 1 and arguments[0][1:].isdigit() and arguments[0][0] == "-"


def _is_linear(op: Op, counts: Collection[int]) -> bool:
    if op.name not in _PRODUCTS:
        return op.name in _LINEAR
    read = zip(op.reads, op.values, strict=True)
    factors = [at for at, value in read if value is None]
    if not op.name.startswith("div"):
        return len(factors) == 1
    # What is divided is linear, what it is divided by is not.
    divided = op.values[0] is None
    return divided and (len(factors) == 1 or factors[1] in counts)
