"""Steps of a run, and what is done between them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from executors.checkpoints.checkpoint import CheckpointOptions
from executors.data import Batch, BatchPart
from executors.loop.callbacks import Callback, LoopState, StepReport
from executors.loop.metrics import last_gradient_norm
from executors.loop.stopping import StopSignals, agree_on_stop
from executors.prepared import Prepared
from executors.soundness import require_sound_weights

__all__ = ["Loop"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Steps of a run, and what is done between them.

    Attributes:
        prepared: The model.
        steps: How many there will be.
        options: Of checkpoints; None for none.
        check_every: Steps between checks of the weights.
        evaluate_every: Steps between evaluations.
        eval_data: Batches to evaluate; None for none.
        callbacks: Called in this order.
        signals: Those that end the run; None to listen to none.
        averaged: Evaluate the average of the weights, where the plan keeps one.
    """

    prepared: Prepared
    steps: int
    options: CheckpointOptions | None
    check_every: int | None
    evaluate_every: int | None
    eval_data: Sequence[Batch | BatchPart] | None
    callbacks: Sequence[Callback] = ()
    signals: StopSignals | None = None
    averaged: bool = True

    def train(
        self,
        begins: Batch | BatchPart | None,
        first: int,
        on_step: Callable[[StepReport], None] | None = None,
    ) -> tuple[list[StepReport], LoopState]:
        """Train step by step, and save checkpoints due.

        Weights are checked before they are saved, every so many steps, and at the end.

        Args:
            begins: Batch of the first step.
            first: Number of that step.
            on_step: Called after each step on process 0, or on every one where copies
                go on without those that fail.

        Returns:
            Reports of the steps, in order, and the state at the end.
        """
        prepared = self.prepared
        state = LoopState(prepared=prepared, steps=self.steps, first=first)
        told = on_step if prepared.membership or not prepared.process else None
        groups: list[list[StepReport]] = []
        error: BaseException | None = None
        try:
            for callback in self.callbacks:
                callback.on_start(state)
            for known in self._steps(begins, state):
                for report in known:
                    self._tell(state, report)
                    if told is not None:
                        told(report)
                # An early end adds an evaluation to the last report.
                groups.append(known)
            prepared.trainer.settle()
        except BaseException as found:
            error = found
            raise
        finally:
            self._end(state, error)
        return [report for known in groups for report in known], state

    def _end(self, state: LoopState, error: BaseException | None) -> None:
        """Let every callback end, though one of them fails."""
        with contextlib.ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(callback.on_end, state, error)

    def _steps(
        self, begins: Batch | BatchPart | None, state: LoopState
    ) -> Iterator[list[StepReport]]:
        """Train; yields reports of steps whose losses are known, then saves."""
        prepared = self.prepared
        waiting: list[StepReport] = []
        for step in range(state.first, self.steps):
            assert prepared.data is not None
            batch, begins = begins or prepared.data.batch(step), None
            report, earlier = self._step(batch, step)
            if self.options is not None and step == state.first:
                prepared.checkpoints(self.options).require_states()
            if prepared.waits:
                # Its loss is known, and its weights can be read, some steps later.
                waiting.append(report)
                continue
            known = [
                replace(one, loss=loss)
                for one, loss in zip(waiting, earlier, strict=True)
            ]
            due = self._evaluation_due(step + 1)
            known.append(replace(report, eval_loss=self._evaluate(step + 1, due)))
            waiting = []
            yield known
            stops = self._stops(state, step + 1)
            if stops and not due and not state.hurries:
                # It ends as the last step would.
                loss = self._evaluate(step + 1, self.eval_data is not None)
                known[-1] = replace(known[-1], eval_loss=loss)
                self._tell_evaluation(state, known[-1])
            self._save_or_check(state, known, last=stops or step + 1 == self.steps)
            if stops:
                return

    def _stops(self, state: LoopState, done: int) -> bool:
        """Agree on the end of the run, where one wants it; collective."""
        trainer = self.prepared.trainer
        if self.signals is not None:
            state.reason = self.signals.received() or state.reason
        listens = self.callbacks or self.signals is not None
        apart = not trainer.meets(done) or not trainer.replicas.rests(done)
        if not listens or apart or done == self.steps:
            return False
        state.reason = agree_on_stop(state.reason, trainer.place.device)
        if state.reason is not None and self.prepared.process == 0:
            _LOG.info("stops after step %d: %s", done, state.reason)
        return state.reason is not None

    def _step(
        self, batch: Batch | BatchPart, step: int
    ) -> tuple[StepReport, tuple[float, ...]]:
        """Train one step, and drain the pipeline after the last.

        Returns:
            Its report, and losses of steps before that were not known.
        """
        prepared = self.prepared
        rate = prepared.optimizer.param_groups[0].get("lr")
        begin = time.perf_counter()
        reads = any(one.reads_weights for one in self.callbacks)
        result = prepared.step(batch, ahead=step + 1 < self.steps and not reads)
        if prepared.waits and step + 1 == self.steps:
            result = prepared.finish()
        time_s, norm = time.perf_counter() - begin, result.grad_norm
        if norm is None and any(one.needs_grad_norm for one in self.callbacks):
            norm = last_gradient_norm(prepared.trainer)
        report = StepReport(
            step=step,
            steps=self.steps,
            loss=result.loss,
            grad_norm=norm,
            time_s=time_s,
            learning_rate=None if rate is None else float(rate),
            skipped=prepared.skipped,
        )
        return report, result.earlier

    def _tell(self, state: LoopState, report: StepReport) -> None:
        if self.prepared.process == 0:
            done, loss = report.step + 1, report.loss
            _LOG.info("step %d of %d: loss %.4f", done, self.steps, loss)
        for callback in self.callbacks:
            callback.on_step(state, report)
        self._tell_evaluation(state, report)

    def _tell_evaluation(self, state: LoopState, report: StepReport) -> None:
        if report.eval_loss is not None:
            for callback in self.callbacks:
                callback.on_evaluate(state, report.step + 1, report.eval_loss)

    def _evaluation_due(self, done: int) -> bool:
        every = self.evaluate_every
        return self.eval_data is not None and (
            done == self.steps or bool(every and not done % every)
        )

    def _evaluate(self, done: int, due: bool) -> float | None:
        """Mean loss of the batches to evaluate, if that is due."""
        if self.eval_data is None or not due:
            return None
        prepared = self.prepared
        averaged = self.averaged and prepared.keeps_average
        with prepared.weights_of(averaged):
            losses = [prepared.evaluate(batch) for batch in self.eval_data]
        if prepared.process == 0:
            text = "evaluation of the average" if averaged else "evaluation"
            _LOG.info("%s after step %d: loss %.4f", text, done, fmean(losses))
        return fmean(losses)

    def _save_or_check(
        self, state: LoopState, known: Sequence[StepReport], *, last: bool
    ) -> None:
        """Save a checkpoint, or check the weights, if that is due.

        Args:
            state: Of the run.
            known: Reports since the weights could be read before.
            last: True behind the last step of the run.
        """
        prepared, every = self.prepared, self.check_every
        done, loss = known[-1].step + 1, known[-1].eval_loss
        if self.options is not None:
            saved = prepared.checkpoints(self.options)
            if last or self.options.due(done, self.steps) or saved.is_best(loss):
                folder = saved.save(done, eval_loss=loss)
                for callback in self.callbacks:
                    callback.on_save(state, folder)
                return
        if last or (every and done % every < len(known)):
            require_sound_weights(prepared.trainer, done, prepared.remedy)
