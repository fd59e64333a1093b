"""Arguments of a federation's run, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from executors.checkpoints.checkpoint import CheckpointOptions
from executors.data import TrainingData
from executors.learning_rates import SchedulerFactory
from executors.loop import Callback
from executors.nonfinite import OnNonfinite
from executors.runner import require_evaluation_options
from executors.weights.options import WeightOptions
from planner.errors import ExecutionError

__all__ = ["RunOptions", "Start", "require_evaluation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Arguments that a run begins with; see :func:`run_federation`."""

    model_fn: Callable[[], nn.Module]
    seed: int
    device: torch.device
    force: bool
    timeout_s: float
    rank_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Weights, checkpoints, evaluations and callbacks of a run.

    Attributes:
        files: Weights to begin with, and the folder for those at the end.
        checkpoints: Of all members; None for none.
        eval_data: What is evaluated; None for nothing.
        evaluate_every: Steps between evaluations; None for one at the end.
        scheduler: Builds the scheduler of a member's learning rates.
        document_separator: As for :func:`executors.run`; likewise callbacks and
            on_nonfinite.
        check_every: Steps between checks of a member's weights.
    """

    files: WeightOptions
    checkpoints: CheckpointOptions | None
    eval_data: TrainingData | None
    evaluate_every: int | None
    scheduler: SchedulerFactory | None
    document_separator: int | None
    check_every: int | None
    callbacks: tuple[Callback, ...]
    on_nonfinite: OnNonfinite


def require_evaluation(
    eval_data: TrainingData | None, evaluate_every: int | None
) -> TrainingData | None:
    """Refuse evaluations of nothing.

    Raises:
        ExecutionError: If there are no data, or the number of steps is below 1.
    """
    require_evaluation_options(eval_data, evaluate_every)
    if isinstance(eval_data, list | tuple) and not eval_data:
        raise ExecutionError("eval_data holds no batch; give at least one, or None")
    return eval_data
