"""Plan the same work again within the limits of a launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from planner.api import plan_graph, read_model
from planner.assemble import model_reference
from planner.cluster import Cluster
from planner.errors import FingerprintError, NoFeasiblePlanError, PlanFileError
from planner.graph import ModelGraph
from planner.measurements.store import CalibrationChoice
from planner.request import DEFAULT_RISK, PlanOptions, make_request
from planner.schema import Plan
from planner.search import Objective, partitioner_names
from planner.search.orders import device_orders
from planner.space import Pin, enumerate_strategies
from planner.targets import get_target
from planner.units import format_seconds

__all__ = ["Replanned", "replan_within"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """Another plan for the same work.

    Attributes:
        before: The plan that a target could not say.
        plan: The best that it can.
        dropped: Pins of the first one that the target does not allow.
        changes: Where the strategies differ, ``strategy.mesh.pp: 4 -> 1``.
    """

    before: Plan
    plan: Plan
    dropped: tuple[str, ...]
    changes: tuple[str, ...]

    @property
    def slowdown(self) -> float:
        """Step time after by step time before."""
        return self.plan.prediction.step_time_s / self.before.prediction.step_time_s

    def text(self) -> str:
        """Describe what changed and what it costs."""
        before, after = (one.prediction.step_time_s for one in (self.before, self.plan))
        lines = [
            f"planned again: {self.before.strategy.label()} -> "
            f"{self.plan.strategy.label()}",
            f"step: {format_seconds(before)} -> {format_seconds(after)} "
            f"({100 * (self.slowdown - 1):+.1f}%)",
        ]
        lines += [f"pin left out: {pin}" for pin in self.dropped]
        return "\n".join([*lines, *(f"  {change}" for change in self.changes)])


def replan_within(
    plan: Plan,
    target: str,
    *,
    model: ModelGraph | str | None = None,
    cluster: Cluster | str | None = None,
    calibration: CalibrationChoice = "shipped",
) -> Replanned:
    """Plan the same work again within a launcher's limits.

    Batch, sequence length, precision, optimizer, clipping, objective, seed and budgets
    are the plan's; its pins as far as the target allows them.

    Args:
        plan: Any.
        target: A launcher, of :func:`planner.targets.target_names`.
        model: Where to build the model from, if not from where the plan says.
        cluster: The machines, if not those that the plan names.
        calibration: As for :func:`planner.plan`.
    Raises:
        FingerprintError: If what the plan names is now another model or cluster.
        NoFeasiblePlanError: If no plan that fits can be expressed.
        PlanFileError: If the plan does not say which model or cluster it is for.
        UnknownNameError: If there is no such target.
    """
    get_target(target)
    strategy, work, asked = plan.strategy, plan.workload, plan.provenance
    machines = _machines(plan, cluster)
    graph = _graph(plan, model)
    options = PlanOptions(
        global_batch=work.global_batch,
        objective=cast(Objective, asked.objective),
        target=target,
        precision=strategy.precision,
        optimizer=strategy.optimizer,
        grad_clip_norm=strategy.grad_clip_norm,
        calibration=calibration if asked.calibration is not None else None,
        memory_fraction=asked.memory_fraction,
        risk=asked.risk if asked.risk is not None else DEFAULT_RISK,
        evaluation_budget=asked.evaluation_budget,
        time_budget_s=asked.time_budget_s,
        seed=asked.seed,
        kernels="as-is" if asked.kernels is None else "fused",
    )
    options = _keep_legal_pins(graph, machines, options, asked.pinned)
    names = [one.partitioner for one in asked.contenders]
    known = [name for name in names if name in partitioner_names()]
    made = plan_graph(graph, machines, options, partitioner=known or "auto")
    return Replanned(
        before=plan,
        plan=made,
        dropped=tuple(
            f"{k}={v}" for k, v in asked.pinned.items() if k not in options.pin
        ),
        changes=tuple(line for line in plan.diff(made) if line.startswith("strategy.")),
    )


def _machines(plan: Plan, named: Cluster | str | None) -> Cluster:
    given = named if named is not None else plan.cluster.ref
    if given is None:
        raise PlanFileError(
            f"the plan does not say where its cluster {plan.cluster.name!r} comes "
            f"from; name it with --cluster (cluster=...)"
        )
    machines = Cluster.parse(given) if isinstance(given, str) else given
    if named is None and machines.fingerprint != plan.cluster.fingerprint:
        raise FingerprintError(
            f"{given} is not the cluster that the plan was made for "
            f"({machines.fingerprint} instead of {plan.cluster.fingerprint}); name the "
            f"one that you mean with --cluster (cluster=...)"
        )
    return machines


def _graph(plan: Plan, named: ModelGraph | str | None) -> ModelGraph:
    given = named if named is not None else plan.model.ref
    if given is None:
        raise PlanFileError(
            f"the plan does not say where its model {plan.model.name!r} comes from; "
            f"name it with --model (model=...)"
        )
    graph = read_model(
        given,
        None,
        seq_len=plan.workload.seq_len,
        dtype=plan.strategy.precision.activation_dtype,
        images_per_sample=plan.workload.images_per_sample,
    )
    fingerprint = model_reference(graph).fingerprint
    if named is None and fingerprint != plan.model.fingerprint:
        raise FingerprintError(
            f"{given} is not the model that the plan was made for ({fingerprint} "
            f"instead of {plan.model.fingerprint}); name the one that you mean with "
            f"--model (model=...)"
        )
    return graph


def _keep_legal_pins(
    graph: ModelGraph, machines: Cluster, options: PlanOptions, pins: Mapping[str, Pin]
) -> PlanOptions:
    """Pin one knob after the other, as long as any strategy is legal with it."""
    if not _any_legal(graph, machines, options):
        # Not even without pins; the search says why.
        return options
    for knob, value in pins.items():
        pinned = replace(options, pin={**options.pin, knob: value})
        if _any_legal(graph, machines, pinned):
            options = pinned
    return options


def _any_legal(graph: ModelGraph, machines: Cluster, options: PlanOptions) -> bool:
    try:
        request = make_request(graph, machines, options)
    except NoFeasiblePlanError:
        return False
    return any(
        next(
            enumerate_strategies(
                request.facts,
                num_devices=len(order),
                pins=request.pins,
                rows=50_000,
            ),
            None,
        )
        is not None
        for order in device_orders(request)
    )
