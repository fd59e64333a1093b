"""FLOP formulas against torch's, and where torch has none against arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from planner.capture.kernels import MEMORY, kernel_cost

aten = torch.ops.aten


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def _convolution(
    source: torch.Tensor, weight: torch.Tensor, groups: int, *, transposed: bool
) -> tuple[object, ...]:
    spatial = source.dim() - 2
    one, none = [1] * spatial, [0] * spatial
    return (source, weight, None, one, none, one, transposed, none, groups)


_CASES = [
    (aten.mm.default, (_meta(3, 4), _meta(4, 5))),
    (aten.addmm.default, (_meta(5), _meta(3, 4), _meta(4, 5))),
    (aten.bmm.default, (_meta(2, 3, 4), _meta(2, 4, 5))),
    (aten.baddbmm.default, (_meta(2, 3, 5), _meta(2, 3, 4), _meta(2, 4, 5))),
    *(
        (
            aten.convolution.default,
            _convolution(
                _meta(2, 4, *size),
                _meta(6, 4 // g, *[3] * len(size)),
                g,
                transposed=False,
            ),
        )
        for size, g in [((9,), 1), ((8, 9), 2), ((7, 8, 9), 1)]
    ),
    (
        aten.convolution.default,
        _convolution(_meta(2, 4, 8, 9), _meta(4, 6, 2, 2), 1, transposed=True),
    ),
]


@pytest.mark.parametrize(("op", "args"), _CASES)
def test_products_cost_what_torch_says(op: object, args: tuple[object, ...]) -> None:
    out = op(*args)  # type: ignore[operator]
    cost = kernel_cost(op, args, {}, out)
    theirs = flop_registry[op.overloadpacket](*args, out_val=out)  # type: ignore[attr-defined]
    groups = args[8] if len(args) == 9 else 1
    # torch leaves the groups of a convolution out of its formula's input channels
    # already, so the totals are equal as they stand.
    assert cost.flops == theirs
    assert cost.batch * cost.m * cost.n * cost.k * 2 == cost.flops
    assert groups in {1, cost.batch}
    assert cost.selective


@pytest.mark.parametrize("mask", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("transposed", [False, True])
def test_backward_of_a_convolution(mask: tuple[bool, bool], transposed: bool) -> None:
    source = _meta(2, 4, 8, 9)
    weight = _meta(4, 6, 3, 3) if transposed else _meta(6, 4, 3, 3)
    forward = _convolution(source, weight, 1, transposed=transposed)
    grad = aten.convolution.default(*forward)
    args = (grad, source, weight, None, *forward[3:], [*mask, False])
    out = aten.convolution_backward.default(*args)
    theirs = flop_registry[aten.convolution_backward](*args, out_val=out)
    assert kernel_cost(aten.convolution_backward.default, args, {}, out).flops == theirs


def test_grouped_products_meet_one_matrix_a_row() -> None:
    rows, groups, inner, columns = 64, 4, 16, 32
    x = _meta(rows, inner, dtype=torch.bfloat16)
    w = _meta(groups, inner, columns, dtype=torch.bfloat16)
    out = _meta(rows, columns, dtype=torch.bfloat16)
    cost = kernel_cost(aten._grouped_mm.default, (x, w), {}, out)
    assert cost.flops == 2 * rows * inner * columns
    assert (cost.batch, cost.m, cost.n, cost.k) == (4, 16, 32, 16)


def test_fused_attention_counts_both_products_in_full() -> None:
    q, k, v = _meta(2, 8, 32, 16), _meta(2, 2, 48, 16), _meta(2, 2, 48, 24)
    forward = torch.ops.meshwright.attention.default
    out = forward(q, k, v)
    cost = kernel_cost(forward, (q, k, v), {}, out)
    assert cost.flops == 2 * (2 * 8) * 32 * 48 * (16 + 24)
    assert (cost.kind, cost.heads, cost.kv_heads) == ("attention", 8, 2)
    backward = torch.ops.meshwright.attention_backward.default
    grads = backward(out[0], q, k, v, *out)
    twice = kernel_cost(backward, (out[0], q, k, v, *out), {}, grads)
    assert twice.flops == 2 * cost.flops
    assert twice.recompute_flops == 2 * (2 * 8) * 32 * 48 * 16
    assert [tuple(g.shape) for g in grads] == [tuple(t.shape) for t in (q, k, v)]


def test_a_fused_recurrent_layer() -> None:
    steps, batch, inner, hidden = 7, 3, 5, 4
    x, w, u = _meta(steps, batch, inner), _meta(16, inner), _meta(16, hidden)
    cost = kernel_cost(aten.mkldnn_rnn_layer.default, (x, w, u), {}, ())
    assert cost.flops == 2 * steps * batch * math.prod((16, inner + hidden))


def test_an_elementwise_op_costs_bytes_alone() -> None:
    x = _meta(4)
    assert kernel_cost(aten.add.Tensor, (x, x), {}, x) is MEMORY
