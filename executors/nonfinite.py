"""Steps whose loss or gradient is not finite, left out on all ranks alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from executors.communication.buckets import BucketedReplicas, PlainExchange
from executors.learning.backpropagation import BackpropagationStep
from executors.replicas.all_reduce import AllReduceReplicas
from executors.steps import ParallelModel
from executors.trainer import Trainer
from planner.errors import ExecutionError

__all__ = ["ON_NONFINITE", "OnNonfinite", "SkippingStep", "require_policy"]

#: Done about a loss or gradient norm that is not finite.
OnNonfinite = Literal["stop", "skip", "continue"]
ON_NONFINITE: tuple[OnNonfinite, ...] = get_args(OnNonfinite)


def require_policy(name: str) -> None:
    """Refuse an unknown policy.

    Raises:
        ExecutionError: If it is none of :data:`ON_NONFINITE`.
    """
    if name not in ON_NONFINITE:
        raise ExecutionError(
            f"on_nonfinite={name!r}; use one of {', '.join(ON_NONFINITE)}"
        )


class SkippingStep(BackpropagationStep):
    """Back-propagation, and an update only if loss and gradient are finite everywhere.

    Where one is not, no gradient reaches the optimizer: weights and its states stay as
    they were, bit for bit, and so do buffers, such as running statistics.

    Args:
        trainer: Whose rule of training this becomes.

    Attributes:
        skipped: True if the last step was left out.

    Raises:
        ExecutionError: If the plan's rule of training is another one.
    """

    def __init__(self, trainer: Trainer) -> None:
        strategy = trainer.plan.strategy
        compressed = any(
            isinstance(part.module, BucketedReplicas)
            and not isinstance(part.module.exchange, PlainExchange)
            for part in trainer.parts.values()
        )
        plain = type(trainer.step_rule) is BackpropagationStep and not compressed
        if not plain or not isinstance(trainer.replicas, AllReduceReplicas):
            raise ExecutionError(
                f"on_nonfinite='skip' with learning={strategy.learning}, "
                f"synchronisation={strategy.synchronisation} and "
                f"gradient_compression={strategy.gradient_compression}, which keep "
                f"more than weights and optimizer states; use 'stop', or plan with "
                f"back-propagation and synchronisation=all_reduce"
            )
        super().__init__(strategy.learning)
        self.skipped = False
        self._loss: torch.Tensor | None = None
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._device = trainer.place.device
        trainer.step_rule = self
        trainer.optimizer.register_step_pre_hook(self._leave_out)

    def update(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See :meth:`executors.steps.Step.update`."""
        modules = [part.inner for part in trainer.parts.values()]
        self._buffers = [(b, b.clone()) for one in modules for b in one.buffers()]
        return super().update(trainer, local)

    def backward(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """See :meth:`executors.steps.Step.backward`."""
        self._loss = super().backward(trainer, local)
        return self._loss

    @torch.no_grad()
    def _leave_out(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Take the gradients away if any rank has one, or a loss, that is not finite.

        Optimizers of torch leave parameters without a gradient as they are.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        spoiled = torch.zeros((), device=self._device)
        if self._loss is not None:
            spoiled = spoiled + 0 * self._loss
        for parameter in parameters:
            if parameter.grad is not None:
                # No number is zero times itself but a finite one.
                spoiled = spoiled + 0 * _largest(parameter.grad)
        # Sums of NaN are NaN whatever a backend does with it in a maximum.
        found = spoiled.isnan().float()
        dist.all_reduce(found)
        self.skipped = bool(found.item())
        if self.skipped:
            for parameter in parameters:
                parameter.grad = None
            for buffer, value in self._buffers:
                buffer.copy_(value)
        self._buffers = []


def _largest(grad: torch.Tensor) -> torch.Tensor:
    """Largest absolute value of this rank's part, NaN if there is one; float32."""
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    if not local.numel():
        return torch.zeros((), device=local.device)
    largest: torch.Tensor = torch.linalg.vector_norm(
        local, float("inf"), dtype=torch.float32
    )
    return largest
