"""Measured runs as cases: priced again and again under other constants."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from pydantic import ValidationError

from planner.cost import Cost, CostModel, PricingContext, Recipe
from planner.cost.constants import Calibration
from planner.errors import CalibrationError, MeshwrightError
from planner.measurements.catalogues import fitted_constants, frameworks
from planner.measurements.contradictions import Priced, contradictions
from planner.measurements.framework_names import framework_of
from planner.measurements.known_plans import known_plan, optimizer_of
from planner.measurements.machines import machine_of
from planner.measurements.metrics import (
    convention_of,
    step_seconds,
    time_metric_named,
)
from planner.measurements.model_configs import graph_of
from planner.measurements.model_shapes import shape_of
from planner.measurements.nvidia_recipes import (
    as_nvidia_ran,
    nvidia_recipe,
    recomputed,
)
from planner.measurements.plans import assume_plan
from planner.measurements.points import Point
from planner.schema import Strategy
from planner.schema.cluster import DeviceType

__all__ = ["Case", "prepare", "prepare_all", "recipe_under"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured run: a row with its pricing context and strategy.

    Attributes:
        point: The row.
        setting: Model, machines, dtypes, the framework's recipe before any fit.
        strategy: Strategy, as far as it is known.
        framework: Name of the framework.
        why: Contradictions and assumptions, in words.
        contradictions: Columns of the row that contradict each other.
        activation_share: Activations over those of ``strategy``, whose schedule is not
            quite the run's.
    """

    point: Point
    setting: PricingContext
    strategy: Strategy
    framework: str
    why: tuple[str, ...]
    contradictions: tuple[str, ...] = ()
    activation_share: float = 1.0

    @property
    def device(self) -> DeviceType:
        """Slowest device type of the machines."""
        return self.setting.slowest_device

    @cached_property
    def measured_step_s(self) -> float | None:
        """Measured figure as seconds of a step; None for memory."""
        if time_metric_named(self.point.metric) is None or self.point.value <= 0:
            return None
        return step_seconds(
            self.point.value,
            self.point,
            self.setting.graph,
            self.strategy,
            self.device,
        )

    def _model(self, calibration: Calibration) -> CostModel:
        recipe = recipe_under(calibration, self.framework, self.setting.recipe)
        return CostModel(self.setting.recalibrated(calibration, recipe))

    def cost(self, calibration: Calibration) -> Cost:
        """Return time and memory under fitted constants."""
        cost = self._model(calibration).cost(self.strategy, "analytic")
        activations = cost.memory.activations * self.activation_share
        return replace(cost, memory=replace(cost.memory, activations=activations))

    def breakdown(self, calibration: Calibration) -> dict[str, float]:
        """Return the seconds of the step by part."""
        return self._model(calibration).breakdown(self.strategy, "analytic")

    def step_s(self, calibration: Calibration) -> float:
        """Return the seconds of the step: all that a fit asks for."""
        return sum(self.breakdown(calibration).values())


def recipe_under(calibration: Calibration, name: str, facts: Recipe) -> Recipe:
    """Return a framework's facts with fitted constants; what a run fixed stays."""
    fitted = calibration.recipes.get(name)
    if fitted is None:
        return facts
    of_framework = frameworks()[name].recipe
    values = {
        field: getattr(fitted, field)
        for field in (constant.name for constant in fitted_constants("recipe"))
        if getattr(facts, field) == getattr(of_framework, field)
    }
    return replace(facts, **values)


_ADAPTERS = re.compile(r"\b(q?lora|peft)\b", re.IGNORECASE)


def _adapters(point: Point) -> tuple[bool, str]:
    """Say if a row trains adapters of frozen weights, and what is assumed of them.

    Raises:
        CalibrationError: If the frozen weights are kept in four bits.
    """
    found = _ADAPTERS.search(f"{point.model} {point.notes}".replace("_", " "))
    if found is None:
        return False, ""
    if found[0].lower() == "qlora":
        raise CalibrationError(
            f"point {point.point_id}: {found[0]} keeps weights in 4 bits, which is not "
            "priced; leave the row out"
        )
    return True, f"{found[0]}: weights are frozen; the adapters are not priced"


def prepare(point: Point) -> Case:
    """Return the case of a row.

    Raises:
        MeshwrightError: If the row states too little, or contradicts itself.
    """
    read, (point, stated) = point, known_plan(point)
    name, doubt = framework_of(point)
    shape = shape_of(point)
    machine = machine_of(point)
    known = nvidia_recipe(point, machine.device, name)
    if known is not None and not point.recompute:
        point = replace(point, recompute=recomputed(known[0]))
    frozen, adapted = _adapters(point)
    graph = graph_of(shape, frozen=frozen)
    try:
        plan = assume_plan(point, graph, frameworks()[name])
    except ValidationError as error:
        reasons = "; ".join(one["msg"] for one in error.errors())
        raise CalibrationError(f"point {point.point_id}: {reasons}") from error
    recipe, as_set = plan.recipe, ""
    if known is not None:
        hosts = -(-(point.ep or 1) // machine.domain)
        recipe = as_nvidia_ran(
            recipe, known[0], hosts=hosts, chosen=shape.experts_per_token
        )
        as_set = known[1]
    counted = ""
    metric = time_metric_named(point.metric)
    if metric is not None and metric.counts in ("flops", "peak"):
        counted = convention_of(point)[1]
    setting = PricingContext(
        graph=graph,
        cluster=machine.cluster,
        order=np.arange(machine.cluster.num_devices),
        precision=plan.precision,
        recipe=recipe,
        optimizer=optimizer_of(point),
        memory_fraction=frameworks()[name].memory_share,
        product_dtype=plan.product_dtype,
    )
    doubts = contradictions(
        read,
        Priced(
            graph=graph,
            shape=shape,
            strategy=plan.strategy,
            compute=plan.precision.compute,
            device=setting.slowest_device,
        ),
    )
    share = _activation_share(point, plan.strategy)
    instead = f"{share:.2f} times the activations of {plan.strategy.schedule}"
    more = instead if share != 1 else ""
    assumed = (*stated, *shape.assumed, *machine.assumed, *plan.why)
    why = (*doubts, doubt, adapted, *assumed, as_set, counted)
    return Case(
        point=point,
        setting=setting,
        strategy=plan.strategy,
        framework=name,
        why=tuple(part for part in (*why, more) if part),
        contradictions=doubts,
        activation_share=share,
    )


def _activation_share(point: Point, strategy: Strategy) -> float:
    """Return the activations of a schedule that no plan has, over its substitute's.

    Times of such schedules are taken to be those of the substitute. Of ZB-H1 a rank
    holds pp microbatches, whole or waiting for weight gradients, of ZB-H2 and ZB-2p
    2 pp - 1. Of ZB-V it holds pp, of V-Half (pp + 2) // 2 and of V-Min (pp + 4) // 3.
    Sources: Qi et al. 2023, Zero Bubble Pipeline Parallelism, 2401.10241, section 2.2;
    Qi et al. 2024, Pipeline Parallelism with Controllable Memory, 2405.15362, and its
    table beside the authors' playground.
    """
    pp, count = strategy.mesh.pp, strategy.num_microbatches
    text = point.schedule.lower()
    if pp == 1:
        return 1.0
    if re.search(r"zb-?(2p|h2)", text):
        own = 2 * pp - 1
    elif strategy.schedule == "ZBVZeroBubble" and re.search(r"\bv-?half", text):
        own = (pp + 2) // 2
    elif strategy.schedule == "ZBVZeroBubble" and re.search(r"\bv-?min", text):
        own = (pp + 4) // 3
    else:
        return 1.0
    return min(own, count) / min(pp, count)


def prepare_all(
    points: Iterable[Point], watch: Callable[[int], None] | None = None
) -> tuple[dict[int, Case], dict[int, str]]:
    """Return the cases of many rows.

    Args:
        points: In any order.
        watch: Called with the number of rows that are done.
    Returns:
        By place in ``points``: the cases, and the reasons why there is none.
    """
    cases: dict[int, Case] = {}
    failed: dict[int, str] = {}
    for place, point in enumerate(points):
        try:
            cases[place] = prepare(point)
        except MeshwrightError as error:
            failed[place] = str(error)
        if watch is not None:
            watch(place + 1)
    return cases, failed
