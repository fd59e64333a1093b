"""From the arguments of ``plan`` to the request that partitioners answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from planner.cluster import Cluster
from planner.cost import PricingContext
from planner.errors import NoFeasiblePlanError, StrategyError, UnknownNameError
from planner.graph import ModelGraph
from planner.measurements.store import (
    CalibrationChoice,
    calibrated_recipe,
    choose_calibration,
)
from planner.schema import Optimizer, Precision
from planner.search import OBJECTIVES, Objective, Request
from planner.space import OWN_TARGETS, Pin, Regime, normalize_pins, read_pins
from planner.targets import get_target, target_names

__all__ = ["PlanOptions", "make_context", "make_request"]


def make_context(
    graph: ModelGraph,
    cluster: Cluster,
    *,
    precision: Precision,
    optimizer: Optimizer,
    grad_clip_norm: float | None,
    recipe: str,
    calibration: CalibrationChoice,
    memory_fraction: float,
    regime: Regime | None = None,
) -> PricingContext:
    """Build what all strategies of a request have in common; arguments as for ``plan``.

    Raises:
        NoFeasiblePlanError: If every device is occupied.
        StrategyError: If ``memory_fraction`` is not a share.
    """
    if not 0 < memory_fraction <= 1:
        raise StrategyError(
            f"memory_fraction={memory_fraction} is not a share; use above 0 and up to 1"
        )
    if not cluster.num_free:
        raise NoFeasiblePlanError(
            [f"all {cluster.num_devices} devices of {cluster.name} are occupied"]
        )
    fitted = choose_calibration(calibration, cluster)
    return PricingContext(
        graph=graph,
        cluster=cluster,
        order=np.asarray(cluster.free, dtype=np.int64),
        precision=precision,
        optimizer=optimizer,
        grad_clip_norm=grad_clip_norm,
        recipe=calibrated_recipe(recipe, fitted),
        memory_fraction=memory_fraction,
        regime=regime or Regime(),
        calibration=fitted,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """A checked request of :func:`planner.plan`, without model and cluster.

    Attributes are the arguments of ``plan`` of the same name; ``pin`` holds each knob's
    value as one type (:func:`planner.space.read_pins`), however it was written.

    Raises:
        StrategyError: If a value has the wrong type or is out of range.
        UnknownNameError: If a name is known to no registry.
        MeshwrightError: If a target is registered that cannot be loaded.
    """

    global_batch: int
    objective: Objective = "throughput"
    pin: Mapping[str, Pin] = field(default_factory=dict)
    target: str = "meshwright"
    devices: Literal["all", "any"] = "all"
    precision: Precision = field(default_factory=Precision)
    optimizer: Optimizer = field(default_factory=Optimizer)
    grad_clip_norm: float | None = None
    recipe: str = "torch"
    calibration: CalibrationChoice = "shipped"
    memory_fraction: float = 0.9
    evaluation_budget: int | None = None
    time_budget_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "pin", read_pins(self.pin))
        if self.global_batch < 1:
            raise StrategyError(
                f"global_batch={self.global_batch} is below 1; give at least 1"
            )
        if self.objective not in OBJECTIVES:
            raise UnknownNameError("objective", self.objective, OBJECTIVES)
        if self.target not in OWN_TARGETS:
            if self.target not in target_names():
                known = (*OWN_TARGETS, *target_names())
                raise UnknownNameError("target", self.target, known)
            get_target(self.target)
        if self.devices not in {"all", "any"}:
            raise UnknownNameError("choice of devices", self.devices, ("all", "any"))
        budget, seconds = self.evaluation_budget, self.time_budget_s
        if budget is not None and budget < 1:
            raise StrategyError(
                f"evaluation_budget={budget} is below 1; give at least 1, or None to "
                f"leave it to the partitioner"
            )
        if seconds is not None and not 0 <= seconds < float("inf"):
            raise StrategyError(
                f"time_budget_s={seconds} is not a number of seconds; give 0 or more, "
                f"or None to leave it to the partitioner"
            )


def make_request(graph: ModelGraph, cluster: Cluster, options: PlanOptions) -> Request:
    """Build the request that partitioners answer.

    Args:
        graph: The model, read.
        cluster: The devices; the free ones, in the order of their ids, are ranks.
        options: What is asked of them.

    Raises:
        NoFeasiblePlanError: If every device is occupied.
        StrategyError: If ``memory_fraction`` is not a share.
    """
    context = make_context(
        graph,
        cluster,
        precision=options.precision,
        optimizer=options.optimizer,
        grad_clip_norm=options.grad_clip_norm,
        recipe=options.recipe,
        calibration=options.calibration,
        memory_fraction=options.memory_fraction,
        regime=Regime.from_pins(options.pin),
    )
    return Request(
        context=context,
        global_batch=options.global_batch,
        pins=normalize_pins(options.pin),
        objective=options.objective,
        target=options.target,
        seed=options.seed,
        evaluation_budget=options.evaluation_budget,
        time_budget_s=options.time_budget_s,
        devices=options.devices,
    )
