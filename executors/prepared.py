"""A model made parallel by a plan, for a training loop of one's own."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from executors.averages import averaged_weights
from executors.checkpoints.checkpoint import CheckpointOptions, Checkpoints
from executors.checkpoints.snapshot import collect
from executors.data import (
    Batch,
    BatchPart,
    DataSource,
    TrainingData,
    open_source,
    require_equal_batches,
    require_size,
)
from executors.first_step import FirstStepCheck
from executors.launching.process_group import (
    RANK_TIMEOUT_S,
    own_numbers,
    process_group,
)
from executors.learning_rates import RateSchedule, SchedulerFactory
from executors.mesh import choose_device
from executors.model_source import ModelSource, prepare_trainer
from executors.nonfinite import OnNonfinite, SkippingStep, require_policy
from executors.own_loss import Loss
from executors.replicas.membership import Membership, open_membership
from executors.replicas.recovery import pack_state, take_state
from executors.soundness import require_finite_step
from executors.steps import OptimizerFactory
from executors.trainer import StepResult
from executors.weights.options import WeightOptions
from planner.errors import ExecutionError
from planner.schema import Plan
from planner.schema.nccl import nccl_environment

__all__ = ["Prepared", "SchedulerFactory", "prepare"]

_LOG = logging.getLogger(__name__)


class Prepared:
    """A model made parallel by a plan, with optimizer, scheduler and processes.

    Every method is collective: all processes of the plan call it alike. A context,
    which ends with :meth:`close`. Made by :func:`prepare`.

    Attributes:
        plan: What it does.
        trainer: This process's part of the model.
        optimizer: Updates its weights.
        scheduler: Of the optimizer's learning rates; None without one.
        inventory: Parameters and buffers of the whole model.
        data: Source of the batches; None if each step is given one.
    """

    def __init__(
        self,
        plan: Plan,
        model_fn: Callable[[], nn.Module],
        weights: WeightOptions,
        *,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        seed: int = 0,
        device: str | None = None,
        force: bool = False,
        timeout_s: float = 600.0,
        rank_timeout_s: float = RANK_TIMEOUT_S,
        document_separator: int | None = None,
        on_nonfinite: OnNonfinite = "stop",
        loss: Loss | None = None,
    ) -> None:
        require_policy(on_nonfinite)
        self.plan, self._seed = plan, seed
        self._on_nonfinite = on_nonfinite
        self._skipping: SkippingStep | None = None
        self.data: DataSource | None = None
        self._force, self._timeout_s = force, timeout_s
        self._source = ModelSource(model_fn=model_fn, seed=seed, weights=weights)
        self._weights = weights
        self._saved: Checkpoints | None = None
        #: Of each folder that was saved to or loaded from.
        self._folders: dict[Path, Checkpoints] = {}
        chosen = choose_device(device)
        with contextlib.ExitStack() as stack:
            self.membership = _membership(plan, stack, rank_timeout_s, timeout_s)
            group = process_group(
                chosen,
                timeout_s=timeout_s,
                rank_timeout_s=rank_timeout_s,
                device_ids=plan.strategy.device_ids(),
                alone=self.membership is not None,
                variables=nccl_environment(plan.strategy),
            )
            stack.enter_context(group)
            self.trainer, self.inventory = prepare_trainer(
                plan,
                self._source,
                chosen,
                force,
                self.membership,
                optimizer,
                document_separator,
                loss,
            )
            self.optimizer = self.trainer.optimizer
            if on_nonfinite == "skip":
                self._skipping = SkippingStep(self.trainer)
            self._rates = RateSchedule(self.optimizer, scheduler)
            self.scheduler = self._rates.scheduler
            # Nothing failed: it ends with close().
            self._stack = stack.pop_all()

    @property
    def process(self) -> int:
        """Number of this process; 0 has the smallest device id."""
        return self.trainer.place.process

    @property
    def done(self) -> int:
        """Steps done, those before a checkpoint that was loaded too."""
        return self.trainer.done

    def open_data(self, data: TrainingData | None) -> DataSource:
        """Open the training data, whose position is kept in checkpoints from now on.

        Args:
            data: As for :func:`executors.run`; None for synthetic batches.

        Raises:
            ExecutionError: If it does not fit the plan, or its library is missing.
        """
        self.data = open_source(
            data,
            self.plan.workload,
            self.trainer.part,
            seed=self._seed,
            pin_memory=self.trainer.place.device.type == "cuda",
        )
        self._stack.callback(self.data.close)
        return self.data

    def initialize(self) -> None:
        """Take the weights of files, if some were named."""
        self._weights.load(self.trainer, self.inventory)

    def check_first_step(self, batch: Batch | BatchPart) -> FirstStepCheck:
        """Compare loss and gradient with those of the whole model on process 0.

        Args:
            batch: Global batch, or this process's part; no weight is changed.

        Raises:
            ExecutionError: If they differ by more than rounding.
        """
        return self._source.check(self.trainer, batch, self.inventory, self._saved)

    def step(
        self, batch: Batch | BatchPart | None = None, *, ahead: bool = False
    ) -> StepResult:
        """Train on one global batch, and step the scheduler.

        Args:
            batch: Keyword of forward to tensor, all samples of the step, equal on every
                process, which is checked; this process's part of them; None for the
                next of :attr:`data`.
            ahead: True if nothing reads weights, gradients or states of the optimizer
                by itself before the next step: where the plan says
                ``communication.buckets=needed``, the last sums then hide behind its
                forward. Methods of this class may be called all the same. Equal on
                every process.

        Returns:
            Loss and gradient norm; while :attr:`waits`, the loss is NaN.

        Raises:
            ExecutionError: If batches differ, do not fit the plan, or a loss or
                gradient norm is not finite.
        """
        trainer, step = self.trainer, self.trainer.done
        if batch is None:
            batch = self._next_batch(step)
        if not isinstance(batch, BatchPart):
            self._require_size(batch)
            if trainer.meets(step):
                # Copies that are apart do not wait for each other in between.
                require_equal_batches(batch, step, trainer.place.device)
        result = trainer.step(batch, ahead=ahead)
        if trainer.place.membership is not None:
            trainer.place.membership.admit(partial(pack_state, trainer))
        if not trainer.waits:
            self._require_finite(result)
        self._rates.step()
        return result

    def _next_batch(self, step: int) -> Batch | BatchPart:
        if self.data is None:
            raise ExecutionError(
                "step() without a batch, and no data to take it from; give step() a "
                "batch, or prepare() the data"
            )
        return self.data.batch(step)

    @property
    def waits(self) -> bool:
        """True if losses are not known until an asynchronous pipeline is drained."""
        return self.trainer.waits

    def finish(self) -> StepResult:
        """Drain an asynchronous pipeline after the last step.

        Returns:
            Result of that step, with the losses of those before that were not known.
        """
        result = self.trainer.finish()
        self._require_finite(result)
        return result

    def _require_finite(self, result: StepResult) -> None:
        trainer = self.trainer
        if not trainer.meets(trainer.done):
            # Between exchanges copies have losses of their own.
            return
        first = trainer.done - 1 - len(result.earlier)
        for step, loss in enumerate((*result.earlier, result.loss), start=first):
            one = StepResult(loss=loss, grad_norm=result.grad_norm)
            if self._on_nonfinite == "stop":
                require_finite_step(trainer, step, one, self.remedy)
            elif self.process == 0:
                self._warn(step, one)

    def _warn(self, step: int, result: StepResult) -> None:
        """Log a step that is not finite, where the run goes on."""
        norm = result.grad_norm
        if self.skipped or not (
            math.isfinite(result.loss) and (norm is None or math.isfinite(norm))
        ):
            then = "is left out" if self.skipped else "is taken all the same"
            _LOG.warning(
                "step %d %s: loss %s, gradient norm %s",
                *(step + 1, then, result.loss, norm),
            )

    @property
    def skipped(self) -> bool:
        """True if the last step left the weights as they were, see ``on_nonfinite``."""
        return self._skipping is not None and self._skipping.skipped

    def _require_size(self, batch: Batch) -> None:
        workload = self.plan.workload
        require_size(batch, workload.global_batch, workload.inputs)

    def evaluate(self, batch: Batch | BatchPart, *, averaged: bool = False) -> float:
        """Mean loss of a global batch, in evaluation mode; nothing is updated.

        Where copies of the weights are apart it is the mean of their losses, each on
        its own samples.

        Args:
            batch: As for :meth:`step`.
            averaged: Evaluate the average of the weights that the plan keeps.

        Raises:
            ExecutionError: As :meth:`step` does, or if the plan's rule of training
                leaves no one model to evaluate, or no average is kept.
        """
        self.trainer.require_evaluation()
        if not isinstance(batch, BatchPart):
            self._require_size(batch)
            if self.membership is None:
                require_equal_batches(batch, self.done - 1, self.trainer.place.device)
        with self.weights_of(averaged):
            return self.trainer.evaluate(batch)

    @property
    def keeps_average(self) -> bool:
        """True if the plan keeps an average of the weights, and a step was done."""
        return self.plan.strategy.optimizer.ema is not None and self.done > 0

    def weights_of(self, averaged: bool) -> contextlib.AbstractContextManager[None]:
        """Return a block in which weights are their average, if that is wanted.

        Raises:
            ExecutionError: If no average is kept, or no step was done.
        """
        self.trainer.settle()
        if not averaged:
            return contextlib.nullcontext()
        if not self.keeps_average:
            raise ExecutionError(
                "averaged=True, but no average of the weights is kept, or no step was "
                "done; plan with --ema 0.999 (Optimizer(ema=0.999)), or leave it out"
            )
        return averaged_weights(self.trainer.optimizer)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """State of the run by names that no plan changes; this process's shards.

        ``model.FQN``, ``optimizer.KEY.FQN`` and random generators: live tensors, for
        ``torch.distributed.checkpoint`` or to look at.
        """
        return collect(self.trainer, self.inventory)

    def checkpoints(self, options: CheckpointOptions) -> Checkpoints:
        """Checkpoints of this run in a folder, from now on those of :meth:`save`."""
        if self.membership is not None:
            raise ExecutionError(
                "the plan says on_failure=continue, under which no save needs all "
                "copies; plan with on_failure=stop to keep checkpoints"
            )
        saved = self._folders.get(options.folder)
        if saved is None:
            saved = Checkpoints(
                options,
                self.trainer,
                self.inventory,
                seed=self._seed,
                timeout_s=self._timeout_s,
                force=self._force,
                data=self.data,
            )
            self._folders[options.folder] = self._stack.enter_context(saved)
        saved.options = options
        self._saved = saved
        return saved

    def save(self, folder: str | os.PathLike[str], *, keep: int = 2) -> None:
        """Write a checkpoint, ``step-000100`` of a folder.

        Args:
            folder: Seen by all processes; holds the checkpoints of one run.
            keep: How many of the last to keep.

        Raises:
            ExecutionError: If it holds another run's, a weight is not finite, copies of
                one differ, or a process cannot write.
        """
        path = Path(folder).absolute()
        fresh = path not in self._folders
        saved = self.checkpoints(CheckpointOptions(folder=path, keep=keep))
        saved.options.require_rests(self.done, self.trainer.replicas)
        if fresh:
            saved.begin()
        saved.save(self.done)

    def load(self, folder: str | os.PathLike[str], name: str | None = None) -> int:
        """Go on from a checkpoint of any plan for the same model and optimizer.

        Args:
            folder: As for :meth:`save`.
            name: Of a checkpoint; None for the latest.

        Returns:
            Steps done; 0 if the folder holds none.

        Raises:
            ExecutionError: If the folder cannot be used, or a checkpoint is damaged.
            FingerprintError: If it is of another model.
        """
        path = Path(folder).absolute()
        options = CheckpointOptions(folder=path, resume=name or True)
        return self.resume(self.checkpoints(options))

    def resume(self, saved: Checkpoints) -> int:
        """Begin with what a folder holds, see :meth:`load`."""
        first = saved.begin()
        self._rates.forward(first)
        return first

    def join(self) -> int:
        """Take the state of the copies that this process joins, if it does.

        Returns:
            Steps done.
        """
        if self.membership is None or not self.membership.joins:
            return 0
        first = take_state(self.trainer, self.membership.join())
        _LOG.info("joined after step %d", first)
        self._rates.forward(first)
        return first

    def save_hf(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        averaged: bool = False,
    ) -> None:
        """Write the weights as a new folder that transformers loads.

        Args:
            folder: Must not exist.
            dtype: Of what is written; None for the parameters' own.
            averaged: Write the average of the weights that the plan keeps.

        Raises:
            ExecutionError: If the folder exists or cannot be written, or no average is
                kept.
        """
        if self.membership is not None or not self.trainer.replicas.rests(self.done):
            raise ExecutionError(
                f"copies or stages of the weights differ after {self.done} steps; save "
                f"where they come together, by a plan that stops when one fails"
            )
        files = self._weights.files
        path = files.path if files else None
        options = WeightOptions.of(self._source.model_fn, path, False, folder, dtype)
        with self.weights_of(averaged):
            options.save(self.trainer, self.inventory)

    def remedy(self, change: str) -> str:
        """Add to advice which checkpoint to go on from."""
        return self._saved.remedy(change) if self._saved else change

    def close(self) -> None:
        """End what is being written, and leave the process group."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                # Other processes wait for what a last step has left open.
                self.trainer.settle()
        finally:
            self._stack.__exit__(kind, error, trace)


def prepare(
    plan: Plan,
    model_fn: Callable[[], nn.Module],
    data: TrainingData | None = None,
    *,
    optimizer: OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    loss: Loss | None = None,
    document_separator: int | None = None,
    seed: int = 0,
    device: str | None = None,
    force: bool = False,
    timeout_s: float = 600.0,
    rank_timeout_s: float = RANK_TIMEOUT_S,
    init_from: str | os.PathLike[str] | None = None,
    allow_missing_weights: bool = False,
    on_nonfinite: OnNonfinite = "stop",
) -> Prepared:
    """Make a model parallel by a plan, for a training loop of your own.

    Collective, and started as :func:`executors.run` is: under torchrun, under
    :func:`executors.launch`, or alone for a plan of one device::

        with executors.prepare(plan, model_fn) as training:
            for batch in batches:
                print(training.step(batch).loss)

    Args:
        plan: What to do.
        model_fn: As for ``run``.
        data: The same, of which ``step()`` takes the next batch; None to give each step
            a batch.
        optimizer: Builds the optimizer of pairs of name and parameter, as optimizers of
            torch take them: ``partial(torch.optim.NAdam, lr=1e-3)``. None for that of
            the plan.
        scheduler: Builds a scheduler of its learning rates, which steps after each
            step, such as :func:`executors.learning_rate` does; None for a constant
            rate.
        loss: Function of the model's output (the tensor ``logits``, where there is one
            of that name, else the first) and the samples of the batch that it is of, by
            keyword; returns one loss a sample, or their mean. Keys of a batch that
            forward does not read are for it. None for the plan's loss. Samples must not
            be compared with each other where the plan divides a batch, which is
            checked.
        document_separator: As for ``run``.
        seed: The same.
        device: The same.
        force: The same.
        timeout_s: The same.
        rank_timeout_s: The same.
        init_from: The same.
        allow_missing_weights: The same.
        on_nonfinite: The same.

    Raises:
        ExecutionError: As ``run`` raises it before its first step.
        RankFailedError: If another process is missing.
        FingerprintError: If the plan is for another model.
    """
    weights = WeightOptions.of(model_fn, init_from, allow_missing_weights, None, None)
    prepared = Prepared(
        plan,
        model_fn,
        weights,
        optimizer=optimizer,
        scheduler=scheduler,
        seed=seed,
        device=device,
        force=force,
        timeout_s=timeout_s,
        rank_timeout_s=rank_timeout_s,
        document_separator=document_separator,
        on_nonfinite=on_nonfinite,
        loss=loss,
    )
    try:
        if data is not None:
            prepared.open_data(data)
        prepared.initialize()
        prepared.join()
    except BaseException:
        prepared.close()
        raise
    return prepared


def _membership(
    plan: Plan, stack: contextlib.ExitStack, silence_s: float, timeout_s: float
) -> Membership | None:
    """Who takes part, where copies go on without those that fail."""
    fewest = plan.strategy.synchronisation.fewest_copies
    if not fewest:
        return None
    return stack.enter_context(
        open_membership(
            *own_numbers(),
            plan.strategy.device_ids(),
            fewest=fewest,
            silence_s=silence_s,
            timeout_s=timeout_s,
        )
    )
