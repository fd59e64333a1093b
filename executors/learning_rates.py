"""Learning rates over the steps of a run: a warm-up, then constant or falling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from planner.errors import ExecutionError

__all__ = ["SCHEDULES", "RateSchedule", "Schedule", "SchedulerFactory", "learning_rate"]

Schedule = Literal["constant", "linear", "cosine", "wsd"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

#: Builds a scheduler of the optimizer's learning rates.
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]


class RateSchedule:
    """A scheduler that can be put where it was after a number of steps.

    Args:
        optimizer: Whose rates.
        factory: Builds the scheduler; None for rates that stay.

    Attributes:
        scheduler: The scheduler; None without one.

    Raises:
        ExecutionError: If the scheduler needs a metric.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, factory: SchedulerFactory | None
    ) -> None:
        self.scheduler = factory(optimizer) if factory else None
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise ExecutionError(
                "scheduler=ReduceLROnPlateau needs a metric; step it yourself, "
                "after evaluate(), and leave scheduler= out"
            )
        self._optimizer = optimizer
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._state: dict[str, Any] | None = None
        if self.scheduler is not None:
            self._state = deepcopy(self.scheduler.state_dict())

    def step(self) -> None:
        """Set the rates of the next step."""
        if self.scheduler is not None:
            self.scheduler.step()

    def forward(self, done: int) -> None:
        """Set the rates and the scheduler's state after so many steps of a run."""
        if self.scheduler is None:
            return
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        assert self._state is not None
        self.scheduler.load_state_dict(deepcopy(self._state))
        with warnings.catch_warnings():
            # torch takes steps of the scheduler alone for a mistake.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler")
            for _ in range(done):
                self.scheduler.step()


def learning_rate(
    schedule: Schedule,
    *,
    steps: int,
    warm_up_steps: int = 0,
    lowest: float = 0.0,
    decay_share: float = 0.2,
) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """A learning rate that rises linearly, then follows a schedule.

    Step k of the warm-up, from 0, has (k + 1) / warm_up_steps of the optimizer's rate.

    Args:
        schedule: ``constant``; ``linear`` and ``cosine`` fall from the end of the
            warm-up to the last step; ``wsd`` (warm-up, stable, decay) is constant until
            the last ``decay_share`` of the steps, then falls linearly. Source: Hu et
            al. 2024, MiniCPM (wsd).
        steps: Of the whole run.
        warm_up_steps: Below ``steps``.
        lowest: Share of the optimizer's rate at which falling ends.
        decay_share: Of ``wsd``.

    Returns:
        Builds torch's scheduler, as :func:`executors.prepare` takes it.

    Raises:
        ExecutionError: If a number is out of its range.
    """
    if schedule not in SCHEDULES:
        raise ExecutionError(
            f"learning rate schedule {schedule!r} is none of {', '.join(SCHEDULES)}"
        )
    if steps < 1 or not 0 <= warm_up_steps < max(steps, 1):
        raise ExecutionError(
            f"warm_up_steps={warm_up_steps} of steps={steps}; a warm-up takes at least "
            f"0 steps and fewer than all"
        )
    for name, value in (("lowest", lowest), ("decay_share", decay_share)):
        if not 0 <= value <= 1:
            raise ExecutionError(f"{name}={value:g}; give a share from 0 to 1")
    share = partial(
        _share,
        schedule=schedule,
        steps=steps,
        warm_up=warm_up_steps,
        lowest=lowest,
        decay=max(1, round(decay_share * steps)),
    )
    return lambda optimizer: LambdaLR(optimizer, share)


def _share(
    step: int, *, schedule: str, steps: int, warm_up: int, lowest: float, decay: int
) -> float:
    """Share of the optimizer's own rate in a step."""
    if step < warm_up:
        return (step + 1) / warm_up
    if schedule == "constant":
        return 1.0
    begin = max(warm_up, steps - decay) if schedule == "wsd" else warm_up
    # The last step has the lowest rate.
    done = min(1.0, max(0.0, (step - begin) / max(1, steps - 1 - begin)))
    falls = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
    return lowest + (1 - lowest) * falls
