"""Requirements of rules that train on a class for each sample, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from executors.steps import ParallelModel
from planner.errors import ExecutionError

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["IGNORED", "require_classes", "vector_shapes"]

#: Class of samples that do not count, torch's own default.
IGNORED = -100


def vector_shapes(trainer: Trainer) -> list[torch.Size]:
    """Shapes of what each stage makes, one vector a sample; the last makes scores.

    Args:
        trainer: With stages, of which a rank has one.

    Raises:
        ExecutionError: If the loss is not of classes, or a cut is something else.
    """
    learning, loss = trainer.plan.strategy.learning, trainer.loss.kind
    if loss != "cross_entropy":
        raise ExecutionError(
            f"learning={learning} with loss={loss!r}; it needs a class for each "
            f"sample, capture the model with loss='cross_entropy', or use "
            f"learning=backpropagation"
        )
    for index, made in enumerate(trainer.sends):
        if len(made) != 1 or made[0].ndim != 2 or not made[0].is_floating_point():
            shown = " and ".join(str(list(one.shape)) for one in made)
            raise ExecutionError(
                f"learning={learning}, but stage {index} makes {shown}, no vector a "
                f"sample; cut elsewhere, or use learning=backpropagation"
            )
    return [made[0].shape for made in trainer.sends]


def require_classes(
    trainer: ParallelModel, local: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Class of each sample of this rank. Shape [samples].

    Raises:
        ExecutionError: If the batch has labels of another shape.
    """
    found = trainer.loss.target(local)
    if found is None or found.ndim != 1:
        shown = "none" if found is None else str(list(found.shape))
        raise ExecutionError(
            f"learning={trainer.plan.strategy.learning} with labels of shape {shown}; "
            f"it needs integer 'labels' of shape [batch], one class a sample"
        )
    return found
