"""Cost of one op: FLOPs, and the class of kernel it runs as.

Formulas are torch's own where ``torch.utils.flop_counter`` has one. It counts zero for
grouped products, fused recurrent layers and attention on CPU; those are given here.
Multiply and add count as two. FLOPs that fused attention repeats in its backward are
kept apart from the FLOPs of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from planner.capture.private_apis import flop_formulas
from planner.graph.ops import KernelCost
from planner.schema.halo import Window

__all__ = ["FUSIBLE", "MEMORY", "KernelCost", "kernel_cost", "tensor_bytes"]

#: Cost of an op that only moves bytes.
MEMORY = KernelCost()

#: Ops that compilers fuse beside those that torch tags as pointwise: reductions, norms,
#: softmax, losses, and copies into another layout.
FUSIBLE = frozenset(
    f"aten::{name}"
    for name in (
        "_fused_rms_norm",
        "_log_softmax",
        "_softmax",
        "_to_copy",
        "amax",
        "cat",
        "clone",
        "copy_",
        "index",
        "index_select",
        "mean",
        "native_dropout",
        "native_layer_norm",
        "nll_loss_forward",
        "sum",
        "var_mean",
    )
)


class _Op(NamedTuple):
    """One dispatched op: its arguments and its result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


Formula = Callable[[_Op], KernelCost]


def _matmul(
    m: int, n: int, k: int, batch: int = 1, *, flops: float | None = None
) -> KernelCost:
    return KernelCost(
        kind="matmul",
        batch=batch,
        m=m,
        n=n,
        k=k,
        flops=2.0 * batch * m * n * k if flops is None else flops,
        selective=True,
    )


def _mm(op: _Op) -> KernelCost:
    a, b = op.args[:2]
    return _matmul(a.shape[0], b.shape[1], a.shape[1])


def _addmm(op: _Op) -> KernelCost:
    return _mm(op._replace(args=op.args[1:]))


def _bmm(op: _Op) -> KernelCost:
    a, b = op.args[:2]
    return _matmul(a.shape[1], b.shape[2], a.shape[2], a.shape[0])


def _baddbmm(op: _Op) -> KernelCost:
    return _bmm(op._replace(args=op.args[1:]))


def _grouped_mm(op: _Op) -> KernelCost:
    """Product of each row with the matrix of its group; 2-d x 2-d: weight gradient."""
    a, b = op.args[:2]
    if a.dim() == 3:
        return _matmul(a.shape[1], b.shape[-1], a.shape[2], a.shape[0])
    rows, inner, columns = a.shape[0], a.shape[1], b.shape[-1]
    flops = 2.0 * rows * inner * columns
    if b.dim() == 3:
        groups = b.shape[0]
        return _matmul(max(1, rows // groups), columns, inner, groups, flops=flops)
    groups = op.out.shape[0] if op.out.dim() == 3 else 1
    return _matmul(rows, columns, max(1, inner // groups), groups, flops=flops)


def _grouped_fallback_backward(op: _Op) -> KernelCost:
    """Input and weight gradient in one op: (grad, input, weight, offsets)."""
    grad, source = op.args[:2]
    flops = 4.0 * source.shape[0] * source.shape[1] * grad.shape[-1]
    return _matmul(source.shape[0], grad.shape[-1], source.shape[1], flops=flops)


def _geometry(source: torch.Tensor, windows: tuple[Window, ...]) -> dict[str, Any]:
    """Windows of an op with what they go over; nothing of an op without."""
    if not windows or source.dim() != len(windows) + 2:
        return {}
    return {
        "windows": windows,
        "sizes": tuple(source.shape[2:]),
        "channels": int(source.shape[0] * source.shape[1]),
    }


#: Stands for an op that makes several values, or one, of each value: it needs no halo.
_ALONE = Window(kernel=1)


def _conv_windows(op: _Op) -> tuple[Window, ...]:
    """Windows of a convolution; of a transposed one if they do not overlap."""
    kernel = op.args[1].shape[2:]
    # One number counts for every dim, as padding="valid" passes it.
    stride, padding, dilation = (_each(one, len(kernel)) for one in op.args[3:6])
    if bool(op.args[6]):
        apart = list(stride) == list(kernel) and not any((*padding, *op.args[7]))
        return (_ALONE,) * len(kernel) if apart and set(dilation) == {1} else ()
    rows = zip(kernel, stride, padding, dilation, strict=True)
    return tuple(
        Window(kernel=int(k), stride=int(s), before=int(p), behind=int(p), dilation=d)
        for k, s, p, d in rows
    )


def _each(given: Any, count: int) -> list[int]:
    values = list(given)
    return [int(value) for value in (values * count if len(values) == 1 else values)]


def _pooling(op: _Op) -> KernelCost:
    """Pooling: (input, kernel, stride, padding, then dilation or what is counted)."""
    names = ("kernel_size", "stride", "padding")
    given = dict(zip(names, op.args[1:], strict=False)) | op.kwargs
    source, count = op.args[0], len(given["kernel_size"])
    kernel = _each(given["kernel_size"], count)
    stride = _each(given.get("stride") or kernel, count)
    padding = _each(given.get("padding") or [0], count)
    windows = tuple(
        Window(kernel=k, stride=s, before=p, behind=p)
        for k, s, p in zip(kernel, stride, padding, strict=True)
    )
    # Dilated poolings, those that round up, and those that leave padding out of a mean
    # make other sizes or values than such windows.
    rest = op.args[4:]
    plain = all(each in (1, False, [1], [1] * count, None, True) for each in rest)
    return KernelCost(**_geometry(source, windows)) if plain else MEMORY


def _enlargement(op: _Op) -> KernelCost:
    """Nearest neighbours: several values of each one."""
    source, made = op.args[0], op.out
    sizes = zip(made.shape[2:], source.shape[2:], strict=True)
    if any(new % old for new, old in sizes):
        return MEMORY
    return KernelCost(**_geometry(source, (_ALONE,) * (source.dim() - 2)))


def _convolution(op: _Op) -> KernelCost:
    """Convolution as a matrix product: m output positions, n channels, k taps."""
    source, weight, transposed = op.args[0], op.args[1], bool(op.args[6])
    groups = int(op.args[8])
    spatial = source.shape[2:] if transposed else op.out.shape[2:]
    m = source.shape[0] * math.prod(spatial)
    first, second, *kernel = weight.shape
    n, k = (second, first // groups) if transposed else (first // groups, second)
    k *= math.prod(kernel)
    return KernelCost(
        kind="conv",
        batch=groups,
        m=m,
        n=n,
        k=k,
        flops=2.0 * groups * m * n * k,
        selective=True,
        **_geometry(source, _conv_windows(op)),
    )


def _convolution_backward(op: _Op) -> KernelCost:
    """One product of the forward's size for each gradient that is wanted."""
    grad, source, weight, _, *rest = op.args
    one = _convolution(_Op((source, weight, None, *rest[:6]), {}, grad))
    wanted = sum(bool(flag) for flag in rest[6][:2])
    return KernelCost(
        kind="conv",
        batch=one.batch,
        m=one.m,
        n=one.n,
        k=one.k,
        flops=wanted * one.flops,
        selective=True,
    )


def _scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, factor: float, again: float
) -> KernelCost:
    """Count both products of attention in full: causal kernels skip up to half."""
    batch, m, d = math.prod(q.shape[:-2]), q.shape[-2], q.shape[-1]
    n, e = k.shape[-2], v.shape[-1]
    forward = 2.0 * batch * m * n * (d + e)
    return KernelCost(
        kind="attention",
        batch=batch,
        m=m,
        n=n,
        k=max(1, (d + e) // 2),
        flops=factor * forward,
        recompute_flops=again * forward,
        selective=True,
        heads=q.shape[-3],
        kv_heads=k.shape[-3],
        kv_bytes=float(k.numel() * k.element_size() + v.numel() * v.element_size()),
    )


def _attention(op: _Op) -> KernelCost:
    q, k, v = op.args[:3]
    return _scores(q, k, v, factor=1.0, again=0.0)


def _attention_backward(op: _Op) -> KernelCost:
    """Four products for dq, dk, dv, dp; QK^T a fifth time, which is recomputation."""
    q, k, v = op.args[1:4]
    d, e = q.shape[-1], v.shape[-1]
    return _scores(q, k, v, factor=2.0, again=d / (d + e))


def _rnn(op: _Op) -> KernelCost:
    """One layer and direction of an RNN: both weight matrices at every position."""
    x, w_ih, w_hh = op.args[:3]
    steps, inner = x.shape[0] * x.shape[1], w_ih.shape[1] + w_hh.shape[1]
    return _matmul(steps, w_ih.shape[0], inner)


def _rnn_backward(op: _Op) -> KernelCost:
    one = _rnn(op)
    return _matmul(one.m, one.n, one.k, flops=2.0 * one.flops)


def _lookup(op: _Op) -> KernelCost:
    first = op.out[0] if isinstance(op.out, tuple | list) else op.out
    width = int(first.shape[-1]) if first.dim() else 1
    return KernelCost(
        kind="embedding", m=max(1, first.numel() // max(1, width)), n=width
    )


def _generic(formula: Callable[..., int]) -> Formula:
    def cost(op: _Op) -> KernelCost:
        flops = float(formula(*op.args, **op.kwargs, out_val=op.out))
        return KernelCost(flops=flops, selective=True)

    return cost


_OWN: dict[str, Formula] = {
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::bmm": _bmm,
    "aten::baddbmm": _baddbmm,
    "aten::_grouped_mm": _grouped_mm,
    "aten::_scaled_grouped_mm": _grouped_mm,
    "transformers::grouped_mm_fallback": _grouped_mm,
    "transformers::grouped_mm_fallback_backward": _grouped_fallback_backward,
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::avg_pool2d": _pooling,
    "aten::avg_pool3d": _pooling,
    "aten::max_pool2d_with_indices": _pooling,
    "aten::max_pool3d_with_indices": _pooling,
    "aten::upsample_nearest1d": _enlargement,
    "aten::upsample_nearest2d": _enlargement,
    "aten::upsample_nearest3d": _enlargement,
    "meshwright::attention": _attention,
    "meshwright::attention_backward": _attention_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "aten::mkldnn_rnn_layer": _rnn,
    "aten::mkldnn_rnn_layer_backward": _rnn_backward,
    "aten::embedding": _lookup,
    "aten::_embedding_bag": _lookup,
    "aten::_embedding_bag_forward_only": _lookup,
}

_FORMULAS: dict[Any, Formula | None] = {}
_TORCH: dict[Any, Callable[..., int]] = {}


def _formula(func: Any) -> Formula | None:
    """The formula of an op, looked up once."""
    if not _TORCH:
        _TORCH.update(flop_formulas())
    schema = getattr(func, "_schema", None)
    formula = _OWN.get(schema.name) if schema is not None else None
    if formula is None:
        theirs = _TORCH.get(getattr(func, "overloadpacket", func))
        formula = None if theirs is None else _generic(theirs)
    _FORMULAS[func] = formula
    return formula


def kernel_cost(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> KernelCost:
    """FLOPs and class of one dispatched op.

    Args:
        func: The op overload.
        args: As dispatched.
        kwargs: As dispatched.
        out: What it returned.
    """
    formula = _FORMULAS[func] if func in _FORMULAS else _formula(func)
    if formula is None:
        return MEMORY
    return formula(_Op(args, kwargs, out))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes that an op moves to read or write a tensor, broadcast ones once."""
    size = tensor.numel() * tensor.element_size()
    if tensor.layout is not torch.strided:
        return size
    return min(size, tensor.untyped_storage().nbytes()) or size
