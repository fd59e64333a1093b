"""Callbacks: code of one's own at the steps of a run."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from executors.prepared import Prepared
from executors.trainer import Trainer
from planner.schema import Plan

__all__ = ["Callback", "LoopState", "StepReport", "TrainedMember"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Results of one step, for progress bars and logs.

    Attributes:
        step: Number of the step, from 0.
        steps: How many there will be.
        loss: Mean over the global batch, before the update; of the copy's own samples
            where copies of the weights are apart.
        grad_norm: Before clipping; None where the plan does not clip, unless a callback
            asks for it.
        time_s: Wall-clock time of the step on this rank.
        eval_loss: Mean loss of the batches to evaluate, after the update; None where
            none was due.
        learning_rate: Of the step, of the first group of parameters.
        skipped: True if the step left the weights as they were, because its loss or
            gradient was not finite.
    """

    step: int
    steps: int
    loss: float
    grad_norm: float | None
    time_s: float
    eval_loss: float | None = None
    learning_rate: float | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedMember:
    """The part of a :class:`Prepared` that a member of a federation has.

    Attributes:
        plan: Of the member.
        trainer: Of this rank.
    """

    plan: Plan
    trainer: Trainer

    @property
    def process(self) -> int:
        """Number of this process in its member."""
        return self.trainer.place.process

    @property
    def done(self) -> int:
        """Steps done."""
        return self.trainer.done


@dataclass(kw_only=True)
class LoopState:
    """State of a run, as callbacks see it.

    Attributes:
        prepared: The model, its optimizer and plan; in a federation the member's plan
            and trainer alone.
        steps: Steps of the run.
        first: Steps that were done before.
        reason: Why the run ends early, on this process; None while it goes on.
    """

    prepared: Prepared | TrainedMember
    steps: int
    first: int
    reason: str | None = None

    @property
    def hurries(self) -> bool:
        """True if a signal ended the run, which leaves as soon as it has saved."""
        return self.reason in signal.Signals.__members__

    @property
    def leads(self) -> bool:
        """True on the one process that writes logs."""
        return self.prepared.process == 0

    def stop(self, reason: str) -> None:
        """End the run after this step, as if it were the last one.

        One process that calls it is enough: all end behind the same step.

        Args:
            reason: For the message, and for :attr:`executors.RunResult.stopped`.
        """
        self.reason = self.reason or reason


class Callback:
    """Base class of callbacks; every method does nothing.

    Methods are called on every process, in the same order, so that they may use
    collectives; write logs where :attr:`LoopState.leads` says so.

    Attributes:
        needs_grad_norm: True to have the gradient's norm computed where the plan does
            not clip it.
        reads_weights: False to promise that no method reads weights, gradients or
            states of the optimizer but through methods of :class:`executors.Prepared`:
            steps then need not end before the next begins, see
            ``communication.buckets``.
    """

    needs_grad_norm = False
    reads_weights = True

    def on_start(self, state: LoopState) -> None:
        """Act before the first step, with weights in place."""

    def on_step(self, state: LoopState, report: StepReport) -> None:
        """Act after a step, and after its evaluation if one was due."""

    def on_evaluate(self, state: LoopState, done: int, loss: float) -> None:
        """Act after an evaluation.

        Args:
            state: Of the run.
            done: Steps done.
            loss: Mean of the batches to evaluate.
        """

    def on_save(self, state: LoopState, folder: Path) -> None:
        """Act after a checkpoint; one in the background may be still being written."""

    def on_end(self, state: LoopState, error: BaseException | None) -> None:
        """Act at the end of the run, whatever ends it.

        Args:
            state: Of the run.
            error: What was raised; None if nothing was. Do not use collectives then.
        """
