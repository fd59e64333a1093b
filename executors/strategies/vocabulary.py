"""Cross entropy of logits whose classes are dealt out over tp ("loss parallel").

The whole logits are the largest tensor of many models: here no rank ever has them.
Source: Shoeybi et al. 2019, section 3 (parallel cross entropy).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["sharded_cross_entropy"]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        group: dist.ProcessGroup,
        ignored: int,
    ) -> torch.Tensor:
        classes = logits.shape[-1]
        highest = logits.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        exponents = (logits - highest.unsqueeze(-1)).exp_()
        own = target - classes * group.rank()
        foreign = (own < 0) | (own >= classes)
        index = own.masked_fill(foreign, 0).unsqueeze(-1)
        picked = logits.gather(-1, index).squeeze(-1).masked_fill(foreign, 0)
        # One message for both sums.
        sums = torch.stack([exponents.sum(-1), picked])
        dist.all_reduce(sums, group=group)
        losses = sums[0].log() + highest - sums[1]
        exponents.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(exponents, index, foreign, target == ignored)
        return losses.masked_fill(target == ignored, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shares, index, foreign, ignored = ctx.saved_tensors
        grad = shares.clone()
        taken = (~foreign).to(grad.dtype).unsqueeze(-1)
        grad.scatter_add_(-1, index, -taken)
        grad.masked_fill_(ignored.unsqueeze(-1), 0)
        return grad.mul_(grads[0]), None, None, None


def sharded_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    ignored: int = -100,
) -> torch.Tensor:
    """Sum of cross entropies, the same on every rank of the group.

    -log softmax(logits)[target], with the maximum, the normaliser and the target's
    logit each put together over the group.

    Args:
        logits: This rank's consecutive classes, in float32. Shape [tokens, classes /
            tp].
        target: Class of each token among all. Shape [tokens].
        group: The tp axis, in order of the classes.
        ignored: Target of tokens that do not count.

    Returns:
        A scalar.
    """
    result: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target, group, ignored
    )
    return result
