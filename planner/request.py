"""From the arguments of ``plan`` to the request that partitioners answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from planner.calibration.choice import (
    CalibrationChoice,
    calibrated_recipe,
    choose_calibration,
)
from planner.cluster import Cluster
from planner.cost import PricingContext
from planner.errors import NoFeasiblePlanError, StrategyError, UnknownNameError
from planner.graph import ModelGraph
from planner.schema import Optimizer, Precision
from planner.search import OBJECTIVES, Objective, Request
from planner.space import OWN_TARGETS, normalize_pins, read_pins
from planner.targets import get_target, target_names

__all__ = ["check_choices", "make_request", "make_setting"]


def make_setting(
    graph: ModelGraph,
    cluster: Cluster,
    *,
    precision: Precision,
    optimizer: Optimizer,
    grad_clip_norm: float | None,
    recipe: str,
    calibration: CalibrationChoice,
    memory_fraction: float,
    compiled: bool = False,
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
        compile=compiled,
        calibration=fitted,
    )


def check_choices(
    global_batch: int,
    objective: str,
    target: str,
    devices: str,
    evaluation_budget: int | None,
    time_budget_s: float | None,
) -> None:
    """Refuse arguments of ``plan`` that are out of range.

    Raises:
        StrategyError: If a number is.
        UnknownNameError: If a name is known to no registry.
        MeshwrightError: If a target is registered that cannot be loaded.
    """
    if global_batch < 1:
        raise StrategyError(f"global_batch={global_batch} is below 1; give at least 1")
    if objective not in OBJECTIVES:
        raise UnknownNameError("objective", objective, OBJECTIVES)
    if target not in OWN_TARGETS:
        if target not in target_names():
            raise UnknownNameError("target", target, (*OWN_TARGETS, *target_names()))
        get_target(target)
    if devices not in {"all", "any"}:
        raise UnknownNameError("choice of devices", devices, ("all", "any"))
    if evaluation_budget is not None and evaluation_budget < 1:
        raise StrategyError(
            f"evaluation_budget={evaluation_budget} is below 1; give at least 1, or "
            f"None to leave it to the partitioner"
        )
    if time_budget_s is not None and not 0 <= time_budget_s < float("inf"):
        raise StrategyError(
            f"time_budget_s={time_budget_s} is not a number of seconds; give 0 or "
            f"more, or None to leave it to the partitioner"
        )


def make_request(
    graph: ModelGraph,
    cluster: Cluster,
    *,
    global_batch: int,
    objective: Objective = "throughput",
    pin: Mapping[str, Any] | None = None,
    target: str = "meshwright",
    devices: Literal["all", "any"] = "all",
    precision: Precision | None = None,
    optimizer: Optimizer | None = None,
    grad_clip_norm: float | None = None,
    recipe: str = "torch",
    calibration: CalibrationChoice = "shipped",
    memory_fraction: float = 0.9,
    evaluation_budget: int | None = None,
    time_budget_s: float | None = None,
    seed: int = 0,
) -> Request:
    """Build the request of :func:`planner.plan`, from the same arguments.

    Args:
        graph: The model, read.
        cluster: The devices; the free ones, in the order of their ids, are ranks.

    Raises:
        NoFeasiblePlanError: If every device is occupied.
        StrategyError: If a value has the wrong type or is out of range.
        UnknownNameError: For a name that no registry holds.
    """
    check_choices(
        global_batch, objective, target, devices, evaluation_budget, time_budget_s
    )
    pins = read_pins(pin or {})
    setting = make_setting(
        graph,
        cluster,
        precision=precision or Precision(),
        optimizer=optimizer or Optimizer(),
        grad_clip_norm=grad_clip_norm,
        recipe=recipe,
        calibration=calibration,
        memory_fraction=memory_fraction,
        compiled=bool(pins.get("compile", False)),
    )
    return Request(
        setting=setting,
        global_batch=global_batch,
        pins=normalize_pins(pins),
        objective=objective,
        target=target,
        seed=seed,
        evaluation_budget=evaluation_budget,
        time_budget_s=time_budget_s,
        devices=devices,
    )
