"""A plan in words: summary, explanation, difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from planner.schema.strategy import AXES
from planner.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from planner.schema.plan import Plan

__all__ = ["diff", "explain", "summary"]

_PART_NAMES = {
    "compute": "compute",
    "recompute": "recomputation",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "expert-parallel communication",
    "pipeline_bubble": "pipeline bubble",
    "pipeline_transfer": "pipeline transfers",
    "data_parallel": "data-parallel communication",
    "optimizer": "optimizer",
}


def _mesh_line(plan: Plan) -> str:
    mesh = plan.strategy.mesh
    axes = [
        f"{axis} {degree}"
        for axis, degree in zip(AXES, mesh.degrees, strict=True)
        if degree > 1
    ]
    if mesh.ep > 1:
        axes.append(f"ep {mesh.ep} (inside dp_shard x cp)")
    return " x ".join(axes) or "one device"


def _recompute_line(plan: Plan) -> str:
    kinds = [stage.recompute for stage in plan.strategy.stages] or ["none"]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{kind} on {count} stages" for kind, count in counts.items())


def _schedule_line(plan: Plan) -> str:
    strategy = plan.strategy
    count = strategy.num_microbatches
    batch = (
        f"{count} microbatch{'es' if count > 1 else ''} of "
        f"{strategy.microbatch_size} a step"
    )
    if strategy.mesh.pp == 1:
        return batch
    sizes = sorted({len(stage.modules) for stage in strategy.stages})
    text = f"{strategy.schedule}, {strategy.mesh.pp * strategy.virtual_stages} stages"
    if sizes:
        units = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
        text += f" of {units} unit{'s' if sizes[-1] > 1 else ''}"
    return f"{text}, {batch}"


def summary(plan: Plan) -> str:
    """What was chosen, how fast, how full: a few lines."""
    prediction = plan.prediction
    speed = f"{prediction.samples_per_s:,.2f} samples/s"
    if prediction.tokens_per_s is not None:
        speed += f", {prediction.tokens_per_s:,.0f} tokens/s"
    if prediction.model_flops_utilization is not None:
        speed += f", MFU {prediction.model_flops_utilization:.1%}"
    fullest = max(prediction.memory, key=lambda entry: entry.total_bytes)
    lines = [
        f"model      {plan.model.name}, "
        f"{format_count(plan.model.parameters)} parameters",
        f"cluster    {plan.cluster.name}, "
        f"{plan.strategy.mesh.num_devices} of {plan.cluster.num_devices} devices used",
        f"mesh       {_mesh_line(plan)}"
        + (f", ZeRO-{plan.strategy.zero_stage}" if plan.strategy.zero_stage else ""),
        f"schedule   {_schedule_line(plan)}",
        f"recompute  {_recompute_line(plan)}",
        f"step       {format_seconds(prediction.step_time_s)} ({speed})",
        f"memory     {format_bytes(fullest.total_bytes)} of "
        f"{format_bytes(fullest.limit_bytes)} on the fullest device "
        f"({fullest.device_type}, pp rank {fullest.rank})",
        f"found by   {plan.provenance.partitioner}, "
        + ", ".join(f"{n:,} {k}" for k, n in plan.provenance.evaluations.items()),
    ]
    lines += [f"cannot run here: {reason}" for reason in plan.not_runnable]
    return "\n".join(lines)


def explain(plan: Plan) -> str:
    """What bounds the step, what it is made of, and what the runners-up cost."""
    prediction = plan.prediction
    total = prediction.step_time_s or 1.0
    lines = [summary(plan), "", f"bound by: {plan.provenance.bound_by}", "", "time:"]
    for part, seconds in sorted(prediction.breakdown_s.items(), key=lambda kv: -kv[1]):
        if seconds > 0:
            name = _PART_NAMES.get(part, part)
            lines.append(
                f"  {seconds / total:6.1%}  {format_seconds(seconds):>9}  {name}"
            )
    lines += ["", "memory by pp rank:"]
    for entry in prediction.memory:
        lines.append(
            f"  rank {entry.rank}: {format_bytes(entry.total_bytes)} = "
            f"parameters {format_bytes(entry.parameters_bytes)} + "
            f"gradients {format_bytes(entry.gradients_bytes)} + "
            f"optimizer {format_bytes(entry.optimizer_bytes)} + "
            f"activations {format_bytes(entry.activations_bytes)} + "
            f"buffers {format_bytes(entry.buffers_bytes)} + "
            f"reserve {format_bytes(entry.reserve_bytes)}"
        )
    if plan.provenance.alternatives:
        lines += ["", "runners-up:"]
    for other in plan.provenance.alternatives:
        lines.append(
            f"  {format_seconds(other.step_time_s):>9}  "
            f"{format_bytes(other.peak_memory_bytes):>8}  {other.label}: {other.reason}"
        )
    if plan.provenance.assumptions:
        lines += ["", "assumed while reading the model:"]
        lines += [f"  {text}" for text in plan.provenance.assumptions]
    return "\n".join(lines)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(
        isinstance(part, dict | list) for part in value
    ):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{path}[{index}]")
    else:
        yield path, value


def _compared(plan: Plan) -> dict[str, Any]:
    data = plan.to_data()
    return dict(
        _leaves({k: v for k, v in data.items() if k not in plan.CLOCK_FIELDS}, "")
    )


def diff(ours: Plan, theirs: Plan) -> tuple[str, ...]:
    """Fields in which two plans differ; clock times are left out."""
    left, right = _compared(ours), _compared(theirs)
    missing = "(absent)"
    return tuple(
        f"{path}: {left.get(path, missing)} -> {right.get(path, missing)}"
        for path in dict.fromkeys([*left, *right])
        if left.get(path, missing) != right.get(path, missing)
    )
