"""The loss of a last layer, made of some tokens' logits at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executors.losses import LossFunction
from executors.strategies.chunked_head import ChunkedHead
from planner.errors import ExecutionError, StrategyError

TOKENS, FEATURES, CLASSES = 30, 4, 50


class _Largest(TorchDispatchMode):
    """Most elements of a tensor that an op in the block puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = (t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        self.found = max(self.found, *sizes, 0)
        return out


def _case(**options: Any) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(FEATURES, CLASSES, **options)
    tokens = torch.randn(3, TOKENS // 3, FEATURES, requires_grad=True)
    target = torch.randint(CLASSES, (3, TOKENS // 3))
    target[0, :4] = -100
    return layer, tokens, target


@pytest.mark.parametrize("chunks", [2, 7, 100])
def test_loss_and_gradients_are_the_plain_ones(chunks: int) -> None:
    layer, tokens, target = _case()
    wanted = functional.cross_entropy(
        layer(tokens).flatten(0, 1), target.flatten(), reduction="sum"
    )
    given = (tokens, layer.weight, layer.bias)
    plain = torch.autograd.grad(wanted * 3, given)
    head = ChunkedHead(layer, "head", chunks, None)
    head.expect(target)
    loss = layer(tokens)
    torch.testing.assert_close(loss, wanted)
    head.require_loss(loss)
    torch.testing.assert_close(torch.autograd.grad(loss * 3, given), plain)


def test_no_op_puts_out_all_logits() -> None:
    layer, tokens, target = _case(bias=False)
    head = ChunkedHead(layer, "head", 5, None)
    head.expect(target)
    with _Largest() as largest:
        layer(tokens).backward()
    # The gradient of the weight, or the logits of a chunk, are the largest.
    assert largest.found == max(FEATURES, TOKENS // 5) * CLASSES


def test_a_frozen_layer_gets_no_gradient() -> None:
    layer, tokens, target = _case()
    layer.requires_grad_(False)
    head = ChunkedHead(layer, "head", 3, None)
    head.expect(target)
    layer(tokens).backward()
    assert layer.weight.grad is None
    assert tokens.grad is not None


def test_an_output_that_is_scaled_is_refused() -> None:
    layer, tokens, target = _case()
    loss = LossFunction(
        kind="cross_entropy", data_parallel=1, head=ChunkedHead(layer, "head", 3, None)
    )
    with pytest.raises(ExecutionError, match="does more with the output of head"):
        loss.of(lambda tokens: 2 * layer(tokens), {"tokens": tokens}, target)


def test_a_layer_that_is_not_linear_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"is Sequential and not nn\.Linear"):
        ChunkedHead(nn.Sequential(nn.Linear(2, 2)), "head", 3, None)
