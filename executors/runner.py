"""``run``: train a model by a plan, on the processes that torchrun has started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from executors.checkpoints.checkpoint import CheckpointOptions
from executors.data import Batch, BatchPart, TrainingData, evaluation_batches
from executors.first_step import FirstStepCheck
from executors.launching.process_group import RANK_TIMEOUT_S
from executors.loop import (
    Callback,
    Loop,
    StepReport,
    StopSignals,
    signal_numbers,
)
from executors.measuring.measure import TimedStep, measure_phases, summarize
from executors.nonfinite import OnNonfinite
from executors.own_loss import Loss
from executors.prepared import Prepared, SchedulerFactory
from executors.steps import OptimizerFactory
from executors.weights.options import WeightOptions
from planner.errors import ExecutionError
from planner.schema import Plan
from planner.schema.measurement import Measurement
from planner.schema.violations import comparison_violation

__all__ = ["RunResult", "require_evaluation_options", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Results of a run; equal on all ranks of a copy of the weights but for times.

    Attributes:
        losses: Mean loss of each step from ``first_step`` on; see
            :attr:`StepReport.loss`.
        grad_norms: Gradient norms before clipping; empty where the plan does not, and
            no callback asks for them.
        step_times_s: Wall-clock time of each step on this rank.
        measurement: What ``measure=True`` measured, else None.
        first_step: Steps that the checkpoint had done from which the run went on.
        first_step_check: What ``check_first_step=True`` compared, else None.
        evaluations: Steps done and mean loss of each evaluation.
        stopped: Why the run ended before its last step: the name of a signal, or the
            reason that a callback gave; None if it did not.
        skipped_steps: Numbers of steps, from 0, that were left out because they were
            not finite.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    step_times_s: tuple[float, ...]
    measurement: Measurement | None = None
    first_step: int = 0
    first_step_check: FirstStepCheck | None = None
    evaluations: tuple[tuple[int, float], ...] = ()
    stopped: str | None = None
    skipped_steps: tuple[int, ...] = ()


def run(
    plan: Plan,
    model_fn: Callable[[], nn.Module],
    data: TrainingData | None = None,
    *,
    steps: int,
    optimizer: OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    loss: Loss | None = None,
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
    last_weights: bool = False,
    callbacks: Sequence[Callback] = (),
    keep_best: bool = False,
    on_nonfinite: OnNonfinite = "stop",
    stop_signals: Sequence[str] = (),
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
        loss: The same.
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
        last_weights: Evaluate and save there the weights of the last step, although
            the plan keeps an average of them (``Optimizer(ema=…)``), of which both
            are otherwise.
        callbacks: Called in this order at the start, after each step, evaluation and
            checkpoint, and at the end; on every process. One may stop the run.
        keep_best: Also keep the checkpoint with the lowest evaluation loss, which the
            file ``best`` names; one is saved after each evaluation that is the best.
        on_nonfinite: A loss or gradient norm that is not finite ends the run
            (``stop``); or its step is left out, on all processes alike (``skip``): no
            weight and no state of the optimizer changes; or it is taken
            (``continue``).
        stop_signals: With ``checkpoint_dir``, SIGTERM ends the run behind the running
            step, all processes behind the same one, with a checkpoint; so do these,
            such as ``USR1``, which SLURM can send before the time is over.

    Raises:
        ExecutionError: If the number of processes is wrong, the plan cannot be run,
            the data does not fit it, copies of a weight differ, a checkpoint or
            weights cannot be written or read, or the first step is not that of one
            process.
        NonFiniteError: If a loss, gradient norm or weight is not finite.
        RankFailedError: If another process is missing or has failed.
        FingerprintError: If the plan, or the checkpoint, is for another model.
    """
    _require_numbers(plan, steps, check_replicas_every, check_first_step)
    require_evaluation_options(eval_data, evaluate_every)
    options = CheckpointOptions.of(
        checkpoint_dir,
        checkpoint_every,
        resume,
        keep_checkpoints,
        background_checkpoints,
        keep_best,
    )
    _require_best(keep_best, evaluate_every)
    signals = _signals_of(options, stop_signals)
    weights = WeightOptions.of(
        model_fn, init_from, allow_missing_weights, save_hf, save_dtype
    )
    if plan.strategy.synchronisation.fewest_copies:
        _require_no_owner(options, measure, weights, callbacks)
    with (
        signals or contextlib.nullcontext(),
        Prepared(
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
        ) as prepared,
    ):
        source = prepared.open_data(data)
        evaluated = _evaluated(prepared, eval_data)
        first = _begin(prepared, options, steps, evaluate_every)
        _require_steps_left(measure, first, steps, options)
        begins = source.batch(first) if first < steps else None
        checked = None
        if check_first_step and begins is not None:
            checked = prepared.check_first_step(begins)
        loop = Loop(
            prepared=prepared,
            steps=steps,
            options=options,
            check_every=check_replicas_every,
            evaluate_every=evaluate_every,
            eval_data=evaluated,
            callbacks=callbacks,
            signals=signals,
            averaged=not last_weights,
        )
        reports, state = loop.train(begins, first, on_step)
        if not state.hurries:
            with prepared.weights_of(prepared.keeps_average and not last_weights):
                weights.save(prepared.trainer, prepared.inventory)
        counted = source.batch(steps) if measure and state.reason is None else None
        result = _result(prepared, reports, first, counted)
        return replace(result, first_step_check=checked, stopped=state.reason)


def _require_best(keep_best: bool, evaluate_every: int | None) -> None:
    """Refuse to keep the best of checkpoints that are not evaluated.

    Raises:
        ExecutionError: If there are no evaluations during the run.
    """
    if keep_best and evaluate_every is None:
        raise ExecutionError(
            "keep_best compares evaluation losses, and there are none during the run; "
            "give eval_data and evaluate_every"
        )


def _signals_of(
    options: CheckpointOptions | None, further: Sequence[str]
) -> StopSignals | None:
    """Signals that end the run behind a step; None where nothing is saved.

    Raises:
        ExecutionError: If some are named, and there are no checkpoints.
    """
    numbers = signal_numbers(("TERM", *further))
    if options is None:
        if further:
            raise ExecutionError(
                f"stop_signals={', '.join(further)} save a checkpoint; give "
                f"checkpoint_dir"
            )
        return None
    return StopSignals(numbers)


def _require_numbers(
    plan: Plan, steps: int, check_every: int | None, check_first_step: bool
) -> None:
    """Refuse numbers of steps below 1, and a comparison that the plan does not allow.

    Raises:
        ExecutionError: If there are some.
    """
    if steps < 1:
        raise ExecutionError(f"steps={steps}; a run has at least 1 step")
    if check_every is not None and check_every < 1:
        raise ExecutionError(
            f"check_replicas_every={check_every}; give a number of at least 1"
        )
    violation = comparison_violation(plan.strategy) if check_first_step else None
    if violation is not None:
        raise ExecutionError(violation)


def require_evaluation_options(
    eval_data: TrainingData | None, evaluate_every: int | None
) -> None:
    """Refuse evaluations of nothing.

    Args:
        eval_data: What is evaluated; None for nothing.
        evaluate_every: Steps between evaluations.

    Raises:
        ExecutionError: If there are no data, or the number of steps is below 1.
    """
    if evaluate_every is not None and (eval_data is None or evaluate_every < 1):
        raise ExecutionError(
            f"evaluate_every={evaluate_every}; give eval_data and a number of at least "
            f"1"
        )


def _require_steps_left(
    measure: bool, first: int, steps: int, options: CheckpointOptions | None
) -> None:
    if measure and first >= steps and options is not None:
        raise ExecutionError(
            f"{options.folder} has done {first} of steps={steps}, there is none left "
            f"to measure; ask for more steps"
        )


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


def _begin(
    prepared: Prepared,
    options: CheckpointOptions | None,
    steps: int,
    evaluate_every: int | None,
) -> int:
    """Begin at a checkpoint, from files, at random, or where other copies are.

    Returns:
        Steps done.
    """
    first = 0
    if options is not None:
        options.require_rests(steps, prepared.trainer.replicas, evaluate_every)
        first = prepared.resume(prepared.checkpoints(options))
    if not first:
        prepared.initialize()
    return prepared.join() or first


def _require_no_owner(
    options: CheckpointOptions | None,
    measure: bool,
    weights: WeightOptions,
    callbacks: Sequence[Callback],
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
    if callbacks:
        raise ExecutionError(
            f"callbacks, but {rule}; use on_step, or plan with on_failure=stop"
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
        skipped_steps=tuple(report.step for report in reports if report.skipped),
    )
