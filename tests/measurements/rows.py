"""Points to test with; each test names the fields that it is about."""

from __future__ import annotations

from dataclasses import replace

from planner.measurements.framework_names import framework_of
from planner.measurements.points import Point

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


#: Framework whose constants price small runs.
FRAMEWORK = framework_of(small())[0]
#: Their device type.
DEVICE = "a100-80"
