"""Rules by which one batch becomes new weights, on this rank's part of the model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from executors.gradients import clip_gradients, gradient_norm, sum_over_tp
from executors.losses import target_of

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["PlainStep", "Step"]


class Step(Protocol):
    """A rule by which this rank's slice of a batch becomes new weights."""

    def update(
        self, trainer: Trainer, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Train on one slice; needs no values, so that a dry run can do it.

        Args:
            trainer: Holds model parts and optimizer. It is no attribute, because a
                circle would keep DDP's reducer alive longer than its group.
            local: This rank's slice of the global batch, on its device; the loss has
                been prepared for the batch.

        Returns:
            Sum of this rank's scaled losses, None on a rank that computes no loss; and
            the norm of the gradient, None unless the plan clips it.
        """


class PlainStep:
    """Back-propagation of all microbatches, then one step of the optimizer."""

    def update(
        self, trainer: Trainer, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See :meth:`Step.update`."""
        trainer.optimizer.zero_grad()
        loss = self._forward_backward(trainer, local)
        sum_over_tp(trainer.partial, trainer.place)
        if trainer.tied is not None:
            trainer.tied.sum_gradients()
        norm = _clip(trainer)
        trainer.optimizer.step()
        return loss, norm

    def _forward_backward(
        self, trainer: Trainer, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        target = target_of(local, trainer.loss.kind)
        if target is not None and trainer.positions is not None and target.ndim > 1:
            target = target.index_select(1, trainer.positions.to(target.device))
        inputs = trainer.own_tokens(_model_inputs(trainer, local))
        if trainer.pipeline is not None:
            return trainer.pipeline.step(inputs, target)
        total = torch.zeros((), device=trainer.place.device)
        for index in range(trainer.plan.strategy.num_microbatches):
            total += self.accumulate(trainer, inputs, target, index)
        return total

    def accumulate(
        self,
        trainer: Trainer,
        inputs: Mapping[str, torch.Tensor],
        target: torch.Tensor | None,
        index: int,
    ) -> torch.Tensor:
        """Run forward and backward of one microbatch without a pipeline.

        Args:
            trainer: Holds the model.
            inputs: Of all microbatches of this rank, on its device.
            target: Values that the loss compares with, of all of them.
            index: Number of the microbatch.

        Returns:
            Its share of the loss.
        """
        count = trainer.plan.strategy.num_microbatches
        part, last = trainer.parts[0], index == count - 1
        part.sync_gradients(last)
        module = part.module
        ddp = module if isinstance(module, DistributedDataParallel) else None
        with ddp.no_sync() if ddp is not None and not last else nullcontext():
            micro = {name: v.chunk(count)[index] for name, v in inputs.items()}
            wanted = None if target is None else target.chunk(count)[index]
            loss = trainer.loss(module(**micro), wanted)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def _model_inputs(
    trainer: Trainer, local: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Inputs that the plan names for forward; the whole batch if it names none."""
    wanted = {spec.name for spec in trainer.plan.workload.inputs}
    return {n: v for n, v in local.items() if not wanted or n in wanted}


def _clip(trainer: Trainer) -> torch.Tensor | None:
    limit = trainer.plan.strategy.grad_clip_norm
    if limit is None:
        return None
    norm = gradient_norm((p for _, p in trainer.named_parameters()), trainer.place)
    clip_gradients(trainer.all_parameters(), norm, limit)
    return norm
