"""The small twin of a plan: the same axes at degree 2, on a small model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torch import nn

from planner.errors import ExecutionError
from planner.schema import (
    Communication,
    InputSpec,
    Mesh,
    Optimizer,
    Plan,
    Precision,
    Stage,
    Strategy,
    Workload,
)
from planner.schema.methods import slots
from planner.schema.strategy_parts import matches_pattern

__all__ = ["SMALL_LENGTH", "small_plan"]

#: Tokens of a sample.
SMALL_LENGTH = 16
#: Most ranks of a twin: copies, which no split depends on, are left out first.
_MOST_RANKS = 8
_LEARNING_RATE = 1e-2
#: Most values of a sample that a twin is trained on.
_MOST_VALUES = 2**21


def small_plan(
    plan: Plan,
    model: nn.Module,
    *,
    high: int | None = None,
    side: int | None = None,
) -> Plan:
    """Return a plan for a small model that splits it as a plan splits the large one.

    Axes have degree 2 or 1, pipelines two virtual stages a rank at most; optimizer and
    precision are those in which differences show: plain gradient descent in float32.

    Args:
        plan: For the large model.
        model: The small one; its modules have the names of the large one's.
        high: Bound of synthetic integers; None to keep the plan's.
        side: Values along each spatial dimension of a sample; None to keep the plan's.

    Raises:
        ExecutionError: If the model lacks a kind of module that the plan splits, or
            samples are too large to train on.
    """
    plan = _small_samples(plan, side)
    strategy = plan.strategy
    mesh = _small_mesh(strategy.mesh)
    virtual = min(strategy.virtual_stages, 2) if mesh.pp > 1 else 1
    stages = mesh.pp * virtual
    units = _units(plan, model, stages)
    size = min(strategy.microbatch_size, 2)
    coupled = plan.workload.own_loss == "coupled" or plan.model.batch_norm_values
    whole = bool(coupled) and strategy.num_microbatches == 1
    count = _microbatches(strategy, mesh.pp, virtual, whole=whole)
    old = strategy.stages
    bounds = [round(len(units) * i / stages) for i in range(stages + 1)]
    shell = Strategy(
        mesh=mesh,
        schedule=strategy.schedule if mesh.pp > 1 else "GPipe",
        virtual_stages=virtual,
    )
    small = strategy.model_copy(
        update={
            "mesh": mesh,
            "schedule": shell.schedule,
            "virtual_stages": virtual,
            "microbatch_size": size,
            "num_microbatches": count,
            "stages": tuple(
                Stage(
                    rank=shell.rank_of_stage(index),
                    modules=tuple(units[bounds[index] : bounds[index + 1]]),
                    recompute=old[index * len(old) // stages].recompute,
                )
                for index in range(stages if old else 0)
            ),
            "precision": Precision(compute="float32"),
            "optimizer": Optimizer(name="SGD", learning_rate=_LEARNING_RATE),
            **{slot: getattr(Strategy(), slot) for slot in slots()},
            "communication": strategy.communication
            if mesh.pp > 1 and mesh.tp > 1
            else Communication(),
            "spatial": (mesh.cp,) if strategy.spatial else (),
            "grad_clip_norm": None,
            "compile": False,
            "device_ranges": (),
        }
    )
    # The twin runs the small model's own code, whatever kernels the plan assumes.
    provenance = plan.provenance.model_copy(update={"kernels": None})
    return plan.model_copy(
        update={
            "provenance": provenance,
            "strategy": small,
            "workload": _workload(
                plan.workload, size * count * mesh.data_parallel, high
            ),
        }
    )


def _small_samples(plan: Plan, side: int | None) -> Plan:
    """Return the plan for samples of another size.

    Raises:
        ExecutionError: If samples stay too large.
    """
    sizes = plan.model.spatial_sizes
    made = (side,) * len(sizes) if side is not None else sizes

    def shape(found: tuple[int, ...]) -> tuple[int, ...]:
        at = len(found) - len(sizes)
        same = sizes and at >= 0 and found[at:] == sizes
        return (*found[:at], *made) if same else found

    inputs = tuple(
        spec.model_copy(update={"shape": shape(spec.shape)})
        for spec in plan.workload.inputs
    )
    largest = max((math.prod(spec.shape) for spec in inputs), default=0)
    if largest > _MOST_VALUES:
        raise ExecutionError(
            f"samples of {largest:,} values are too large to train a small model on"
        )
    model = plan.model.model_copy(update={"spatial_sizes": made})
    workload = plan.workload.model_copy(update={"inputs": inputs})
    return plan.model_copy(update={"model": model, "workload": workload})


def _small_mesh(mesh: Mesh) -> Mesh:
    degrees = {axis: min(degree, 2) for axis, degree in mesh.model_dump().items()}
    for axis in ("dp_replicate", "dp_shard"):
        small = Mesh(**degrees)
        if small.num_devices <= _MOST_RANKS:
            return small
        if axis != "dp_shard" or mesh.ep == 1 or degrees["cp"] > 1:
            degrees[axis] = 1
    return Mesh(**degrees)


def _units(plan: Plan, model: nn.Module, stages: int) -> list[str]:
    """Units of the plan that the small model has, of every kind.

    Raises:
        ExecutionError: If it lacks a kind, or has too few for the stages.
    """
    known = {name for name, _ in model.named_modules()}
    names = known | {name for name, _ in model.named_parameters()}
    named = [name for stage in plan.strategy.stages for name in stage.modules]
    units = [name for name in named if name in known]
    missing = _kinds(named) - _kinds(units)
    missing |= {
        pattern
        for pattern in plan.strategy.sharding.patterns
        if not any(matches_pattern(pattern, name) for name in names)
    }
    if missing:
        raise ExecutionError(
            f"the small model has no {sorted(missing)[0]}, which the plan names"
        )
    if named and len(units) < stages:
        raise ExecutionError(
            f"the small model has {len(units)} units, its pipeline {stages} stages"
        )
    return units


def _kinds(names: Sequence[str]) -> set[str]:
    """Return names without their numbers."""
    return {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}


def _microbatches(
    strategy: Strategy, pp: int, virtual: int, *, whole: bool = False
) -> int:
    """Return how many microbatches a twin has; one if its batch is not divided."""
    if pp == 1:
        return min(strategy.num_microbatches, 2)
    spec = strategy.schedule_spec
    if whole and spec.violation(pp, virtual, 1) is None:
        return 1
    return next(
        (n for n in (2 * pp, 4 * pp, 2, 1) if spec.violation(pp, virtual, n) is None),
        2 * pp,
    )


def _workload(workload: Workload, samples: int, high: int | None) -> Workload:
    length = workload.seq_len
    short = None if length is None else min(length, SMALL_LENGTH)

    def shape(spec: InputSpec) -> tuple[int, ...]:
        return tuple(short if short and n == length else n for n in spec.shape)

    inputs = tuple(
        spec.model_copy(
            update={
                "shape": shape(spec),
                # The twin computes in float32, whatever the plan does.
                "dtype": re.sub("^b?float[0-9]+$", "float32", spec.dtype),
                "high": min(spec.high, high) if spec.high and high else spec.high,
            }
        )
        for spec in workload.inputs
    )
    return workload.model_copy(
        update={"global_batch": samples, "seq_len": short, "inputs": inputs}
    )
