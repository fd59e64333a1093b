"""From the arguments of ``plan`` to the request that partitioners answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from planner.cluster import Cluster
from planner.cost import PricingContext, Risk
from planner.cost.constants import Calibration
from planner.errors import NoFeasiblePlanError, StrategyError, UnknownNameError
from planner.graph import ModelGraph
from planner.graph.neurons import only_chains, only_neurons
from planner.measurements.evidence import shipped_evidence
from planner.measurements.store import (
    CalibrationChoice,
    calibrated_recipe,
    choose_calibration,
)
from planner.schema import Optimizer, Precision
from planner.schema.fused_kernels import KERNEL_CHOICES, KernelChoice
from planner.search import OBJECTIVES, Objective, Request
from planner.space import OWN_TARGETS, Pin, Regime, normalize_pins, read_pins
from planner.targets import get_target, target_names

__all__ = [
    "DEFAULT_RISK",
    "PlanOptions",
    "default_precision",
    "devices_without",
    "make_context",
    "make_request",
    "recipe_of",
    "require_kernel_choice",
]

#: Quantile by which plans are ranked unless told: the upper end of 80 % intervals.
DEFAULT_RISK = 0.9


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
    risk: float | Literal["none"] = "none",
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
    regime = regime or Regime()
    if regime.synchronisation.of_neurons:
        chains = regime.synchronisation.chains
        graph = only_chains(graph) if chains else only_neurons(graph)
    return PricingContext(
        graph=graph,
        cluster=cluster,
        order=np.asarray(cluster.free, dtype=np.int64),
        precision=precision,
        optimizer=optimizer,
        grad_clip_norm=grad_clip_norm,
        recipe=calibrated_recipe(recipe, fitted),
        memory_fraction=memory_fraction,
        regime=regime,
        calibration=fitted,
        risk=_risk(risk, cluster, fitted),
    )


def _risk(
    quantile: float | Literal["none"], cluster: Cluster, fitted: Calibration | None
) -> Risk | None:
    """Return how much uncertainty counts; None where published runs say nothing.

    Evidence is of GPUs under the shipped constants: a cluster's own measurements, and
    CPU processes, are priced by what their document says.
    """
    gloo = any(device.backend == "gloo" for device in cluster.device_types)
    if fitted is None or gloo:
        return None
    value = 0.5 if quantile == "none" else quantile
    return Risk(quantile=value, evidence=shipped_evidence())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """A checked request of :func:`planner.plan`, without model and cluster.

    Attributes are the arguments of ``plan`` of the same name; ``pin`` holds each knob's
    value as one type (:func:`planner.space.read_pins`), however it was written. With
    ``any_dtype`` nobody asked for a dtype: where some devices have no bfloat16, other
    dtypes than ``precision`` and fewer devices are considered as well.

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
    recipe: str | None = None
    calibration: CalibrationChoice = "shipped"
    memory_fraction: float = 0.9
    risk: float | Literal["none"] = DEFAULT_RISK
    evaluation_budget: int | None = None
    time_budget_s: float | None = None
    seed: int = 0
    allow_approximate: bool = False
    accept_gap: float = 0.5
    efficiency: Mapping[str, float] = field(default_factory=dict)
    kernels: KernelChoice = "as-is"
    any_dtype: bool = False

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
        require_kernel_choice(self.kernels)
        if self.devices not in {"all", "any"}:
            raise UnknownNameError("choice of devices", self.devices, ("all", "any"))
        number = isinstance(self.risk, int | float)
        if self.risk != "none" and not (number and 0.5 <= float(self.risk) < 1):
            raise StrategyError(
                f"risk={self.risk!r} is no quantile of the step time; use 0.5 (the "
                f"prediction itself) or more and below 1, or 'none'"
            )
        if not 0 <= self.accept_gap < float("inf"):
            raise StrategyError(
                f"accept_gap={self.accept_gap} is not a loss of quality; give 0 or "
                f"more accuracy points, or percent of perplexity"
            )
        if self.efficiency and not self.allow_approximate:
            raise StrategyError(
                f"efficiency of {', '.join(self.efficiency)} without "
                f"allow_approximate=True, under which alone it counts; say both"
            )
        if self.seed < 0:
            raise StrategyError(f"seed={self.seed} is below 0; give at least 0")
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


def require_kernel_choice(kernels: str) -> None:
    """Refuse a choice of kernels that there is not.

    Raises:
        UnknownNameError: If there is none of that name; suggests the nearest.
    """
    if kernels not in KERNEL_CHOICES:
        raise UnknownNameError("choice of kernels", kernels, KERNEL_CHOICES)


def devices_without(cluster: Cluster, dtype: str) -> list[str]:
    """Return the names of the types of free GPUs that multiply no such dtype."""
    free = set(cluster.type_index[cluster.free].tolist())
    names = {dtype, "float8_e4m3fn"} if dtype == "float8" else {dtype}
    return [
        device.name
        for index, device in enumerate(cluster.device_types)
        if index in free
        and device.backend == "nccl"
        and not names & device.peak_flops_per_s.keys()
    ]


def default_precision(
    cluster: Cluster, given: Precision | None = None
) -> tuple[Precision, str]:
    """Precision to plan in, and why it is not bfloat16 if nobody gave one.

    Args:
        cluster: Its free devices; GPUs before Ampere multiply no bfloat16.
        given: As asked for; None for bfloat16 where all devices have it, else float32.

    Returns:
        The precision, and a clause or nothing.
    Raises:
        StrategyError: If bfloat16 or float8 is asked for on a device that has none.
    """
    wanted = given or Precision()
    if wanted.compute == "float8" and (lacking := devices_without(cluster, "float8")):
        raise StrategyError(
            f"dtype=float8 on {', '.join(lacking)}, which has no float8; use bfloat16"
        )
    lacking = devices_without(cluster, "bfloat16")
    if not lacking or wanted.compute != "bfloat16":
        return wanted, ""
    shown = ", ".join(lacking)
    if given is not None:
        raise StrategyError(
            f"dtype=bfloat16 on {shown}, which has no bfloat16; use float32, or price "
            f"float16 by meshwright predict"
        )
    return Precision(compute="float32"), f"{shown} has no bfloat16"


def recipe_of(recipe: str | None, target: str, calibration: CalibrationChoice) -> str:
    """Name the recipe that prices a request: the one asked for, or the target's."""
    if recipe is not None:
        return recipe
    if target in OWN_TARGETS or calibration in (None, "none"):
        return "torch"
    return get_target(target).recipe


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
        recipe=recipe_of(options.recipe, options.target, options.calibration),
        calibration=options.calibration,
        memory_fraction=options.memory_fraction,
        risk=options.risk,
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
