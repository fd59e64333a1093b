"""From a search's answer to a Plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.cost import Cost, CostModel, PricingContext
from planner.cost.evidence import interval_of
from planner.cost.kernels.low_precision import peak_flops_per_s
from planner.graph import ModelGraph
from planner.measurements.convergence import efficiency_of
from planner.schema import (
    Contender,
    InputSpec,
    ModelReference,
    Plan,
    Prediction,
    Provenance,
    Recompute,
    StageMemory,
    Strategy,
    Workload,
)
from planner.schema.base import fingerprint_parameters
from planner.schema.describe import PART_NAMES
from planner.schema.plan_parts import AssumedKernels, Efficiency, OtherRegime
from planner.schema.violations import executor_violations
from planner.search import Candidate, Objective, Request, SearchResult
from planner.search.families import simplest
from planner.search.runners_up import runners_up
from planner.space import Pin, StrategyTable
from planner.units import format_bytes

__all__ = ["make_plan", "model_reference", "workload"]

#: A part of the step that is named beside the largest.
_LARGE_SHARE = 0.2


def model_reference(graph: ModelGraph) -> ModelReference:
    """Name the model as a plan does: how it is recognised, and what it rules out."""
    whole_stream = graph.whole_stream
    if not any(style != "experts" for style in graph.sharding.values()):
        whole_stream = "tp splits none of the model's layers"
    return ModelReference(
        experts=graph.num_experts,
        name=graph.name,
        ref=graph.ref,
        parameters=graph.num_parameters,
        tensors=len(graph.parameters),
        fingerprint=fingerprint_parameters((p.name, p.shape) for p in graph.parameters),
        tied=tuple((p.name, *p.aliases) for p in graph.parameters if p.aliases),
        attention=graph.attention,
        whole_stream=whole_stream,
        mixing=graph.mixing,
        batch_norm_values=graph.batch_norm_values,
        spatial_sizes=graph.spatial_sizes,
    )


def workload(graph: ModelGraph, global_batch: int) -> Workload:
    """Describe what one step trains on."""
    loss = str(graph.config.get("loss", "cross_entropy"))
    return Workload(
        global_batch=global_batch,
        seq_len=graph.seq_len,
        inputs=tuple(
            InputSpec(
                name=name,
                shape=shape[1:],
                dtype=dtype,
                high=high,
                rows=_rows(shape, graph.batch),
                values=graph.values.get(name, ()),
            )
            for name, shape, dtype, high in graph.inputs
        ),
        loss=loss,  # type: ignore[arg-type]
        own_loss=graph.config.get("own_loss"),  # type: ignore[arg-type]
        ignore_index=int(graph.config.get("ignore_index", -100)),
        label_shift=int(graph.config.get("label_shift", 1)),  # type: ignore[arg-type]
    )


def _rows(shape: tuple[int, ...], batch: int) -> int:
    """Rows of dim 0 that a sample fills: 1, too, where they are shared out unevenly."""
    return shape[0] // batch if shape and shape[0] and shape[0] % batch == 0 else 1


def _stage_memory(request: Request, cost: Cost) -> tuple[StageMemory, ...]:
    types = request.context.cluster.device_types
    memory, types_of = cost.memory, cost.device_type
    return tuple(
        StageMemory(
            rank=rank,
            device_type=types[int(kind)].name,
            parameters_bytes=float(memory.parameters[rank]),
            gradients_bytes=float(memory.gradients[rank]),
            optimizer_bytes=float(memory.optimizer[rank]),
            activations_bytes=float(memory.activations[rank]),
            buffers_bytes=float(memory.buffers[rank]),
            reserve_bytes=float(memory.reserve[rank]),
            limit_bytes=float(cost.limit_bytes[rank]),
            offloaded_bytes=float(
                np.broadcast_to(cost.host_bytes, len(types_of))[rank]
            ),
        )
        for rank, kind in enumerate(cost.device_type)
    )


def _host_memory(request: Request, candidate: Candidate) -> dict[str, Any]:
    """CPU memory that the fullest host needs while a checkpoint is written, and has.

    A checkpoint of what lies there already takes as much once more.
    """
    memory, strategy = candidate.cost.memory, candidate.strategy
    states = np.asarray(memory.parameters) + np.asarray(memory.optimizer)
    lasting = 2 if strategy.offload.states != "none" else 1
    states = states + lasting * candidate.cost.host_bytes
    states += strategy.synchronisation.offloaded_copies * np.asarray(memory.parameters)
    ids = np.asarray(strategy.device_ids())
    cluster = request.context.cluster
    hosts = np.asarray(cluster.host_of_device)[ids]
    needed = np.bincount(hosts, weights=np.repeat(states, len(ids) // len(states)))
    groups = cluster.document.hosts
    there = np.repeat(
        [group.memory_bytes or np.inf for group in groups],
        [group.count for group in groups],
    )[: len(needed)]
    fullest = int(
        (needed / there).argmax() if np.isfinite(there).any() else needed.argmax()
    )
    return {
        "host_memory_bytes": float(needed[fullest]),
        "host_memory_limit_bytes": (
            float(there[fullest]) if np.isfinite(there[fullest]) else None
        ),
    }


def _prediction(request: Request, candidate: Candidate) -> Prediction:
    graph, cost = request.context.graph, candidate.cost
    step = cost.step_time_s
    per_sample = (graph.forward_flops + graph.backward_flops) / graph.batch
    used = [int(d) for d in candidate.strategy.device_ids()]
    types = request.context.cluster.type_index
    devices = request.context.cluster.device_types
    rates = [peak_flops_per_s(d, request.context.precision.compute) for d in devices]
    peak = sum(rates[int(types[device])] for device in used)
    return Prediction(
        step_time_s=step,
        breakdown_s={part: max(0.0, s) for part, s in cost.breakdown_s.items()},
        memory=_stage_memory(request, cost),
        link_bytes=cost.link_bytes,
        collective_bytes=cost.collective_bytes,
        samples_per_s=request.global_batch / step,
        tokens_per_s=(
            request.global_batch * graph.seq_len / step if graph.seq_len else None
        ),
        model_flops_utilization=per_sample * request.global_batch / step / peak,
        **_certainty(request.context, candidate),
        efficiency=_efficiency(request, candidate),
        **_host_memory(request, candidate),
        fidelity=cost.fidelity,
        calibration=request.context.cluster.document.calibration,
    )


def _certainty(context: PricingContext, candidate: Candidate) -> dict[str, Any]:
    """Interval of the step time, and what widens it: fields of a prediction."""
    if context.risk is None:
        return {}
    evidence, name = context.risk.evidence, context.recipe.name
    row = StrategyTable.from_strategies([candidate.strategy])
    spread = float(evidence.spread(name, row, context.place)[0])
    told = [
        f"{one.mechanism}: {_LEVELS[one.level]}, ± {_half_width(one.spread):.0%}"
        for one, mask in evidence.findings(name, row, context.place)
        if mask[0]
    ]
    if name not in evidence.recipes:
        told.insert(0, f"recipe {name}: {_LEVELS['none']}")
    interval = interval_of(candidate.cost.step_time_s, spread)
    return {"step_time_interval_s": interval, "leans_on": tuple(told)}


def _efficiency(request: Request, candidate: Candidate) -> Efficiency | None:
    """Evidence for inexact steps; the request's own where that made the choice."""
    given = request.context.regime.efficiency
    found = efficiency_of(candidate.strategy)
    if given is None or (found is not None and found.eta == given):
        return found
    return Efficiency(
        eta=given, gap=0.0, measure="loss", basis="own", source="the request"
    )


def _half_width(spread: float) -> float:
    """Share by which the upper end of an interval lies above its middle."""
    return interval_of(1.0, spread)[1] - 1


#: How well a mechanism is known, in words.
_LEVELS = {
    "elsewhere": "measured under other recipes alone",
    "none": "no measured run",
}


def _bound_by(request: Request, candidate: Candidate) -> str:
    """Name the largest part of the step, and whether memory stood in the way."""
    cost = candidate.cost
    parts = sorted(cost.breakdown_s.items(), key=lambda item: -item[1])
    shares = [(PART_NAMES.get(part, part), s / cost.step_time_s) for part, s in parts]
    (first, most), *rest = shares
    text = f"{first} ({most:.0%} of the step)"
    more = [f"{name} ({share:.0%})" for name, share in rest if share >= _LARGE_SHARE]
    if more:
        text += ", then " + " and ".join(more)
    lack = _lack_without_recompute(request, candidate)
    if lack > 0:
        text += f"; with less recomputation memory is {format_bytes(lack)} short"
    return text


_LESS_RECOMPUTE: dict[Recompute, Recompute] = {
    "full": "selective",
    "selective": "none",
    "none": "none",
}


def _lack_without_recompute(request: Request, candidate: Candidate) -> float:
    """Bytes that the fullest device would lack if every stage recomputed less."""
    strategy = candidate.strategy
    kinds = {stage.recompute for stage in strategy.stages}
    if kinds <= {"none"} or "recompute" in request.pins:
        return 0.0
    stages = tuple(
        stage.model_copy(update={"recompute": _LESS_RECOMPUTE[stage.recompute]})
        for stage in strategy.stages
    )
    order = np.array(strategy.device_ids(), dtype=np.int64)
    cost = CostModel(replace(request.context, order=order)).cost(
        strategy.model_copy(update={"stages": stages})
    )
    return cost.lack_bytes


def _assumed_kernels(request: Request, candidate: Candidate) -> AssumedKernels | None:
    """Return the fused kernels that were priced, and the price without them."""
    context = request.context
    if context.graph.fused is None:
        return None
    found = AssumedKernels(modules=dict(context.graph.fused))
    captured = context.graph.captured
    if captured is None or context.regime.synchronisation.of_neurons:
        return found
    order = np.array(candidate.strategy.device_ids(), dtype=np.int64)
    plain = replace(context, graph=captured, order=order, shared=None)
    cost = CostModel(plain).cost(candidate.strategy)
    return found.model_copy(
        update={
            "captured_step_time_s": cost.step_time_s,
            "captured_lack_bytes": max(0.0, float(cost.lack_bytes)),
        }
    )


def _contender(result: SearchResult, objective: Objective) -> Contender:
    found = result.candidates
    best = simplest(found, objective) if found else None
    return Contender(
        partitioner=result.partitioner,
        step_time_s=best.cost.step_time_s if best else None,
        label=best.strategy.label() if best else None,
        evaluations=dict(result.evaluations),
        checkpoint=result.checkpoint,
        share=result.share,
        best_after=result.best_after,
    )


def _asked(request: Request) -> dict[str, Any]:
    """Fields of a provenance: what was asked, and what it was priced by."""
    context = request.context
    return {
        "target": request.target,
        "objective": request.objective,
        "seed": request.seed,
        "evaluation_budget": request.evaluation_budget,
        "time_budget_s": request.time_budget_s,
        "memory_fraction": context.memory_fraction,
        "risk": None if context.risk is None else context.risk.quantile,
        "recipe": context.recipe.name,
        "assumptions": context.graph.assumptions,
        "calibration": (
            None if context.calibration is None else context.calibration.name
        ),
    }


def _not_runnable(
    request: Request, strategy: Strategy, reference: ModelReference
) -> tuple[str, ...]:
    """List what the executors cannot run on the devices that a strategy uses."""
    cluster = request.context.cluster
    used = {int(cluster.type_index[device]) for device in strategy.device_ids()}
    gloo = any(cluster.device_types[kind].backend == "gloo" for kind in used)
    return executor_violations(
        strategy,
        tied=reference.tied,
        backend="gloo" if gloo else "nccl",
        attention=reference.attention,
        whole_stream=reference.whole_stream,
        mixing=reference.mixing,
        batch_norm_values=reference.batch_norm_values,
        spatial_sizes=reference.spatial_sizes,
        experts=reference.experts,
    )


def make_plan(
    request: Request,
    *,
    results: Sequence[SearchResult],
    winner: SearchResult,
    candidate: Candidate,
    pinned: Mapping[str, Pin],
    version: str,
    timing_s: Mapping[str, float],
    regimes: tuple[OtherRegime, ...] = (),
) -> Plan:
    """Put a Plan together.

    Args:
        request: What was asked.
        results: Answers of all partitioners that were asked.
        winner: The one whose candidate was chosen.
        candidate: The chosen strategy and its price.
        pinned: Knobs that were fixed, from :func:`planner.space.read_pins`.
        version: Of Meshwright.
        timing_s: Wall times, outside the canonical bytes.
        regimes: Ways of training that were considered beside this one.
    """
    graph = request.context.graph
    reference = model_reference(graph)
    return Plan(
        model=reference,
        cluster=request.context.cluster.reference(),
        workload=workload(graph, request.global_batch),
        strategy=candidate.strategy,
        prediction=_prediction(request, candidate),
        provenance=Provenance(
            **_asked(request),
            meshwright_version=version,
            partitioner=winner.partitioner,
            contenders=tuple(_contender(one, request.objective) for one in results),
            evaluations={
                kind: sum(result.evaluations.get(kind, 0) for result in results)
                for kind in ("analytic", "simulated")
            },
            pinned=dict(pinned),
            alternatives=runners_up(request, results, candidate),
            regimes=regimes,
            bound_by=_bound_by(request, candidate),
            checkpoint=winner.checkpoint,
            kernels=_assumed_kernels(request, candidate),
        ),
        not_runnable=_not_runnable(request, candidate.strategy, reference),
        timing_s=dict(timing_s),
    )
