"""Adam whose moments are updated every few steps, by the mean gradient of these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from planner.schema import Optimizer

__all__ = ["AccumulatingAdam"]

_MOMENTS = ("exp_avg", "exp_avg_sq", "grad_sum")


class AccumulatingAdam(torch.optim.Optimizer):
    """Adam or AdamW with moments that wait for several steps (AccumAdam).

    Every step goes along m' = β₁ m + (1 - β₁) g over the root of
    v' = β₂ v + (1 - β₂) g², as Adam does, but keeps m and v. Every ``commit_every``
    steps they take the mean gradient of these steps in the place of g. Bias is
    corrected for the number of such updates. With ``commit_every=1`` it is torch's
    Adam or AdamW.

    Args:
        groups: Groups of parameters, as of another optimizer.
        spec: ``Adam`` or ``AdamW``, and its arithmetic; betas and eps are torch's
            defaults.
        commit_every: Steps from one update of the moments to the next.

    Source: Wang et al. 2025, arXiv 2410.11998, algorithm 2.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        spec: Optimizer,
        *,
        commit_every: int,
    ) -> None:
        defaults = {
            "lr": spec.learning_rate,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": spec.used_weight_decay,
        }
        super().__init__([{"params": group["params"]} for group in groups], defaults)
        self._decoupled = spec.name == "AdamW"
        self._every = commit_every
        #: Steps of each parameter, and the counter of its state that tells them.
        self._done: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "a closure is not called"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        for key in _MOMENTS:
            if key not in state:
                state[key] = torch.zeros_like(parameter)
        done, every = self._count(parameter, state), self._every
        commits = (done + every - 1) // every
        weight, grad = _local(parameter), _local(parameter.grad)
        mean, square, total = (_local(state[key]) for key in _MOMENTS)
        first, second = group["betas"]
        decay = group["weight_decay"]
        if self._decoupled:
            weight.mul_(1 - group["lr"] * decay)
        elif decay:
            grad = grad.add(weight, alpha=decay)
        root = (square * second).addcmul_(grad, grad, value=1 - second).sqrt_()
        root.div_(math.sqrt(1 - second**commits)).add_(group["eps"])
        rate = group["lr"] / (1 - first**commits)
        weight.addcdiv_(torch.lerp(mean, grad, 1 - first), root, value=-rate)
        total.add_(grad)
        if done % every == 0:
            taken = total / every
            mean.lerp_(taken, 1 - first)
            square.mul_(second).addcmul_(taken, taken, value=1 - second)
            total.zero_()

    def _count(self, parameter: torch.Tensor, state: dict[str, Any]) -> int:
        """Count a step; a counter's value is read where a checkpoint has set it."""
        if "step" not in state:
            state["step"] = torch.zeros(())
            self._done[parameter] = (state["step"], 0)
        counter, done = self._done.get(parameter, (None, 0))
        if counter is not state["step"]:
            done = int(state["step"].item())
        state["step"] += 1
        self._done[parameter] = (state["step"], done + 1)
        return done + 1


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()
