"""Losses of one's own: a function of the model's output and the batch.

The gradient must be that of the mean over the global batch, however it is divided. So
such a function must be a mean over samples, each of which it looks at alone; this is
checked where a plan divides a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from executors.losses import LossFunction, Tally, select_output
from planner.errors import ExecutionError
from planner.schema import Plan

__all__ = ["Loss", "OwnLossFunction", "require_own_loss"]

#: Takes the model's output and the samples of the batch that it is of; returns the mean
#: over them, or one loss a sample.
Loss = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]

#: Relative difference of the mean over a batch and that over its halves that is
#: rounding, also in bfloat16.
_ROUNDING = 0.02
#: The same of float32.
_ROUNDING_FLOAT32 = 1e-4


def require_own_loss(plan: Plan, document_separator: int | None) -> None:
    """Refuse a loss of one's own where a plan cannot compute it.

    Args:
        plan: What to do.
        document_separator: As for :func:`executors.prepare`.

    Raises:
        ExecutionError: With what the plan says, and the remedy.
    """
    strategy, why = plan.strategy, ""
    if plan.workload.loss == "model":
        why = (
            "the plan's loss is the model's own, which forward returns in place of "
            "scores; plan with loss='cross_entropy' and example_inputs without labels"
        )
    elif strategy.mesh.cp > 1 and not strategy.spatial:
        why = (
            f"cp={strategy.mesh.cp} divides each sample, of which the loss would see a "
            f"part; plan with cp=1"
        )
    elif strategy.sharding.loss_parallel:
        why = (
            "tp divides the scores (loss_parallel), of which the loss would see a "
            "part; plan with --pin loss_parallel=false"
        )
    elif str(strategy.learning) != "backpropagation" or strategy.asynchrony.unflushed:
        why = (
            f"learning={strategy.learning} and asynchrony={strategy.asynchrony} have "
            f"losses of their own; plan with back-propagation and a flush"
        )
    elif strategy.loss_chunks > 1:
        why = (
            f"loss_chunks={strategy.loss_chunks} computes the plan's loss in the "
            f"model's last layer; plan with loss_chunks=1"
        )
    elif document_separator is not None:
        why = (
            f"document_separator={document_separator} leaves targets out of the plan's "
            f"loss alone; leave one of both out"
        )
    if why:
        raise ExecutionError(f"loss= of your own, but {why}")


def _taken(value: torch.Tensor, numbers: torch.Tensor, samples: int) -> torch.Tensor:
    """Rows of some samples, each of which owns as many consecutive ones."""
    if len(value) == samples:
        return value[numbers]
    return value.reshape(samples, -1, *value.shape[1:])[numbers].flatten(0, 1)


@dataclass(kw_only=True)
class OwnLossFunction(LossFunction):
    """A loss of one's own of one microbatch, as its share of the global mean.

    Attributes:
        function: See :data:`Loss`.
        rows: Rows of each input of the plan that a sample owns.
    """

    function: Loss
    rows: Mapping[str, int] = field(default_factory=dict)
    _batch: Mapping[str, torch.Tensor] = field(default_factory=dict, init=False)
    #: Samples of that batch.
    _samples: int = field(default=0, init=False)
    _checked: bool = field(default=False, init=False)

    def tally(self, batch: Mapping[str, torch.Tensor], parts: int) -> Tally:
        """Count nothing: every sample weighs alike."""
        del batch, parts
        return Tally(count=0)

    def take(self, tally: Tally, num_microbatches: int) -> None:
        """Take the number of equal parts whose means are averaged."""
        del tally
        self.count = float(num_microbatches * self.data_parallel)

    def target(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Numbers of the samples, by which a microbatch finds its own. Shape [batch].

        A pipeline divides one tensor into microbatches, not all of a batch.
        """
        name = next((one for one in batch if one in self.rows), next(iter(batch)))
        first = batch[name]
        self._batch = batch
        self._samples = first.shape[0] // self.rows.get(name, 1)
        return torch.arange(self._samples, device=first.device)

    def _of_output(self, output: Any, target: torch.Tensor | None) -> torch.Tensor:
        assert target is not None
        scores = select_output(output, self.kind)
        batch = {
            name: _taken(value, target, self._samples)
            for name, value in self._batch.items()
        }
        samples = len(target)
        loss = self._mean(scores, batch, samples)
        if not self._checked:
            self._checked = True
            if self.count > 1 and samples > 1:
                whole = float(loss.detach())
                self._require_mean(scores.detach(), batch, samples, whole)
        return loss * (self.data_parallel / self.count)

    def _mean(
        self, scores: torch.Tensor, batch: Mapping[str, torch.Tensor], samples: int
    ) -> torch.Tensor:
        found = self.function(scores, batch)
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else None
        if shape not in {(), (1,), (samples,)}:
            raise ExecutionError(
                f"loss returned {type(found).__name__ if shape is None else shape} for "
                f"{samples} samples; return their mean, a scalar, or one loss a "
                f"sample, of shape ({samples},)"
            )
        return found.float().mean()

    @torch.no_grad()
    def _require_mean(
        self,
        scores: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        size: int,
        whole: float,
    ) -> None:
        """Refuse a function whose value depends on how a batch is divided.

        Raises:
            ExecutionError: If it does, or samples own no equal parts of the output.
        """
        if len(scores) % size:
            raise ExecutionError(
                f"loss= of your own, but the model's output has {len(scores)} rows for "
                f"{size} samples, of which each must own as many; return them from "
                f"forward, or plan for one replica without microbatches"
            )
        numbers = torch.arange(size, device=scores.device)
        with torch.random.fork_rng(devices=[]):
            halves = [
                len(part)
                * float(
                    self._mean(
                        _taken(scores, part, size),
                        {n: _taken(v, part, size) for n, v in batch.items()},
                        len(part),
                    )
                )
                for part in (numbers[: size // 2], numbers[size // 2 :])
            ]
        mean = sum(halves) / size
        exact = scores.dtype in (torch.float32, torch.float64)
        rounding = _ROUNDING_FLOAT32 if exact else _ROUNDING
        scale = max(abs(whole), *(abs(half) / size for half in halves))
        # Of numbers that are not finite the step says so itself.
        if abs(whole - mean) > rounding * scale:
            raise ExecutionError(
                f"loss of {size} samples is {whole:.7g}, the mean over their halves "
                f"{mean:.7g}: it is no mean over samples, and the plan divides a batch "
                f"into {self.count:g} parts; return one loss a sample, or plan for one "
                f"replica without microbatches"
            )
