"""Points and predictions to test with; what a test is about is given by name."""

from __future__ import annotations

from dataclasses import replace

from planner.calibration.frameworks.names import framework_of
from planner.calibration.judging.predictions import Prediction
from planner.calibration.points import Point

_POINT = Point(
    point_id="1",
    source="paper",
    model="GPT",
    params=None,
    layers=24,
    hidden=1024,
    heads=16,
    seq=2048,
    vocab=51200,
    gpu="A100",
    n_gpus=16,
    dp=2,
    tp=4,
    pp=2,
    vp=None,
    cp=None,
    ep=None,
    zero=None,
    microbatch=2,
    global_batch=32,
    schedule="1f1b",
    recompute="full",
    precision="bf16",
    metric="iter_time_s",
    value=1.0,
    flag="",
    inferred_fields="",
    notes="",
)


def point(**changes: object) -> Point:
    return replace(_POINT, **changes)


def small(**changes: object) -> Point:
    """A run of a GPT that is read in a moment, on 8 A100s with data parallelism."""
    figures = {
        "layers": 4,
        "hidden": 512,
        "heads": 8,
        "seq": 512,
        "gpu": "A100-80GB",
        "n_gpus": 8,
        "dp": 8,
        "tp": 1,
        "pp": 1,
        "microbatch": 4,
        "global_batch": 64,
        "source": "NeMo",
        "schedule": "",
    }
    return point(**{**figures, **changes})


#: Whose constants small runs are priced with.
FRAMEWORK = framework_of(small())[0]
#: Their device type.
DEVICE = "a100-80"


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
