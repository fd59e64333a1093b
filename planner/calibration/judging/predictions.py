"""What the cost model says of a published measurement, beside the measurement."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Prediction"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One row and its prediction.

    Attributes:
        point_id: Of the row.
        source: Of the row.
        group: What the row can be compared with; see ``group_of``.
        metric: Of the row; ``feasible`` for a run that ran out of memory.
        measured: In units of the metric.
        predicted: Likewise; None if it cannot be.
        why: What was assumed, or why there is no prediction.
        step_s: Predicted seconds of a step; None for rows of memory, or if it cannot
            be.
        measured_step_s: The measured figure as seconds of a step; None likewise.
        plan: Text that says the plan, equal for equal plans.
        device: Name of the device type that the prediction is for.
        recipe: Name of the framework's constants.
        complete: Whether shape, machine and plan are all in the row.
        doubtful: Why the row is left out of scores; "" if it is not.
    """

    point_id: str
    source: str
    group: str
    metric: str
    measured: float
    predicted: float | None
    why: str
    step_s: float | None
    measured_step_s: float | None
    plan: str
    device: str
    recipe: str
    complete: bool
    doubtful: str
