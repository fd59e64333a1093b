"""``run``: train a model by a plan, on the processes that torchrun has started."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from torch import nn

from executors.checkpoints.checkpoint import CheckpointOptions
from executors.data import Batch, BatchPart, TrainingData, evaluation_batches
from executors.first_step import FirstStepCheck
from executors.launching.process_group import RANK_TIMEOUT_S
from executors.measuring.measure import TimedStep, measure_phases, summarize
from executors.prepared import Prepared, SchedulerFactory
from executors.soundness import require_sound_weights
from executors.steps import OptimizerFactory
from executors.weights.options import WeightOptions
from planner.errors import ExecutionError
from planner.schema import Plan
from planner.schema.measurement import Measurement
from planner.schema.violations import comparison_violation

__all__ = ["RunResult", "StepReport", "run"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Results of one step, for progress bars and logs.

    Attributes:
        step: Number of the step, from 0.
        steps: How many there will be.
        loss: Mean over the global batch, before the update; of the copy's own samples
            where copies of the weights are apart.
        grad_norm: Before clipping; None where the plan does not clip.
        time_s: Wall-clock time of the step on this rank.
        eval_loss: Mean loss of the batches to evaluate, after the update; None where
            none was due.
    """

    step: int
    steps: int
    loss: float
    grad_norm: float | None
    time_s: float
    eval_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Results of a run; equal on all ranks of a copy of the weights but for times.

    Attributes:
        losses: Mean loss of each step from ``first_step`` on; see
            :attr:`StepReport.loss`.
        grad_norms: Gradient norms before clipping; empty where the plan does not.
        step_times_s: Wall-clock time of each step on this rank.
        measurement: What ``measure=True`` measured, else None.
        first_step: Steps that the checkpoint had done from which the run went on.
        first_step_check: What ``check_first_step=True`` compared, else None.
        evaluations: Steps done and mean loss of each evaluation.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    step_times_s: tuple[float, ...]
    measurement: Measurement | None = None
    first_step: int = 0
    first_step_check: FirstStepCheck | None = None
    evaluations: tuple[tuple[int, float], ...] = ()


def run(
    plan: Plan,
    model_fn: Callable[[], nn.Module],
    data: TrainingData | None = None,
    *,
    steps: int,
    optimizer: OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    eval_data: TrainingData | None = None,
    evaluate_every: int | None = None,
    document_separator: int | None = None,
    seed: int = 0,
    device: str | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    measure: bool = False,
    force: bool = False,
    timeout_s: float = 600.0,
    rank_timeout_s: float = RANK_TIMEOUT_S,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool | str = False,
    keep_checkpoints: int = 2,
    background_checkpoints: bool = False,
    check_first_step: bool = False,
    check_replicas_every: int | None = None,
    init_from: str | os.PathLike[str] | None = None,
    allow_missing_weights: bool = False,
    save_hf: str | os.PathLike[str] | None = None,
    save_dtype: str | None = None,
) -> RunResult:
    """Train a model by a plan.

    Collective: every process of the plan calls it with equal arguments, under
    torchrun, under :func:`executors.launch`, or alone for a plan of one device.

    Args:
        plan: What to do.
        model_fn: Builds the whole model, on the CPU. It is called on every rank
            right after ``torch.manual_seed(seed)``, but its parameters are recorded,
            not computed: each rank computes its own shards, with the values that
            :func:`executors.build_model` gives.
        data: The name of a token file, :class:`executors.Samples`, a dataset or loader
            of torch, torchdata or ``datasets``, of which each rank reads its part. Or
            global batches: an iterable of mappings from keyword to tensor, or a
            function from the step's number to one. Equal on all ranks, which is
            checked. ``labels`` go to the loss; other keywords must be inputs of the
            model. None for synthetic batches of the shapes in the plan.
        steps: Optimizer steps, at least 1; those of the run that is resumed count.
        optimizer: As for :func:`executors.prepare`.
        scheduler: The same.
        eval_data: Data of the same kinds, of which the mean loss is computed at the
            end, in evaluation mode: at most 50 batches of a file or dataset, from its
            beginning; None for none.
        evaluate_every: Steps between further evaluations.
        document_separator: Id of the token that ends a document, where a row of
            ``input_ids`` holds several: positions begin anew in each, none sees
            another, and its first token is no target. None if rows are one text each.
        seed: Of parameters, synthetic batches and dropout.
        device: ``cpu`` or ``cuda``; None for GPUs where there are any.
        on_step: Called after each step, on process 0 alone: that with the smallest
            device id, which launchers call rank 0. On every process where copies go
            on without those that fail.
        measure: Also measure step time, peak memory and communication; memory and
            communication in one step more of each phase, because counting slows it.
        force: Run although the model's fingerprint is another one.
        timeout_s: How long a collective waits for a rank, in seconds.
        rank_timeout_s: How long every process waits for a sign of life from another,
            in seconds: at the start from the last one that came, later from the last
            sign. Then all end with an error that names those that are missing, or go
            on without them if the plan says so.
        checkpoint_dir: Folder, seen by all ranks, for the state of the run: model,
            optimizer, number of the next batch, generators. None to keep none.
        checkpoint_every: Steps between checkpoints; None for one at the end.
        resume: Go on from the latest checkpoint, if there is one; or from a named
            one, ``step-000100``. Under any plan for the same model and optimizer.
        keep_checkpoints: How many of the last to keep.
        background_checkpoints: Write them from a thread, off a copy in CPU memory.
        check_first_step: Before the first step compare its loss and its gradient's
            norms with those of the whole model on rank 0; ``model_fn`` is called once
            more there, and must build another model. The others wait for it
            ``timeout_s`` at most.
        check_replicas_every: Steps between checks that the weights are finite, and
            equal on all ranks that hold copies of them. They are checked at each
            checkpoint and at the end in any case.
        init_from: Weights to begin with: a safetensors file, or the folder of a
            Hugging Face model, seen by all ranks; None for random ones. A run that
            is resumed goes on from its checkpoint.
        allow_missing_weights: Begin at random with parameters that ``init_from``
            lacks, such as those of a new head.
        save_hf: New folder for the weights at the end, which transformers loads:
            safetensors files, configuration, and the tokenizer of ``init_from``.
        save_dtype: Of what is saved there; None for the parameters' own.

    Raises:
        ExecutionError: If the number of processes is wrong, the plan cannot be run,
            the data does not fit it, a loss, gradient norm or weight is not finite,
            copies of a weight differ, a checkpoint or weights cannot be written or
            read, or the first step is not that of one process.
        RankFailedError: If another process is missing or has failed.
        FingerprintError: If the plan, or the checkpoint, is for another model.
    """
    if steps < 1:
        raise ExecutionError(f"steps={steps}; a run has at least 1 step")
    if check_replicas_every is not None and check_replicas_every < 1:
        raise ExecutionError(
            f"check_replicas_every={check_replicas_every}; give a number of at least 1"
        )
    if evaluate_every is not None and (eval_data is None or evaluate_every < 1):
        raise ExecutionError(
            f"evaluate_every={evaluate_every}; give eval_data and a number of at least "
            f"1"
        )
    violation = comparison_violation(plan.strategy) if check_first_step else None
    if violation is not None:
        raise ExecutionError(violation)
    options = _checkpoint_options(
        checkpoint_dir,
        checkpoint_every,
        resume,
        keep_checkpoints,
        background_checkpoints,
    )
    weights = WeightOptions.of(
        model_fn, init_from, allow_missing_weights, save_hf, save_dtype
    )
    if plan.strategy.synchronisation.fewest_copies:
        _require_no_owner(options, measure, weights)
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
    )
    with prepared:
        source = prepared.open_data(data)
        evaluated = _evaluated(prepared, eval_data)
        first = _begin(prepared, options, steps)
        if measure and first >= steps:
            raise ExecutionError(
                f"{checkpoint_dir} has done {first} of steps={steps}, there is none "
                f"left to measure; ask for more steps"
            )
        begins = source.batch(first) if first < steps else None
        checked = None
        if check_first_step and begins is not None:
            checked = prepared.check_first_step(begins)
        loop = _Loop(
            prepared=prepared,
            steps=steps,
            options=options,
            check_every=check_replicas_every,
            evaluate_every=evaluate_every,
            eval_data=evaluated,
        )
        reports = []
        for report in loop.train(begins, first):
            reports.append(report)
            if on_step is not None and (prepared.membership or not prepared.process):
                on_step(report)
        weights.save(prepared.trainer, prepared.inventory)
        counted = source.batch(steps) if measure else None
        result = _result(prepared, reports, first, counted)
        return replace(result, first_step_check=checked)


def _evaluated(
    prepared: Prepared, data: TrainingData | None
) -> Sequence[Batch | BatchPart] | None:
    """Batches to evaluate; None for none.

    Raises:
        ExecutionError: If there is none in the data, or the plan evaluates nothing.
    """
    if data is None:
        return None
    trainer = prepared.trainer
    trainer.require_evaluation()
    return evaluation_batches(data, prepared.plan.workload, trainer.part)


def _begin(prepared: Prepared, options: CheckpointOptions | None, steps: int) -> int:
    """Begin at a checkpoint, from files, at random, or where other copies are.

    Returns:
        Steps done.
    """
    first = 0
    if options is not None:
        options.require_rests(steps, prepared.trainer.replicas)
        first = prepared.resume(prepared.checkpoints(options))
    if not first:
        prepared.initialize()
    return prepared.join() or first


def _checkpoint_options(
    folder: str | os.PathLike[str] | None,
    every: int | None,
    resume: bool | str,
    keep: int,
    background: bool,
) -> CheckpointOptions | None:
    """Options of checkpoints; None without a folder.

    Raises:
        ExecutionError: If there is none, although checkpoints are asked for.
    """
    if folder is None:
        if every is not None or resume:
            asked = "resume" if resume else "checkpoint_every"
            raise ExecutionError(f"{asked} needs a folder; give checkpoint_dir")
        return None
    return CheckpointOptions(
        folder=Path(folder).absolute(),
        every=every,
        resume=resume,
        keep=keep,
        background=background,
    )


def _require_no_owner(
    options: CheckpointOptions | None, measure: bool, weights: WeightOptions
) -> None:
    """Refuse what needs all ranks, or a launcher that ends them all at once.

    Raises:
        ExecutionError: If something of it is asked for.
    """
    rule = "the plan says on_failure=continue, under which no step needs all copies"
    if options is not None:
        raise ExecutionError(
            f"checkpoint_dir={options.folder}, but {rule}: a copy that fails takes its "
            f"state from another; leave checkpoints out or plan with on_failure=stop"
        )
    if weights.files is not None or weights.folder is not None:
        raise ExecutionError(
            f"init_from or save_hf, but {rule}; leave them out or plan with "
            f"on_failure=stop"
        )
    if measure:
        raise ExecutionError(
            f"measure=True, but {rule}; measure the same plan with on_failure=stop"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ExecutionError(
            "torchrun ends all its ranks when one fails, but the plan says "
            "on_failure=continue; use meshwright run, or start each process by itself "
            "with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """Steps of a run, and what is done between them.

    Attributes:
        prepared: The model.
        steps: How many there will be.
        options: Of checkpoints; None for none.
        check_every: Steps between checks of the weights.
        evaluate_every: Steps between evaluations.
        eval_data: Batches to evaluate; None for none.
    """

    prepared: Prepared
    steps: int
    options: CheckpointOptions | None
    check_every: int | None
    evaluate_every: int | None
    eval_data: Sequence[Batch | BatchPart] | None

    def train(
        self, begins: Batch | BatchPart | None, first: int
    ) -> Iterator[StepReport]:
        """Train step by step, one for each report asked for; save checkpoints due.

        Weights are checked before they are saved, every so many steps, and at the end.

        Args:
            begins: Batch of the first step.
            first: Number of that step.
        """
        prepared = self.prepared
        waiting: list[StepReport] = []
        for step in range(first, self.steps):
            assert prepared.data is not None
            batch, begins = begins or prepared.data.batch(step), None
            begin = time.perf_counter()
            result = prepared.step(batch)
            if prepared.waits and step + 1 == self.steps:
                result = prepared.finish()
            report = StepReport(
                step=step,
                steps=self.steps,
                loss=result.loss,
                grad_norm=result.grad_norm,
                time_s=time.perf_counter() - begin,
            )
            if prepared.waits:
                # Its loss is known, and its weights can be read, some steps later.
                waiting.append(report)
                continue
            known = [
                replace(earlier, loss=loss)
                for earlier, loss in zip(waiting, result.earlier, strict=True)
            ]
            known.append(replace(report, eval_loss=self._evaluate(step + 1)))
            waiting = []
            for each in known:
                if prepared.process == 0:
                    done, loss = each.step + 1, each.loss
                    _LOG.info("step %d of %d: loss %.4f", done, self.steps, loss)
                yield each
            self._save_or_check(step + 1, len(known))

    def _evaluate(self, done: int) -> float | None:
        """Mean loss of the batches to evaluate, if that is due."""
        every = self.evaluate_every
        if self.eval_data is None or not (
            done == self.steps or (every and not done % every)
        ):
            return None
        losses = [self.prepared.evaluate(batch) for batch in self.eval_data]
        if self.prepared.process == 0:
            _LOG.info("evaluation after step %d: loss %.4f", done, fmean(losses))
        return fmean(losses)

    def _save_or_check(self, done: int, since: int) -> None:
        """Save a checkpoint, or check the weights, if that is due.

        Args:
            done: Steps done.
            since: Steps since the weights could be read before.
        """
        prepared, every = self.prepared, self.check_every
        if self.options is not None and self.options.due(done, self.steps):
            prepared.checkpoints(self.options).save(done)
        elif done == self.steps or (every and done % every < since):
            require_sound_weights(prepared.trainer, done, prepared.remedy)


def _result(
    prepared: Prepared,
    reports: Sequence[StepReport],
    first: int,
    counted: Batch | BatchPart | None,
) -> RunResult:
    """Result of the steps; measured in some more, if there is a batch for them."""
    plan, trainer = prepared.plan, prepared.trainer
    losses = tuple(report.loss for report in reports)
    times = tuple(report.time_s for report in reports)
    measurement = None
    if counted is not None:
        steps = [
            TimedStep(time_s=each.time_s, phase=trainer.phase(each.step))
            for each in reports
        ]
        phases = measure_phases(trainer, counted)
        measurement = summarize(plan, trainer.place, phases, steps, losses)
    return RunResult(
        losses=losses,
        grad_norms=tuple(r.grad_norm for r in reports if r.grad_norm is not None),
        step_times_s=times,
        measurement=measurement,
        first_step=first,
        evaluations=tuple(
            (report.step + 1, report.eval_loss)
            for report in reports
            if report.eval_loss is not None
        ),
    )
