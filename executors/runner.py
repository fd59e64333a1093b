"""``run``: train a model by a plan, on the processes that torchrun has started."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from executors.data import Batch, Data, global_batches
from executors.measure import measure_step, summarize
from executors.mesh import arrange, choose_device, process_group
from executors.names import tied_parameters
from executors.trainer import Trainer
from planner.errors import ExecutionError, FingerprintError
from planner.schema import Plan
from planner.schema.fingerprint import fingerprint_parameters
from planner.schema.measurement import Measurement
from planner.schema.support import unsupported

__all__ = ["RunResult", "StepReport", "check_model", "run"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did, for progress bars and logs.

    Attributes:
        step: Number of the step, from 0.
        steps: How many there will be.
        loss: Mean over the global batch, before the update.
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
    """What a run did; equal on all ranks but for times.

    Attributes:
        losses: Mean loss of each step.
        grad_norms: Gradient norms before clipping; empty where the plan does not.
        step_times_s: Wall-clock time of each step on this rank.
        measurement: What ``measure=True`` measured, else None.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    step_times_s: tuple[float, ...]
    measurement: Measurement | None = None


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
) -> RunResult:
    """Train a model by a plan.

    Collective: every process of the plan calls it with equal arguments, under
    torchrun, under :func:`executors.launch`, or alone for a plan of one device.

    Args:
        plan: What to do.
        model_fn: Builds the whole model, on the CPU. It is called on every rank
            right after ``torch.manual_seed(seed)``, so that all ranks start equal.
        data: Global batches: an iterable of mappings from keyword to tensor, or a
            function from the step's number to one; equal on all ranks. None for
            synthetic batches of the shapes in the plan.
        steps: Optimizer steps, at least 1.
        seed: Of parameters, synthetic batches and dropout.
        device: ``cpu`` or ``cuda``; None for GPUs where there are any.
        on_step: Called after each step, on rank 0 alone.
        measure: Also measure step time, peak memory and communication; memory and
            communication in one step more, because counting slows a step.
        force: Run although the model's fingerprint is another one.
        timeout_s: How long a collective waits for a rank, in seconds.

    Raises:
        ExecutionError: If the number of processes is wrong, the plan cannot be run,
            or the data does not fit it.
        FingerprintError: If the plan is for another model.
    """
    if steps < 1:
        raise ExecutionError(f"steps={steps}; a run has at least 1 step")
    chosen = choose_device(device)
    with process_group(chosen, timeout_s=timeout_s):
        trainer = _prepare(plan, model_fn, seed, chosen, force)
        total = steps + (1 if measure else 0)
        batches = global_batches(plan.workload, data, total, seed=seed)
        losses, norms, times = [], [], []
        for step in range(steps):
            report = _train_step(trainer, next(batches), step, steps)
            losses.append(report.loss)
            times.append(report.time_s)
            norms += [] if report.grad_norm is None else [report.grad_norm]
            if trainer.place.rank == 0:
                _LOG.info("step %d of %d: loss %.4f", step + 1, steps, report.loss)
                if on_step is not None:
                    on_step(report)
        measurement = None
        if measure:
            counted = measure_step(trainer, next(batches))
            measurement = summarize(plan, trainer.place, counted, times, losses)
        return RunResult(
            losses=tuple(losses),
            grad_norms=tuple(norms),
            step_times_s=tuple(times),
            measurement=measurement,
        )


def _prepare(
    plan: Plan,
    model_fn: Callable[[], nn.Module],
    seed: int,
    device: torch.device,
    force: bool,
) -> Trainer:
    """Check processes, model and strategy, and build this rank's part."""
    place = arrange(plan.strategy, device)
    torch.manual_seed(seed)
    # Whole on every rank: building only the shards is still to come.
    model = model_fn()
    if not force:
        check_model(plan, model)
    backend = "nccl" if device.type == "cuda" else "gloo"
    tied = tied_parameters(model)
    reasons = unsupported(
        plan.strategy, tied=tied, backend=backend, attention=plan.model.attention
    )
    if reasons:
        raise ExecutionError(f"this plan cannot be run: {'; '.join(reasons)}")
    if place.rank == 0:
        _LOG.info("training %s by %s", plan.model.name, plan.strategy.label())
    return Trainer(plan, model, place)


def _train_step(trainer: Trainer, batch: Batch, step: int, steps: int) -> StepReport:
    begin = time.perf_counter()
    result = trainer.step(batch)
    return StepReport(
        step=step,
        steps=steps,
        loss=result.loss,
        grad_norm=result.grad_norm,
        time_s=time.perf_counter() - begin,
    )
