"""Numbers of a step that loggers write, beside those that the plan predicts."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping

import torch

from executors.loop.callbacks import StepReport
from executors.replicas.all_reduce import AllReduceReplicas
from executors.steps import PlainStep, gradient_norm
from executors.trainer import Trainer
from planner.schema import Plan

__all__ = ["last_gradient_norm", "predicted_metrics", "step_metrics"]


def predicted_metrics(plan: Plan) -> dict[str, float]:
    """Predictions of the plan, by the names that :func:`step_metrics` measures under.

    Args:
        plan: Trained by.
    """
    prediction = plan.prediction
    found: Mapping[str, float | None] = {
        "step_time_s": prediction.step_time_s,
        "samples_per_s": prediction.samples_per_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.model_flops_utilization,
        "peak_memory_bytes": max(one.total_bytes for one in prediction.memory),
    }
    return {name: value for name, value in found.items() if value is not None}


def step_metrics(
    plan: Plan, report: StepReport, device: torch.device
) -> dict[str, float]:
    """Measured numbers of a step.

    ``loss``, ``grad_norm``, ``learning_rate``; ``step_time_s``; ``samples_per_s``,
    ``tokens_per_s``; ``mfu``, model FLOPs over the devices' peak, in [0, 1], where the
    plan predicts it; ``peak_memory_bytes``: on a GPU the allocator's peak, on the CPU
    the process's resident peak, libraries included.

    Args:
        plan: Trained by.
        report: Of the step.
        device: Of this process.
    """
    time_s, workload = report.time_s, plan.workload
    samples_per_s = workload.global_batch / time_s
    length, prediction = workload.seq_len, plan.prediction
    predicted = prediction.model_flops_utilization
    found: Mapping[str, float | None] = {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "step_time_s": time_s,
        "samples_per_s": samples_per_s,
        "tokens_per_s": samples_per_s * length if length else None,
        # FLOPs and peak are the prediction's: they cancel.
        "mfu": predicted and predicted * prediction.step_time_s / time_s,
        "peak_memory_bytes": _peak_memory_bytes(device),
    }
    return {name: value for name, value in found.items() if value is not None}


def _peak_memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def last_gradient_norm(trainer: Trainer) -> float | None:
    """2-norm of the gradient that the last step had, where it was not clipped.

    Collective.

    Args:
        trainer: After the step.

    Returns:
        The norm; None where a rule of training leaves no such gradient.
    """
    plain = isinstance(trainer.step_rule, PlainStep)
    if not plain or not isinstance(trainer.replicas, AllReduceReplicas):
        return None
    parameters = (parameter for _, parameter in trainer.named_parameters())
    return float(gradient_norm(parameters, trainer.place))
