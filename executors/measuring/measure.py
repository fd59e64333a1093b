"""What a run measures: step time, peak memory, communication."""

from __future__ import annotations

import os
import platform
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from executors.data import Batch
from executors.measuring.memory import LiveMemory
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import ProcessMesh
from executors.trainer import Trainer
from planner.schema import Plan
from planner.schema.measurement import Measurement, Traffic

__all__ = ["CountedStep", "measure_step", "summarize"]

#: First steps that medians leave out: they allocate, connect and compile.
_WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedStep:
    """Peak memory and communication of one step, of every rank in order.

    Attributes:
        peak_memory_bytes: By rank.
        traffic: By rank, by kind.
    """

    peak_memory_bytes: tuple[int, ...]
    traffic: tuple[dict[str, Traffic], ...]


def measure_step(trainer: Trainer, batch: Batch) -> CountedStep:
    """Train one step more, counting; collective.

    Args:
        trainer: Warm: its optimizer has its states.
        batch: A global batch, on the CPU.
    """
    device, counter = trainer.place.device, CollectiveCounter()
    # Gradients of the last step would count as alive until they are replaced.
    trainer.optimizer.zero_grad()
    # Ops within compiled code pass by what counts: blocks are run as they were written.
    eager = torch.compiler.set_stance("force_eager")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        if trainer.plan.strategy.compile:
            # The allocator sees all, in a step of its own.
            trainer.step(batch)
            peak = torch.cuda.max_memory_allocated(device)
        with eager, counter:
            trainer.step(batch)
        torch.cuda.synchronize(device)
        if not trainer.plan.strategy.compile:
            peak = torch.cuda.max_memory_allocated(device)
    else:
        with LiveMemory() as memory, eager, counter:
            trainer.step(batch)
        peak = memory.peak_bytes
    everyone: list[tuple[int, dict[str, Traffic]]] = [(0, {})] * dist.get_world_size()
    dist.all_gather_object(everyone, (peak, counter.traffic()))
    return CountedStep(
        peak_memory_bytes=tuple(entry[0] for entry in everyone),
        traffic=tuple(entry[1] for entry in everyone),
    )


def summarize(
    plan: Plan,
    place: ProcessMesh,
    counted: CountedStep,
    step_times_s: Sequence[float],
    losses: Sequence[float],
) -> Measurement:
    """The document of a measured run.

    Args:
        plan: What was run.
        place: Where this process stands.
        counted: From :func:`measure_step`.
        step_times_s: Of each step on this rank, warm-up included.
        losses: Of each step.
    """
    warm = list(step_times_s[min(_WARM_UP, len(step_times_s) - 1) :])
    cuda = place.device.type == "cuda"
    name = torch.cuda.get_device_name(place.device) if cuda else platform.machine()
    return Measurement(
        plan_label=plan.strategy.label(),
        model_name=plan.model.name,
        model_fingerprint=plan.model.fingerprint,
        step_times_s=tuple(step_times_s),
        warm_up_steps=len(step_times_s) - len(warm),
        median_step_time_s=statistics.median(warm),
        peak_memory_bytes=counted.peak_memory_bytes,
        collectives=counted.traffic,
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
