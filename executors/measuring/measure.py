"""Step time, peak memory and communication of a run."""

from __future__ import annotations

import os
import platform
import socket
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from executors.data import Batch, BatchPart
from executors.measuring.memory import LiveMemory
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import ProcessMesh
from executors.trainer import Trainer
from planner.schema import Plan
from planner.schema.measurement import (
    MeasuredPhase,
    Measurement,
    Traffic,
    mean_traffic,
)

__all__ = ["CountedStep", "TimedStep", "measure_phases", "summarize"]

#: First steps that medians leave out: they allocate, connect and compile.
_WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """Wall-clock time of one step on this rank, and the phase that it was of."""

    time_s: float
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedStep:
    """Peak memory and communication of one step, of every rank in order.

    Attributes:
        peak_memory_bytes: By rank.
        traffic: By rank, by kind.
    """

    peak_memory_bytes: tuple[int, ...]
    traffic: tuple[dict[str, Traffic], ...]


def measure_phases(
    trainer: Trainer, batch: Batch | BatchPart
) -> dict[str, CountedStep]:
    """Train one step more of each phase, counting; collective.

    Args:
        trainer: Warm: its optimizer has its states.
        batch: A global batch, or this rank's part of one, on the CPU.

    Returns:
        By name of the phase.
    """
    found = {}
    for name in trainer.plan.strategy.phases:
        trainer.force(name)
        for _ in range(trainer.replicas.lead_in):
            trainer.step(batch)
        found[name] = _count_step(trainer, batch)
    trainer.force(None)
    return found


def _count_step(trainer: Trainer, batch: Batch | BatchPart) -> CountedStep:
    device, counter = trainer.place.device, CollectiveCounter()
    # Gradients of the last step would count as alive until they are replaced.
    trainer.optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        if trainer.plan.strategy.compile:
            # The allocator sees all, in a step of its own.
            trainer.step(batch)
            peak = torch.cuda.max_memory_allocated(device)
        with _eager(), counter:
            trainer.step(batch)
        torch.cuda.synchronize(device)
        if not trainer.plan.strategy.compile:
            peak = torch.cuda.max_memory_allocated(device)
    else:
        with LiveMemory() as memory, _eager(), counter:
            trainer.step(batch)
        peak = memory.peak_bytes
    # Another rank may still wait for what this one would do in a next step.
    trainer.replicas.settle()
    everyone: list[tuple[int, dict[str, Traffic]]] = [(0, {})] * dist.get_world_size()
    dist.all_gather_object(everyone, (peak, counter.traffic()))
    return CountedStep(
        peak_memory_bytes=tuple(entry[0] for entry in everyone),
        traffic=tuple(entry[1] for entry in everyone),
    )


def _eager() -> AbstractContextManager[None]:
    """Run blocks as they were written: ops within compiled code pass by what counts.

    The stance holds from the call on, so that it is made where it begins.
    """
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def summarize(
    plan: Plan,
    place: ProcessMesh,
    counted: Mapping[str, CountedStep],
    steps: Sequence[TimedStep],
    losses: Sequence[float],
) -> Measurement:
    """Make the document of a measured run.

    Args:
        plan: The plan that was run.
        place: Where this process stands.
        counted: From :func:`measure_phases`.
        steps: Each step on this rank, warm-up included.
        losses: Of each step.
    """
    shares = plan.strategy.phases
    warm = steps[min(_WARM_UP, len(steps) - 1) :]
    phases = tuple(
        MeasuredPhase(
            name=name,
            share=share,
            peak_memory_bytes=counted[name].peak_memory_bytes,
            collectives=counted[name].traffic,
        )
        for name, share in shares.items()
    )
    peaks = zip(*(phase.peak_memory_bytes for phase in phases), strict=True)
    cuda = place.device.type == "cuda"
    name = torch.cuda.get_device_name(place.device) if cuda else platform.machine()
    return Measurement(
        plan_label=plan.strategy.label(),
        model_name=plan.model.name,
        model_fingerprint=plan.model.fingerprint,
        step_times_s=tuple(step.time_s for step in steps),
        warm_up_steps=len(steps) - len(warm),
        median_step_time_s=_mean_time(warm, shares),
        peak_memory_bytes=tuple(max(peak) for peak in peaks),
        collectives=tuple(
            mean_traffic((phase.share, phase.collectives[rank]) for phase in phases)
            for rank in range(plan.strategy.mesh.num_devices)
        ),
        phases=phases if len(phases) > 1 else (),
        losses=tuple(losses),
        environment={
            "backend": dist.get_backend(),
            "device": name,
            "host": socket.gethostname(),
            "cpu_count": str(os.cpu_count()),
            "threads_per_rank": str(torch.get_num_threads()),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    )


def _mean_time(steps: Sequence[TimedStep], shares: Mapping[str, float]) -> float:
    """Mean over phases, by share, of the median step; phases not seen are left out."""
    medians = {
        name: statistics.median(times)
        for name in shares
        if (times := [step.time_s for step in steps if step.phase == name])
    }
    seen = sum(shares[name] for name in medians)
    return sum(shares[name] / seen * medians[name] for name in medians)
