"""Pipelines of a Piper task, and the judge of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.errors import StrategyError
from planner.split.piper.stage import layers_of, stage_time
from planner.split.piper.task import PiperTask
from planner.split.task import Index, NodeId

__all__ = ["NO_PLAN", "PiperPlan", "PiperStage", "judged"]

_SLACK = 1e-9  # relative; sums are taken in any order


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperStage:
    """Layers that run together.

    Attributes:
        nodes: Their ids.
        data_parallel: Replicas.
        tensor_parallel: Devices of a replica.
        options: Name of the option by layer.
    """

    nodes: tuple[NodeId, ...]
    data_parallel: int
    tensor_parallel: int
    options: dict[NodeId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperPlan:
    """A pipeline.

    Attributes:
        time_per_sample: Of the slowest stage, in the task's unit; infinite if none was
            found, and then there are no stages.
        stages: From the first one on.
        exact: Whether it is known that no pipeline is faster whose options are
            chosen greedily; see :mod:`planner.split.piper.stage`.
        found_by: Name of the solver that made it.
        seconds: Taken; filled in by :func:`planner.split.solve_piper`.
    """

    time_per_sample: float
    stages: tuple[PiperStage, ...]
    exact: bool = False
    found_by: str = ""
    seconds: float = 0.0

    @property
    def devices(self) -> int:
        """Devices of all stages."""
        return sum(s.data_parallel * s.tensor_parallel for s in self.stages)


#: Where none was found.
NO_PLAN = PiperPlan(time_per_sample=np.inf, stages=())


def _wrong(task: PiperTask, what: str) -> StrategyError:
    return StrategyError(f"{task.name}: {what}; this is no pipeline of the task")


def _stage_of_each(task: PiperTask, stages: Sequence[PiperStage]) -> Index:
    """Stage of each layer. Shape [n]."""
    place = {node: at for at, node in enumerate(task.nodes)}
    stage_of = np.full(len(task), -1, dtype=np.int64)
    for k, stage in enumerate(stages):
        for node in stage.nodes:
            if node not in place or stage_of[place[node]] >= 0:
                raise _wrong(task, f"layer {node!r} is unknown or in two stages")
            stage_of[place[node]] = k
    if (stage_of < 0).any():
        left = task.nodes[int(np.flatnonzero(stage_of < 0)[0])]
        raise _wrong(task, f"layer {left!r} is in no stage")
    back = np.flatnonzero(stage_of[task.edge_source] > stage_of[task.edge_target])
    if len(back):
        ends = task.edge_source[back[0]], task.edge_target[back[0]]
        names = " to ".join(repr(task.nodes[int(end)]) for end in ends)
        raise _wrong(task, f"the edge {names} leads back to an earlier stage")
    return stage_of


def _check_degrees(task: PiperTask, stages: Sequence[PiperStage]) -> None:
    replicas = [stage.data_parallel for stage in stages]
    used = sum(stage.data_parallel * stage.tensor_parallel for stage in stages)
    if used > task.devices or sum(replicas) > task.microbatches:
        raise _wrong(
            task,
            f"{used} devices and {sum(replicas)} replicas are used, there are "
            f"{task.devices} devices and {task.microbatches} microbatches",
        )
    for stage in stages:
        d, t = stage.data_parallel, stage.tensor_parallel
        if d < 1 or task.microbatches % d or t not in task.degrees:
            raise _wrong(
                task,
                f"data_parallel={d} does not divide {task.microbatches} microbatches, "
                f"or tensor_parallel={t} is none of {task.degrees.tolist()}",
            )


def _narrowed(task: PiperTask, stages: Sequence[PiperStage]) -> PiperTask:
    """The task with the options that were chosen and no others."""
    place = {node: at for at, node in enumerate(task.nodes)}
    time = np.full_like(task.time, np.inf)
    for stage in stages:
        t = int(np.searchsorted(task.degrees, stage.tensor_parallel))
        for node in stage.nodes:
            v, name = place[node], stage.options.get(node)
            if name not in task.option_names[v][t]:
                raise _wrong(
                    task,
                    f"layer {node!r} has no option {name!r} of tensor-parallel degree "
                    f"{stage.tensor_parallel}",
                )
            o = task.option_names[v][t].index(str(name))
            time[v, t, o] = task.time[v, t, o]
    return replace(task, time=time)


def judged(task: PiperTask, plan: PiperPlan) -> PiperPlan:
    """The pipeline with the time that it takes.

    Args:
        task: What is planned.
        plan: A pipeline of it.

    Raises:
        StrategyError: If a layer is in no stage or two, an edge leads back, a degree or
            an option is none of the task's, or devices or memory do not suffice.
    """
    if not plan.stages:
        return replace(plan, time_per_sample=np.inf)
    stage_of = _stage_of_each(task, plan.stages)
    _check_degrees(task, plan.stages)
    narrow = _narrowed(task, plan.stages)
    roomy = replace(narrow, memory_bytes=task.memory_bytes * (1 + _SLACK))
    layers, left, slowest = layers_of(roomy), 0, 0.0
    cost, held = np.empty((2, len(task), task.time.shape[2]))
    for k in range(len(plan.stages) - 1, -1, -1):
        stage = plan.stages[k]
        t = int(np.searchsorted(task.degrees, stage.tensor_parallel))
        left += stage.data_parallel
        inside = (stage_of == k).astype(np.int8)
        took = stage_time(
            layers,
            inside,
            np.flatnonzero(inside),
            t,
            stage.data_parallel,
            -(-left // stage.data_parallel),
            cost,
            held,
            np.zeros(len(task), dtype=np.int64),
        )
        if np.isinf(took):
            raise _wrong(task, f"stage {k} does not fit into {task.memory_bytes} bytes")
        slowest = max(slowest, float(took))
    return replace(plan, time_per_sample=slowest)
