"""Dynamic scaling of the loss, without which small gradients vanish in float16.

Gradients are scaled where backward begins, so that losses are what they are. Behind
the last microbatch they are put back, and every rank learns whether one of them has a
number that is not finite: then all skip the step alike. Copies that train on their own
have scales of their own.

Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2; constants of
``torch.amp.GradScaler``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from executors.mesh import ProcessMesh

__all__ = ["LossScaler"]

_FIRST_SCALE, _GROWTH, _BACKOFF = 2.0**16, 2.0, 0.5
#: Steps without an overflow behind which the scale grows.
_GROWTH_STEPS = 2000.0


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.scale, None


class LossScaler:
    """Scale of the gradients of a run, the same on all ranks that share gradients.

    Attributes:
        state: Scale, and steps since it last changed; float32 on the CPU, kept in
            checkpoints.
        overflowed: Whether a gradient of the last step was not finite.
    """

    def __init__(self) -> None:
        self.state = torch.tensor([_FIRST_SCALE, 0.0])
        self.overflowed = False

    @property
    def scale(self) -> float:
        """Factor of the gradients; the first one in a dry run, which has no values."""
        return _FIRST_SCALE if self._dry else float(self.state[0])

    @property
    def _dry(self) -> bool:
        return isinstance(self.state, FakeTensor)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss whose gradients are scaled."""
        found: torch.Tensor = _Scaled.apply(loss, self.scale)  # type: ignore[no-untyped-call]
        return found

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter], place: ProcessMesh) -> None:
        """Put gradients back, and look for overflows.

        Collective over all ranks, or over those of a copy that trains on its own.

        Args:
            parameters: All of this rank.
            place: Where this process stands.
        """
        found = torch.zeros((), device=place.device)
        for parameter in parameters:
            if parameter.grad is not None:
                grad = parameter.grad
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                local.mul_(1 / self.scale)
                bad = (~local.isfinite()).any().to(found.dtype)
                found = torch.maximum(found, bad)
        if not place.apart or place.replica is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=place.replica)
        self.overflowed = not self._dry and bool(found)

    def update(self) -> None:
        """Change the scale behind a step: less after an overflow, more after many none.

        It stays within the normal numbers of float32.
        """
        if self._dry:
            return
        scale, steps = self.state.tolist()
        if self.overflowed:
            scale, steps = max(scale * _BACKOFF, 2.0**-100), 0.0
        elif steps + 1 >= _GROWTH_STEPS:
            scale, steps = min(scale * _GROWTH, 2.0**100), 0.0
        else:
            steps += 1
        self.state.copy_(torch.tensor([scale, steps]))
