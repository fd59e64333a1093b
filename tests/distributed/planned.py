"""Plans that the planner makes of tiny models, for local processes."""

from __future__ import annotations

from functools import cache
from typing import Any

from planner import plan
from planner.capture import capture
from planner.graph import ModelGraph
from planner.schema import AXES, Optimizer, Plan, Precision
from tests.models.tiny import TINY

__all__ = ["graph_of", "planned"]

BATCH = 8
#: At the rate of the others its loss leaves float32 within five steps.
_RATES = {"tiny-recommender": 1e-3, "tiny-resnet": 1e-3}


@cache
def graph_of(name: str) -> ModelGraph:
    """Graph of one of the tiny models."""
    tiny = TINY[name]
    return capture(tiny.build, tiny.example(4), dtype="float32", name=name)


def planned(
    name: str,
    *,
    optimizer: Optimizer | None = None,
    compute: Any = "float32",
    **pins: Any,
) -> Plan:
    """For two processes; for four, if two axes are pinned to two each. Plain SGD."""
    sgd = Optimizer(name="SGD", learning_rate=_RATES.get(name, 0.1))
    axes = set(AXES) & set(pins)
    if graph_of(name).batch_norm_values is not None and "pp" in pins:
        pins.setdefault("semantics", "approximate")
    return plan(
        graph_of(name),
        f"local:{2 ** len(axes)}",
        global_batch=BATCH,
        pin=pins,
        precision=Precision(compute=compute),
        optimizer=optimizer or sgd,
    )
