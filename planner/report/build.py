"""From a plan to all that its report shows."""

from __future__ import annotations

import numpy as np

from planner.cluster import Cluster
from planner.cost import CostModel, StepTimeline
from planner.errors import MeshwrightError, PlanFileError
from planner.graph import ModelGraph
from planner.measurements.store import CalibrationChoice
from planner.report.data import (
    DeviceGrid,
    MeasuredData,
    ReportData,
)
from planner.report.measured import compare
from planner.report.pareto import pareto_points
from planner.report.source import read_source
from planner.report.timeline import TimelineData, stage_facts, timeline_rows
from planner.schema import AXES, Plan
from planner.schema.measurement import Measurement
from planner.units import format_seconds

__all__ = ["build_report"]

#: By how much the step drawn may differ from the step predicted, as a share.
_EQUAL = 1e-6
_NO_RUN = (
    "No run's measurement was given; make one with meshwright run PLAN --measurement "
    "FILE and name it with --measurement FILE."
)


def build_report(
    plan: Plan,
    *,
    model: ModelGraph | str | None = None,
    cluster: Cluster | str | None = None,
    calibration: CalibrationChoice = None,
    measurement: Measurement | None = None,
) -> ReportData:
    """All sections of a plan's report.

    Model and cluster are read again from where the plan says, unless that means to
    import code; the sections that need them are left out if that fails.

    Args:
        plan: The plan to report on.
        model: Instead of what the plan says; ``module:factory`` is followed here.
        cluster: Instead of what the plan says.
        calibration: Constants that priced the plan, if not the shipped ones.
        measurement: Measurement of a run of the plan.

    Raises:
        PlanFileError: If ``model``, ``cluster`` or ``measurement`` are not the plan's.
        MeshwrightError: If ``model``, ``cluster`` or ``calibration`` cannot be read.
    """
    source = read_source(plan, model=model, cluster=cluster, calibration=calibration)
    missing = {} if measurement is not None else {"measured": _NO_RUN}
    step, why = _step(plan, source.pricing, source.problem)
    if why:
        missing["timeline"] = why
    if source.pricing is None:
        missing["pareto"] = source.problem
    timeline = None if step is None else _timeline(plan, step)
    return ReportData(
        plan=plan,
        grid=_grid(plan, source.cluster),
        stages=stage_facts(plan, step),
        timeline=timeline,
        pareto=pareto_points(plan, source.pricing),
        measured=None if measurement is None else _measured(plan, measurement),
        missing=missing,
    )


def _step(
    plan: Plan, pricing: CostModel | None, problem: str
) -> tuple[StepTimeline | None, str]:
    """The step, timed again, or why it cannot be."""
    if pricing is None:
        return None, problem
    if not plan.strategy.stages:
        return None, "The plan's strategy lists no stages, so that it cannot be timed."
    try:
        return pricing.timeline(plan.strategy), ""
    except MeshwrightError as error:
        return None, f"The plan's strategy cannot be timed again: {error}."


def _timeline(plan: Plan, step: StepTimeline) -> TimelineData:
    now, then = step.step_time_s, plan.prediction.step_time_s
    caveat = ""
    if abs(now - then) > _EQUAL * then:
        cause = (
            "the plan was priced by closed forms, and this is the simulator's order"
            if plan.prediction.fidelity == "analytic"
            else "the plan was made by another version, or for another framework"
        )
        caveat = (
            f"It ends after {format_seconds(now)}, the plan says "
            f"{format_seconds(then)}: {cause}."
        )
    return TimelineData(step_time_s=now, rows=timeline_rows(plan, step), caveat=caveat)


def _grid(plan: Plan, cluster: Cluster | None) -> DeviceGrid:
    mesh, ids = plan.strategy.mesh, np.array(plan.strategy.device_ids())
    count = plan.cluster.num_devices
    rank = np.full(count, -1, dtype=np.int64)
    rank[ids] = np.arange(len(ids))
    types, names = _device_types(plan, cluster, rank)
    if plan.cluster.hosts:
        sizes = [size for many, size in plan.cluster.hosts for _ in range(many)]
        host = np.repeat(np.arange(len(sizes)), sizes)
    elif cluster is not None:
        host = np.asarray(cluster.host_of_device)
    else:
        host = np.zeros(count, dtype=np.int64)
    return DeviceGrid(
        degrees=dict(zip(AXES, mesh.degrees, strict=True)),
        ep=mesh.ep,
        rank=rank,
        host=host.astype(np.int64),
        device_type=types,
        device_types=names,
    )


def _device_types(
    plan: Plan,
    cluster: Cluster | None,
    rank: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], tuple[str, ...]]:
    """Type of each device, and their names; by pp rank without the cluster."""
    if cluster is not None:
        names = tuple(kind.name for kind in cluster.device_types)
        return np.asarray(cluster.type_index).astype(np.int64), names
    names = tuple(plan.cluster.device_types)
    if len(names) == 1:
        return np.zeros(len(rank), dtype=np.int64), names
    known = {name: index for index, name in enumerate(names)}
    of_rank = np.array([known.get(m.device_type, -1) for m in plan.prediction.memory])
    stage = np.maximum(rank, 0) // plan.strategy.mesh.stride("pp")
    return np.where(rank >= 0, of_rank[stage], -1).astype(np.int64), names


def _measured(plan: Plan, run: Measurement) -> MeasuredData:
    """A run beside the prediction.

    Raises:
        PlanFileError: If it is of another model or of another number of ranks.
    """
    ranks, devices = len(run.peak_memory_bytes), plan.strategy.mesh.num_devices
    if run.model_fingerprint != plan.model.fingerprint:
        raise PlanFileError(
            f"the measurement is of {run.model_name}, the plan of {plan.model.name}: "
            f"give a measurement of a run of this plan"
        )
    if ranks != devices:
        raise PlanFileError(
            f"the measurement is of {ranks} ranks ({run.plan_label}), the plan of "
            f"{devices}: give a measurement of a run of this plan"
        )
    label = plan.strategy.label()
    caveat = "" if run.plan_label == label else f"The run was of {run.plan_label}."
    return MeasuredData(
        rows=tuple(compare(plan, run.to_data())),
        step_times_s=run.step_times_s,
        warm_up_steps=run.warm_up_steps,
        environment=run.environment,
        caveat=caveat,
    )
