"""Predictions to test with; each test names the fields that it is about."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cost_model_scores import Prediction


def prediction(
    number: object, measured: float, predicted: float | None, **changes: object
) -> Prediction:
    """One of step time, unless ``changes`` say otherwise."""
    row = Prediction(
        point_id=str(number),
        source="paper",
        group="group",
        metric="iter_time_s",
        measured=measured,
        predicted=predicted,
        why="",
        step_s=predicted,
        measured_step_s=measured,
        plan=f"plan {number}",
        device="a100",
        recipe="megatron",
        complete=True,
        doubtful="",
    )
    return replace(row, **changes)


def memory(
    number: object,
    metric: str,
    measured: float,
    predicted: float | None,
    **more: object,
) -> Prediction:
    """One of memory or of what fits."""
    return prediction(
        number,
        measured,
        predicted,
        metric=metric,
        step_s=None,
        measured_step_s=None,
        **more,
    )
