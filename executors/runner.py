"""``run``: train a model by a plan, on the processes that torchrun has started."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from executors.checkpoints.checkpoint import CheckpointOptions, Checkpoints
from executors.checkpoints.snapshot import Inventory
from executors.data import Batch, Data, global_batches, require_equal_batches
from executors.deferred.materialize import build_model
from executors.deferred.model import record
from executors.deferred.recording import Recording
from executors.first_step import FirstStepCheck, compare_first_step
from executors.launching.process_group import (
    RANK_TIMEOUT_S,
    own_numbers,
    process_group,
)
from executors.measuring.measure import TimedStep, measure_phases, summarize
from executors.mesh import build_mesh, choose_device
from executors.names import tied_parameters
from executors.replicas.membership import Membership, open_membership
from executors.replicas.recovery import pack_state, take_state
from executors.soundness import require_finite_step, require_sound_weights
from executors.trainer import Trainer
from executors.weights.options import WeightOptions
from planner.errors import ExecutionError, FingerprintError
from planner.schema import Plan
from planner.schema.base import fingerprint_parameters
from planner.schema.measurement import Measurement
from planner.schema.violations import comparison_violation, executor_violations

__all__ = ["RunResult", "StepReport", "check_model", "run"]

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
    """

    step: int
    steps: int
    loss: float
    grad_norm: float | None
    time_s: float


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
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    step_times_s: tuple[float, ...]
    measurement: Measurement | None = None
    first_step: int = 0
    first_step_check: FirstStepCheck | None = None


def check_model(plan: Plan, model: nn.Module) -> None:
    """Refuse a model that the plan was not made for.

    Raises:
        FingerprintError: With the difference: parameters, tensors, missing modules.
    """
    parameters = dict(model.named_parameters())
    found = fingerprint_parameters((n, p.shape) for n, p in parameters.items())
    if found == plan.model.fingerprint:
        return
    count = sum(parameter.numel() for parameter in parameters.values())
    known = {name for name, _ in model.named_modules()}
    stages = plan.strategy.stages
    missing = [m for stage in stages for m in stage.modules if m not in known]
    lacks = f", lacks the module {missing[0]} (of {len(missing)})" if missing else ""
    raise FingerprintError(
        f"the plan is for {plan.model.name} ({plan.model.parameters:,} parameters in "
        f"{plan.model.tensors} tensors, fingerprint {plan.model.fingerprint}), this "
        f"model has {count:,} in {len(parameters)} ({found}){lacks}; plan again for "
        f"it, or use force if only names differ"
    )


def run(
    plan: Plan,
    model_fn: Callable[[], nn.Module],
    data: Data | None = None,
    *,
    steps: int,
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
        data: Global batches: an iterable of mappings from keyword to tensor, or a
            function from the step's number to one; equal on all ranks, which is
            checked. ``labels`` go to the loss; other keywords must be inputs of the
            model. None for synthetic batches of the shapes in the plan.
        steps: Optimizer steps, at least 1; those of the run that is resumed count.
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
    chosen = choose_device(device)
    with contextlib.ExitStack() as stack:
        ids = plan.strategy.device_ids()
        membership: Membership | None = None
        fewest = plan.strategy.synchronisation.fewest_copies
        if fewest:
            _require_no_owner(options, measure, weights)
            membership = stack.enter_context(
                open_membership(
                    *own_numbers(),
                    ids,
                    fewest=fewest,
                    silence_s=rank_timeout_s,
                    timeout_s=timeout_s,
                )
            )
        group = process_group(
            chosen,
            timeout_s=timeout_s,
            rank_timeout_s=rank_timeout_s,
            device_ids=ids,
            alone=membership is not None,
        )
        stack.enter_context(group)
        source = _Source(model_fn=model_fn, seed=seed, weights=weights)
        trainer, inventory = _prepare(plan, source, chosen, force, membership)
        saved: Checkpoints | None = None
        if options is not None:
            options.require_rests(steps, trainer.replicas)
            saved = Checkpoints(
                options,
                trainer,
                inventory,
                seed=seed,
                timeout_s=timeout_s,
                force=force,
            )
            stack.enter_context(saved)
        first = saved.begin() if saved else 0
        if not first:
            weights.load(trainer, inventory)
        if membership is not None and membership.joins:
            first = take_state(trainer, membership.join())
            _LOG.info("joined after step %d", first)
        if measure and first >= steps:
            raise ExecutionError(
                f"{checkpoint_dir} has done {first} of steps={steps}, there is none "
                f"left to measure; ask for more steps"
            )
        total = steps + (1 if measure else 0)
        batches = global_batches(plan.workload, data, total, seed=seed, first=first)
        checked = None
        if check_first_step and first < steps:
            batch = next(batches)
            batches = itertools.chain([batch], batches)
            checked = source.check(trainer, batch, inventory, saved)
        reports = []
        for report in _train(
            trainer, batches, first, steps, saved, check_replicas_every
        ):
            reports.append(report)
            reports_all = membership is not None or trainer.place.process == 0
            if on_step is not None and reports_all:
                on_step(report)
        weights.save(trainer, inventory)
        result = _result(
            plan, trainer, reports, first, next(batches) if measure else None
        )
        return replace(result, first_step_check=checked)


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


@dataclass(kw_only=True)
class _Source:
    """Builds the model of a run.

    Attributes:
        model_fn: As for :func:`run`.
        seed: The same.
        weights: Files that the model's values come from.
    """

    model_fn: Callable[[], nn.Module]
    seed: int
    weights: WeightOptions
    _recorded: weakref.ref[nn.Module] | None = None

    def record(self) -> tuple[nn.Module, Recording | None]:
        """Build the model that is trained, without values."""
        torch.manual_seed(self.seed)
        model, recording = record(self.model_fn)
        self._recorded = weakref.ref(model)
        return model, recording

    def check(
        self,
        trainer: Trainer,
        batch: Batch,
        inventory: Inventory,
        saved: Checkpoints | None,
    ) -> FirstStepCheck:
        """Compare a batch's loss and gradient with those of the whole model."""
        # Collective over all ranks, although one of them reads.
        alone = dist.new_group([0], backend="gloo")

        def build() -> nn.Module:
            dtype = getattr(torch, trainer.plan.strategy.precision.parameter)
            model = build_model(
                self._another, self.seed, device=trainer.place.device, dtype=dtype
            )
            if saved is not None and saved.last is not None:
                saved.read_into(model, alone)
            else:
                self.weights.load_whole(model, inventory)
            return model

        return compare_first_step(trainer, build, batch, inventory.first)

    def _another(self) -> nn.Module:
        model = self.model_fn()
        if self._recorded is not None and self._recorded() is model:
            raise ExecutionError(
                "model_fn returned the same model twice; with check_first_step it is "
                "called once more and must build another: lambda: copy.deepcopy(model)"
            )
        return model


def _prepare(
    plan: Plan,
    source: _Source,
    device: torch.device,
    force: bool,
    membership: Membership | None,
) -> tuple[Trainer, Inventory]:
    """Check processes, model and strategy, and build this rank's part."""
    place = build_mesh(plan.strategy, device, membership)
    model, recording = source.record()
    if not force:
        check_model(plan, model)
    backend = "nccl" if device.type == "cuda" else "gloo"
    tied = tied_parameters(model)
    violations = executor_violations(
        plan.strategy,
        tied=tied,
        backend=backend,
        attention=plan.model.attention,
        whole_stream=plan.model.whole_stream,
        mixing=plan.model.mixing,
        batch_norm_values=plan.model.batch_norm_values,
    )
    if violations:
        raise ExecutionError(f"this plan cannot be run: {'; '.join(violations)}")
    if place.process == 0:
        _LOG.info("training %s by %s", plan.model.name, plan.strategy.label())
    inventory = Inventory.of(model)
    return Trainer(plan, model, place, recording), inventory


def _train(
    trainer: Trainer,
    batches: Iterator[Batch],
    first: int,
    steps: int,
    saved: Checkpoints | None,
    check_every: int | None,
) -> Iterator[StepReport]:
    """Train step by step, one for each report asked for; save checkpoints due.

    Weights are checked before they are saved, every so many steps, and at the end.
    """
    remedy = partial(_remedy, saved)
    for step in range(first, steps):
        batch = next(batches)
        if trainer.replicas.meets(trainer.done):
            # Copies that are apart do not wait for each other in between.
            require_equal_batches(batch, step, trainer.place.device)
        begin = time.perf_counter()
        result = trainer.step(batch)
        if trainer.place.membership is not None:
            trainer.place.membership.admit(partial(pack_state, trainer))
        took = time.perf_counter() - begin
        if trainer.replicas.meets(trainer.done):
            # Between exchanges copies have losses of their own.
            require_finite_step(trainer, step, result, remedy)
        if trainer.place.process == 0:
            _LOG.info("step %d of %d: loss %.4f", step + 1, steps, result.loss)
        yield StepReport(
            step=step,
            steps=steps,
            loss=result.loss,
            grad_norm=result.grad_norm,
            time_s=took,
        )
        if saved is not None and saved.options.due(step + 1, steps):
            saved.save(step + 1)
        elif step + 1 == steps or (check_every and not (step + 1) % check_every):
            require_sound_weights(trainer, step + 1, remedy)


def _result(
    plan: Plan,
    trainer: Trainer,
    reports: Sequence[StepReport],
    first: int,
    counted: Batch | None,
) -> RunResult:
    """Result of the steps; measured in some more, if there is a batch for them."""
    losses = tuple(report.loss for report in reports)
    times = tuple(report.time_s for report in reports)
    measurement = None
    if counted is not None:
        steps = [
            TimedStep(time_s=each.time_s, phase=trainer.replicas.phase(each.step))
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
    )


def _remedy(saved: Checkpoints | None, change: str) -> str:
    """Add to advice which checkpoint to resume from; collective."""
    return saved.remedy(change) if saved else change
