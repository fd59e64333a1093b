"""Cross entropy of a model's output without its logits ever being there at once.

The last layer, which would make the logits, computes the loss instead: of one chunk of
the tokens after another, each chunk's logits gone before the next. Backward computes
them once more, so that between the two a layer keeps its input and one number a token.
It stays one call of one module: hooks that gather its weights run once a microbatch,
however many chunks there are.

Source: Hsu et al. 2024 (Liger Kernel, arXiv:2410.10989), section 3.2, "fused linear
cross entropy"; here with the gradients in backward, because pipelines begin several
microbatches before they end one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from executors.strategies.sharded import is_transposed
from planner.errors import ExecutionError, StrategyError

__all__ = ["ChunkedHead"]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross entropies of a linear layer's outputs.

    Of a vocabulary that tp ranks share, each has consecutive classes; highest logit,
    normaliser and the target's logit are put together over them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        setting: tuple[int, dist.ProcessGroup | None, int],
    ) -> torch.Tensor:
        chunks, group, ignored = setting
        first = 0 if group is None else weight.shape[0] * group.rank()
        own = target - first
        foreign = (own < 0) | (own >= weight.shape[0])
        index = own.masked_fill(foreign, 0)
        total = tokens.new_zeros((), dtype=torch.float32)
        normalisers = tokens.new_empty(len(tokens), dtype=torch.float32)
        for part in _parts(len(tokens), chunks):
            logits = functional.linear(tokens[part], weight, bias).float()
            highest = logits.amax(-1)
            if group is not None:
                dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            picked = logits.gather(-1, index[part].unsqueeze(-1)).squeeze(-1)
            picked = picked.masked_fill(foreign[part], 0)
            # In place: nothing else reads the logits.
            sums = logits.sub_(highest.unsqueeze(-1)).exp_().sum(-1)
            del logits
            if group is not None:
                # One message for both.
                both = torch.stack([sums, picked])
                dist.all_reduce(both, group=group)
                sums, picked = both.unbind()
            normalisers[part] = sums.log() + highest
            losses = normalisers[part] - picked
            total += losses.masked_fill(target[part] == ignored, 0).sum()
        ctx.save_for_backward(tokens, weight, bias, normalisers, index, foreign, target)
        ctx.chunks, ctx.ignored = chunks, ignored
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tokens, weight, bias, normalisers, index, foreign, target = ctx.saved_tensors
        of_tokens, of_weight, of_bias = (
            torch.zeros_like(tensor) if tensor is not None and wanted else None
            for tensor, wanted in zip(
                (tokens, weight, bias), ctx.needs_input_grad[:3], strict=True
            )
        )
        for part in _parts(len(tokens), ctx.chunks):
            logits = functional.linear(tokens[part], weight, bias).float()
            shares = logits.sub_(normalisers[part].unsqueeze(-1)).exp_()
            taken = (~foreign[part]).to(shares.dtype).unsqueeze(-1)
            shares.scatter_add_(-1, index[part].unsqueeze(-1), -taken)
            counted = (target[part] != ctx.ignored).to(shares.dtype) * grads[0]
            grad = shares.mul_(counted.unsqueeze(-1)).to(tokens.dtype)
            del logits, shares
            if of_tokens is not None:
                of_tokens[part] = grad @ weight
            if of_weight is not None:
                of_weight.addmm_(grad.t(), tokens[part])
            if of_bias is not None:
                of_bias += grad.sum(0)
        return of_tokens, of_weight, of_bias, None, None


def _parts(count: int, chunks: int) -> Iterator[slice]:
    """Yield at most so many slices of equal size, but for the last."""
    size = -(-count // chunks)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


class ChunkedHead:
    """A model's last layer that computes the loss of what it would have put out.

    Args:
        layer: The layer, in its final form under tp; its forward is replaced.
        name: FQN, for messages.
        chunks: Parts of the tokens of a microbatch.
        group: The tp axis, if it has dealt out the classes.
        ignored: Target of tokens that do not count.

    Raises:
        StrategyError: If the layer is not linear.
    """

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        chunks: int,
        group: dist.ProcessGroup | None,
        *,
        ignored: int = -100,
    ) -> None:
        self._transposed = is_transposed(layer)
        if not self._transposed and not isinstance(layer, nn.Linear):
            raise StrategyError(
                f"loss_chunks={chunks}, but the last module {name} is "
                f"{type(layer).__name__} and not nn.Linear, of whose product chunks "
                f"could be made; use loss_chunks=1"
            )
        self.name, self.chunks = name, chunks
        self._layer, self._group, self._ignored = layer, group, ignored
        self._plain = layer.forward
        self._target: torch.Tensor | None = None
        layer.__dict__["forward"] = self._forward

    def expect(self, target: torch.Tensor | None) -> None:
        """Take the target of the next forward; without one the layer puts out logits.

        Args:
            target: Class of each token, of any shape.
        """
        self._target = target

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        target, self._target = self._target, None
        if target is None:
            found: torch.Tensor = self._plain(tokens)
            return found
        if tokens.shape[:-1].numel() != target.numel():
            raise ExecutionError(
                f"loss_chunks={self.chunks}, but {self.name} was given "
                f"{list(tokens.shape[:-1])} tokens and there are targets of shape "
                f"{list(target.shape)}; use loss_chunks=1"
            )
        weight, bias = (
            one.to_local() if isinstance(one, DTensor) else one
            for one in (self._layer.weight, self._layer.bias)
        )
        assert isinstance(weight, torch.Tensor)
        loss: torch.Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            tokens.reshape(-1, tokens.shape[-1]),
            weight.t() if self._transposed else weight,
            bias,
            target.reshape(-1),
            (self.chunks, self._group, self._ignored),
        )
        return loss

    def require_loss(self, value: torch.Tensor) -> None:
        """Refuse a model's output that is not what its last layer put out.

        Raises:
            ExecutionError: If forward did more with it.
        """
        node, names = value.grad_fn, []
        while node is not None and node.name() == "_DDPSinkBackward":
            node = node.next_functions[0][0]
        if node is not None:
            names.append(node.name())
        if value.ndim or (node is not None and "_ChunkedCrossEntropy" not in names[0]):
            raise ExecutionError(
                f"loss_chunks={self.chunks}, but the model's forward does more with "
                f"the output of {self.name} than return it "
                f"({names[0] if names else f'shape {list(value.shape)}'}), such as to "
                f"scale or to cap its logits; use loss_chunks=1"
            )
