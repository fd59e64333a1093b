"""Cross entropy over classes of several ranks is that of the whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional

from executors.losses import sharded_cross_entropy
from tests.distributed.pool import Pool

CLASSES, TOKENS = 12, 40


def _case() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Far from zero: exp of them overflows without the maximum taken off.
    logits = torch.randn(TOKENS, CLASSES, generator=generator) * 40 + 300
    target = torch.randint(CLASSES, (TOKENS,), generator=generator)
    target[::7] = -100
    return logits, target


def _sharded() -> tuple[float, list[list[float]]]:
    logits, target = _case()
    group = dist.group.WORLD
    assert group is not None
    own = logits.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
    loss = sharded_cross_entropy(own, target, group) * 0.25
    loss.backward()
    assert own.grad is not None
    return loss.item(), own.grad.tolist()


def test_loss_and_gradient_equal_those_of_the_whole(pool: Pool) -> None:
    logits, target = _case()
    logits.requires_grad_()
    whole = functional.cross_entropy(logits, target, reduction="sum") * 0.25
    whole.backward()
    assert logits.grad is not None
    for world in (2, 4):
        found = pool.run(_sharded, world)
        assert all(abs(loss / whole.item() - 1) <= 1e-6 for loss, _ in found)
        grads = torch.cat([torch.tensor(grad) for _, grad in found], -1)
        torch.testing.assert_close(grads, logits.grad, rtol=1e-5, atol=1e-7)
