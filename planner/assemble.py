"""From a search's answer to a Plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.cost import Cost
from planner.graph import ModelGraph
from planner.schema import (
    Alternative,
    InputSpec,
    ModelReference,
    Plan,
    Prediction,
    Provenance,
    StageMemory,
    Workload,
)
from planner.schema.fingerprint import fingerprint_parameters
from planner.schema.support import unsupported
from planner.search import Candidate, Request, SearchResult
from planner.units import format_bytes

__all__ = ["make_plan", "model_reference", "workload"]

_ALTERNATIVES = 8


def model_reference(graph: ModelGraph) -> ModelReference:
    """How a plan names and recognises the model."""
    return ModelReference(
        name=graph.name,
        ref=graph.ref,
        parameters=graph.num_parameters,
        tensors=len(graph.parameters),
        fingerprint=fingerprint_parameters((p.name, p.shape) for p in graph.parameters),
        tied=tuple((p.name, *p.aliases) for p in graph.parameters if p.aliases),
    )


def workload(graph: ModelGraph, global_batch: int) -> Workload:
    """What one step trains on."""
    loss = str(graph.config.get("loss", "cross_entropy"))
    return Workload(
        global_batch=global_batch,
        seq_len=graph.seq_len,
        inputs=tuple(
            InputSpec(name=name, shape=shape[1:], dtype=dtype, high=high)
            for name, shape, dtype, high in graph.inputs
        ),
        loss=loss,  # type: ignore[arg-type]
    )


def _stage_memory(request: Request, cost: Cost) -> tuple[StageMemory, ...]:
    types = request.setting.cluster.device_types
    memory = cost.memory
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
        )
        for rank, kind in enumerate(cost.device_type)
    )


def _prediction(request: Request, candidate: Candidate) -> Prediction:
    graph, cost = request.setting.graph, candidate.cost
    step = cost.step_time_s
    per_sample = (graph.forward_flops + graph.backward_flops) / graph.batch
    used = [int(d) for d in candidate.strategy.device_ids()]
    types = request.setting.cluster.type_index
    devices = request.setting.cluster.device_types
    from planner.cost.compute import peak_flops_per_s

    rates = [peak_flops_per_s(d, request.setting.precision.compute) for d in devices]
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
        fidelity=cost.fidelity,
        calibration=request.setting.cluster.document.calibration,
    )


def _reason(other: Candidate, best: Candidate) -> str:
    slower = other.cost.step_time_s / best.cost.step_time_s - 1
    gains = {
        part: other.cost.breakdown_s[part] - best.cost.breakdown_s[part]
        for part in best.cost.breakdown_s
    }
    part, seconds = max(gains.items(), key=lambda item: item[1])
    if slower > 0:
        cause = f"{part.replace('_', ' ')} (+{seconds:.3g} s)"
        return f"{slower:.1%} slower, most of it {cause}"
    more = other.cost.peak_memory_bytes - best.cost.peak_memory_bytes
    sign = "-" if more < 0 else "+"
    speed = f"{-slower:.1%} faster" if slower < 0 else "as fast"
    devices = other.strategy.mesh.num_devices
    return f"{speed} on {devices} devices, memory {sign}{format_bytes(abs(more))}"


def _alternatives(
    results: Sequence[SearchResult], best: Candidate
) -> tuple[Alternative, ...]:
    seen = {best.strategy.label()}
    chosen = []
    everything = sorted(
        (c for result in results for c in result.candidates),
        key=lambda c: (c.cost.step_time_s, c.strategy.label()),
    )
    for candidate in everything:
        label = candidate.strategy.label()
        if label in seen:
            continue
        seen.add(label)
        chosen.append(
            Alternative(
                label=label,
                step_time_s=candidate.cost.step_time_s,
                peak_memory_bytes=candidate.cost.peak_memory_bytes,
                reason=_reason(candidate, best),
            )
        )
    return tuple(chosen[:_ALTERNATIVES])


def _bound_by(cost: Cost) -> str:
    part, seconds = max(cost.breakdown_s.items(), key=lambda item: item[1])
    share = seconds / cost.step_time_s
    fullest = float((cost.memory.total / cost.limit_bytes).max())
    text = f"{part.replace('_', ' ')} ({share:.0%} of the step)"
    if fullest > 0.9:
        text += f", with memory {fullest:.0%} full: less recomputation would not fit"
    return text


def make_plan(
    request: Request,
    *,
    results: Sequence[SearchResult],
    winner: SearchResult,
    candidate: Candidate,
    pinned: Mapping[str, Any],
    version: str,
    timing_s: Mapping[str, float],
) -> Plan:
    """Put a Plan together.

    Args:
        request: What was asked.
        results: Answers of all partitioners that were asked.
        winner: The one whose candidate was chosen.
        candidate: The chosen strategy and its price.
        pinned: Knobs as the user wrote them.
        version: Of Meshwright.
        timing_s: Wall times, outside the canonical bytes.
    """
    graph, cluster = request.setting.graph, request.setting.cluster
    reference = model_reference(graph)
    strategy = candidate.strategy
    used = {int(cluster.type_index[device]) for device in strategy.device_ids()}
    gloo = any(cluster.device_types[kind].backend == "gloo" for kind in used)
    evaluations = {
        kind: sum(result.evaluations.get(kind, 0) for result in results)
        for kind in ("analytic", "simulated")
    }
    return Plan(
        model=reference,
        cluster=cluster.reference(),
        workload=workload(graph, request.global_batch),
        strategy=strategy,
        prediction=_prediction(request, candidate),
        provenance=Provenance(
            meshwright_version=version,
            partitioner=winner.partitioner,
            objective=request.objective,
            seed=request.seed,
            evaluation_budget=request.evaluation_budget,
            evaluations=evaluations,
            memory_fraction=request.setting.memory_fraction,
            pinned=dict(pinned),
            alternatives=_alternatives(results, candidate),
            assumptions=graph.assumptions,
            bound_by=_bound_by(candidate.cost),
            checkpoint=winner.checkpoint,
        ),
        not_runnable=unsupported(
            strategy, tied=reference.tied, backend="gloo" if gloo else "nccl"
        ),
        timing_s=dict(timing_s),
    )
