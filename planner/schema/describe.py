"""A plan in words: summary, explanation, and differences from another plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from planner.schema.base import Document, leaf_defaults, leaf_of
from planner.schema.fused_kernels import FUSED_KERNELS, describe_assumed
from planner.schema.methods import methods_of, words_of
from planner.schema.nccl import nccl_environment, nccl_violation
from planner.schema.plan_parts import (
    Certificate,
    ClusterReference,
    Contender,
    ModelReference,
    OtherDevices,
    Prediction,
    Provenance,
    Workload,
)
from planner.schema.strategy import Strategy
from planner.schema.strategy_parts import AXES, Overlap
from planner.units import format_bytes, format_count, format_seconds

__all__ = [
    "PART_NAMES",
    "PlanFields",
    "assumed_kernels",
    "diff",
    "explain",
    "facts",
    "paragraph",
    "summary",
    "unpriced",
]

#: Part of a step to its name for people.
PART_NAMES = {
    "compute": "compute",
    "recompute": "recomputation",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "expert-parallel communication",
    "pipeline_bubble": "pipeline bubble",
    "pipeline_transfer": "pipeline transfers",
    "shared_cores": "waiting for shared cores",
    "data_parallel": "data-parallel communication and its hooks",
    "optimizer": "optimizer",
}

_ABSENT = object()
#: Unit of the numbers of a field by the ending of its name.
_UNITS = {"_s": format_seconds, "_bytes": format_bytes}
#: Longest list of names that is shown whole.
_LONG = 4


class PlanFields(Protocol):
    """Fields of a plan that its descriptions read."""

    @property
    def model(self) -> ModelReference:
        """Model that the plan is for."""

    @property
    def cluster(self) -> ClusterReference:
        """Cluster that the plan is for."""

    @property
    def workload(self) -> Workload:
        """Batch, inputs and loss."""

    @property
    def strategy(self) -> Strategy:
        """The chosen strategy."""

    @property
    def prediction(self) -> Prediction:
        """Predicted time and memory."""

    @property
    def provenance(self) -> Provenance:
        """Search that found the strategy."""

    @property
    def certificate(self) -> Certificate | None:
        """Result of training a small twin of the plan."""

    @property
    def not_runnable(self) -> tuple[str, ...]:
        """Reasons why Meshwright's executors cannot run the plan."""


def _idle_line(plan: PlanFields) -> str:
    """Say which devices are left idle, and a step with them; empty if none is."""
    idle = plan.provenance.idle
    if not idle:
        return ""
    free = plan.strategy.mesh.num_devices + sum(idle.values())
    told = [
        f"{'with them' if count == free else f'on {_devices(one.devices)}'} "
        f"in {one.compute} {one.reason}"
        for one in plan.provenance.device_sets
        if _uses_more(one, plan)
        for count in [sum(one.devices.values())]
    ]
    return "; ".join([_devices(idle), *told])


def _dtype_line(plan: PlanFields) -> str:
    """Say what other dtypes would bring on no more devices; empty if not tried."""
    sets, compute = plan.provenance.device_sets, plan.strategy.precision.compute
    if all(one.compute == compute for one in sets):
        return ""
    others = [one for one in sets if not _uses_more(one, plan)]
    told = [f"on {_devices(o.devices)} in {o.compute} {o.reason}" for o in others]
    return "; ".join([compute, *told])


def _uses_more(other: OtherDevices, plan: PlanFields) -> bool:
    return sum(other.devices.values()) > plan.strategy.mesh.num_devices


def _devices(counts: Mapping[str, int]) -> str:
    """``4 h100-80, 4 a100-40``."""
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items())


def _mesh_line(plan: PlanFields) -> str:
    mesh = plan.strategy.mesh
    axes = [
        f"{axis} {degree}"
        for axis, degree in zip(AXES, mesh.degrees, strict=True)
        if degree > 1
    ]
    if split := plan.strategy.spatial:
        shards = " x ".join(map(str, split))
        axes = [
            f"{a} ({shards} shards of a sample)" if a[:2] == "cp" else a for a in axes
        ]
    if mesh.ep > 1:
        axes.append(f"ep {mesh.ep} (inside dp_shard x cp x tp)")
    return " x ".join(axes) or "one device"


def _number(count: int, noun: str) -> str:
    """``1 stage``, ``2 stages``, ``3 batches``, ``4 strategies``."""
    if count != 1:
        noun = noun.removesuffix("y") + "ie" if noun.endswith("y") else noun
        noun += "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}"


def _recompute_line(plan: PlanFields) -> str:
    kinds = [stage.recompute for stage in plan.strategy.stages] or ["none"]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{k} on {_number(c, 'stage')}" for k, c in counts.items())


def _schedule_line(plan: PlanFields) -> str:
    strategy = plan.strategy
    count = strategy.mesh.pp * strategy.virtual_stages
    text = f"{strategy.schedule}, {_number(count, 'stage')}"
    if strategy.virtual_stages > 1:
        text += f" ({strategy.virtual_stages} on each pp rank)"
    sizes = sorted({len(stage.modules) for stage in strategy.stages})
    if sizes:
        text += f" of {f'{sizes[0]} to ' if len(sizes) > 1 else ''}"
        text += _number(sizes[-1], "unit")
    return text


def _batch_line(plan: PlanFields) -> str:
    strategy = plan.strategy
    replicas = strategy.mesh.data_parallel
    text = (
        f"{_number(strategy.global_batch, 'sample')} a step: "
        f"{_number(strategy.num_microbatches, 'microbatch')} of "
        f"{strategy.microbatch_size}"
    )
    return text if replicas == 1 else f"{text} on each of {replicas:,} replicas"


def _overlap_line(plan: PlanFields) -> str:
    """Settings made by hand; empty where torch is left its own ways."""
    overlap = plan.strategy.overlap
    told = []
    if plan.strategy.compile:
        told.append("blocks compiled")
    if plan.strategy.loss_chunks > 1:
        told.append(f"loss in {plan.strategy.loss_chunks} chunks of the tokens")
    if plan.strategy.offload:
        host = max(entry.offloaded_bytes for entry in plan.prediction.memory)
        told.append(
            f"{plan.strategy.offload} in the hosts' memory, {format_bytes(host)} of "
            f"each device"
        )
    if overlap.forward_prefetch is not None:
        told.append(f"{_number(overlap.forward_prefetch, 'unit')} ahead in forward")
    if overlap.backward_prefetch is not None:
        told.append(f"{_number(overlap.backward_prefetch, 'unit')} ahead in backward")
    if overlap.bucket_bytes is not None:
        told.append(f"gradient buckets of {format_bytes(overlap.bucket_bytes)}")
    if plan.strategy.communication.boundary == "scattered":
        told.append("tp ranks share the messages between stages")
    if plan.strategy.replicas_by_table:
        algorithm = plan.strategy.communication.replicas.algorithm
        told.append(f"replicas sum gradients by {algorithm} ({_summed_by(plan)})")
    if plan.strategy.communication.buckets == "needed":
        told.append(
            "gradients that the next forward needs first are summed first, others "
            "beside it"
        )
    return ", ".join(told)


def _summed_by(plan: PlanFields) -> str:
    """Name what runs the replicas' sums on GPUs, or why NCCL does not."""
    why_not = nccl_violation(plan.strategy)
    if why_not is not None:
        return f"messages of our own: {why_not}"
    pairs = nccl_environment(plan.strategy).items()
    set_to = ", ".join(f"{name}={value}" for name, value in pairs)
    return f"on GPUs NCCL's, by {set_to}; else messages of our own"


def _switches_line(plan: PlanFields) -> str:
    """Levels whose switches are taken to add; empty if none are."""
    if not plan.cluster.aggregating:
        return ""
    names = ", ".join(plan.cluster.aggregating)
    return f"those of {names} are priced as adding sums, which is left to the library"


def _training_line(plan: PlanFields) -> str:
    """Why a step is not plain training; empty if it is."""
    strategy = plan.strategy
    told = []
    if strategy.semantics == "approximate":
        told.append("approximate: a step does not compute what plain training would")
    told += [words_of(method, value) for method, value in methods_of(strategy)]
    return ", ".join(text for text in told if text)


def _progress_line(plan: PlanFields) -> str:
    """Evidence for steps that are not exact; empty if they are."""
    methods = [method for method, _ in methods_of(plan.strategy) if method.inexact]
    found = plan.prediction.efficiency
    if found is None:
        return "no evidence how far its samples bring training" if methods else ""
    rule = next((one for one in plan.provenance.regimes if one.method == "exact"), None)
    even = ""
    if rule is not None and rule.break_even is not None:
        even = f"; exact training would win below {rule.break_even:.2f}"
    return f"{found.eta:.2f} of exact training's a sample, {found.basis}{even}"


def _speed(plan: PlanFields) -> str:
    prediction = plan.prediction
    parts = [f"{prediction.samples_per_s:,.2f} samples/s"]
    if prediction.tokens_per_s is not None:
        parts.append(f"{prediction.tokens_per_s:,.0f} tokens/s")
    if prediction.model_flops_utilization is not None:
        parts.append(f"MFU {prediction.model_flops_utilization:.1%}")
    return ", ".join(parts)


def _interval_line(plan: PlanFields) -> str:
    """Say how certain the step time is; empty if that is not known."""
    ends = plan.prediction.step_time_interval_s
    if ends is None:
        return ""
    low, high = (format_seconds(end) for end in ends)
    number = len(plan.prediction.leans_on)
    rests = f"; leans on {_number(number, 'mechanism')} without runs" if number else ""
    return f"{low} to {high} for four of five runs{rests}"


def _memory_line(plan: PlanFields) -> str:
    fullest = max(
        plan.prediction.memory, key=lambda entry: entry.total_bytes / entry.limit_bytes
    )
    where = f", pp rank {fullest.rank}" if plan.strategy.mesh.pp > 1 else ""
    return (
        f"{format_bytes(fullest.total_bytes)} of the "
        f"{format_bytes(fullest.limit_bytes)} that may be used on the fullest device "
        f"({fullest.device_type}{where})"
    )


def _host_memory_line(plan: PlanFields) -> str:
    """Tell the CPU memory of the fullest host; empty where no host's is known."""
    needed = plan.prediction.host_memory_bytes
    limit = plan.prediction.host_memory_limit_bytes
    if needed is None or limit is None:
        return ""
    over = ": too much, use more hosts or a higher ZeRO stage"
    return (
        f"{format_bytes(needed)} of {format_bytes(limit)} CPU memory of the fullest "
        f"host while a checkpoint is written{over if needed > limit else ''}"
    )


def _finder_line(plan: PlanFields) -> str:
    counts = plan.provenance.evaluations
    told = []
    if counts.get("analytic"):
        told.append(f"{_number(counts['analytic'], 'strategy')} priced in closed form")
    if counts.get("simulated"):
        told.append(f"{counts['simulated']:,} simulated")
    return f"{plan.provenance.partitioner}; {', '.join(told)}"


def _certificate_line(plan: PlanFields) -> str:
    """Tell what was trained to check the plan; empty if nothing was asked for."""
    made = plan.certificate
    if made is None:
        return ""
    if made.verdict != "right":
        return f"no: {made.reason}"
    steps = _number(made.steps, "step")
    return f"{steps} of {made.strategy} on a small twin equal plain training"


#: Leaves of a strategy that no price depends on, though a run does.
_UNPRICED = (
    *(f"overlap.{name}" for name in Overlap.model_fields),
    "compile",
)


def unpriced(strategy: Strategy) -> tuple[str, ...]:
    """Settings that executors follow and that predictions leave out.

    Args:
        strategy: What was priced.

    Returns:
        ``field=value`` of each; empty if everything was priced.
    """
    found = {name: leaf_of(strategy, name) for name in _UNPRICED}
    defaults = leaf_defaults(Strategy)
    return tuple(
        f"{name}={value}" for name, value in found.items() if value != defaults[name]
    )


def facts(plan: PlanFields) -> dict[str, str]:
    """Return what was chosen, how fast and how full, by name."""
    strategy = plan.strategy
    zero = f", ZeRO-{strategy.zero_stage}" if strategy.zero_stage else ""
    used, there = strategy.mesh.num_devices, plan.cluster.num_devices
    lines = {
        "model": f"{plan.model.name}, {format_count(plan.model.parameters)} parameters",
        "cluster": f"{plan.cluster.name}, {used:,} of {_number(there, 'device')} used",
        "switches": _switches_line(plan),
        "idle": _idle_line(plan),
        "dtype": _dtype_line(plan),
        "mesh": _mesh_line(plan) + zero,
        "schedule": _schedule_line(plan) if strategy.mesh.pp > 1 else "no pipeline",
        "batch": _batch_line(plan),
        "recompute": _recompute_line(plan),
        "execution": _overlap_line(plan),
        "training": _training_line(plan),
        "progress": _progress_line(plan),
        "kernels": _kernels_line(plan),
        "not priced": ", ".join(unpriced(strategy)),
        "step": f"{format_seconds(plan.prediction.step_time_s)} ({_speed(plan)})",
        "interval": _interval_line(plan),
        "memory": _memory_line(plan),
        "host": _host_memory_line(plan),
        "found by": _finder_line(plan),
        "certified": _certificate_line(plan),
    }
    return {name: text for name, text in lines.items() if text}


def assumed_kernels(plan: PlanFields) -> tuple[str, ...]:
    """Return the fused kernels that a plan assumes, and its price without them."""
    assumed = plan.provenance.kernels
    if assumed is None:
        return ()
    lines = describe_assumed(assumed)
    if assumed.captured_step_time_s is not None:
        lack = assumed.captured_lack_bytes or 0.0
        memory = f"lacks {format_bytes(lack)}" if lack else "has enough memory"
        step = format_seconds(assumed.captured_step_time_s)
        lines += (
            f"with the model's own code the same plan takes {step} a step, and the "
            f"fullest device {memory}",
        )
    return lines


def _kernels_line(plan: PlanFields) -> str:
    """Name the fused kernels that are assumed."""
    assumed = plan.provenance.kernels
    if assumed is None:
        return ""
    names = [FUSED_KERNELS[kind].kernel for kind in assumed.modules]
    return f"fused ones assumed: {', '.join(names) or 'none was recognised'}"


def summary(plan: PlanFields) -> str:
    """Tell what was chosen, how fast and how full, in a few lines."""
    return "\n".join(
        [
            *(f"{name:<11}{text}" for name, text in facts(plan).items()),
            *(f"Meshwright cannot run it: {reason}" for reason in plan.not_runnable),
        ]
    )


#: What a device has of the work along an axis.
_WAYS = {
    "pp": "pipeline ranks",
    "dp_replicate": "replicas",
    "dp_shard": "shards of their state",
    "cp": "parts of each sequence",
    "tp": "slices of each layer",
}


def paragraph(plan: PlanFields) -> str:
    """Tell what was chosen and why, in sentences."""
    strategy, prediction = plan.strategy, plan.prediction
    told_ways = _WAYS | ({"cp": "shards of each sample"} if strategy.spatial else {})
    ways = [
        f"{degree:,} {told_ways[axis]} ({axis})"
        for axis, degree in zip(AXES, strategy.mesh.degrees, strict=True)
        if degree > 1
    ]
    used, there = strategy.mesh.num_devices, plan.cluster.num_devices
    which = "all " if used == there > 1 else ""
    split = f" as {' x '.join(ways)}" if ways else ""
    told = [
        f"{plan.model.name} ({format_count(plan.model.parameters)} parameters) is "
        f"trained on {which}{_number(used, 'device')} of {plan.cluster.name}{split}.",
        f"A step ({_batch_line(plan).replace(' a step: ', ', ')}) is predicted to take "
        f"{format_seconds(prediction.step_time_s)} ({_speed(plan)}), with "
        f"{_memory_line(plan)}.",
    ]
    if switches := _switches_line(plan):
        told.append(f"Of its switches, {switches}.")
    if training := _training_line(plan):
        told.append(f"Training is not plain: {training}.")
    if progress := _progress_line(plan):
        told.append(f"Its progress is {progress}.")
    if left_out := ", ".join(unpriced(strategy)):
        told.append(f"The prediction leaves out {left_out}.")
    if plan.provenance.bound_by:
        told.append(f"The step is bound by {plan.provenance.bound_by}.")
    name, counts = _finder_line(plan).split("; ", 1)
    found = (
        "It was given, not searched for"
        if name == "given"
        else f"The {name} partitioner found it"
    )
    told.append(f"{found}: {counts}.")
    if plan.provenance.alternatives:
        nearest = plan.provenance.alternatives[0]
        told.append(f"The next best is {nearest.label}: {nearest.reason}.")
    return " ".join(told)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, numbers flush right; columns of nothing but zeros left out."""
    columns = [
        column
        for column in zip(header, *rows, strict=True)
        if not set(column[1:]) <= {format_bytes(0)}
    ]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  " + "  ".join(f"{c:>{w}}" for c, w in zip(line, widths, strict=True))
        for line in zip(*columns, strict=True)
    ]


def _memory_table(plan: PlanFields) -> list[str]:
    parts = (
        *("parameters", "gradients", "optimizer", "activations", "buffers", "reserve"),
        *("total", "limit"),
    )
    rows = [
        [
            str(entry.rank),
            entry.device_type,
            *(format_bytes(getattr(entry, f"{part}_bytes")) for part in parts),
            # Its own unit, in which people compare.
            f"{entry.total_bytes / 2**30:.3g} GiB",
        ]
        for entry in plan.prediction.memory
    ]
    return _table(("rank", "device", *parts, "in nvidia-smi"), rows)


#: Share of an exact step that copies wait for each other from which on methods that
#: exchange less are worth a question.
_WORTH_ASKING = 0.2


def _regime_lines(plan: PlanFields) -> list[str]:
    """Tell which other ways of training were considered, or could be."""
    lines = ["", "other ways of training:"] if plan.provenance.regimes else []
    for one in plan.provenance.regimes:
        step = "-" if one.step_time_s is None else format_seconds(one.step_time_s)
        found = one.efficiency
        basis = f" ({found.eta:.2f} a sample, {found.basis})" if found else ""
        even = "" if one.break_even is None else f"; even at {one.break_even:.2f}"
        lines.append(f"  {step:>9}  {one.method}{basis}: {one.reason}{even}")
    share = plan.prediction.breakdown_s.get("data_parallel", 0.0)
    waits = share >= _WORTH_ASKING * plan.prediction.step_time_s
    waits = waits and plan.strategy.mesh.data_parallel > 1
    if not lines and waits and plan.strategy.semantics == "exact":
        lines = [
            "",
            "copies wait for each other's gradients; allow_approximate=True also "
            "considers methods that exchange less (meshwright methods)",
        ]
    return lines


def _best_step(one: Contender) -> str:
    """Write a contender's best step, or why it has none."""
    if one.step_time_s is not None:
        return format_seconds(one.step_time_s)
    return "none fits" if one.evaluations.get("simulated") else "none simulated"


def _race_lines(plan: PlanFields) -> list[str]:
    """Tell how the searches that raced shared the budget, and who led last."""
    raced = [one for one in plan.provenance.contenders if one.share is not None]
    if not raced:
        return []
    rows = [
        [
            one.partitioner,
            f"{one.share:.0%}",
            f"{one.evaluations.get('analytic', 0):,}",
            f"{one.evaluations.get('simulated', 0):,}",
            "never" if one.best_after is None else f"{one.best_after:,}",
            _best_step(one),
        ]
        for one in raced
    ]
    header = ("search", "of the budget", "priced", "simulated", "led last after")
    return [
        "",
        "race (simulations of all of them, until a search last had the best plan):",
        *_table((*header, "its best step"), rows),
    ]


def explain(plan: PlanFields) -> str:
    """Tell what bounds the step, its parts, and the cost of the runners-up."""
    prediction = plan.prediction
    total = prediction.step_time_s or 1.0
    lines = [summary(plan), "", f"bound by: {plan.provenance.bound_by}"]
    if plan.provenance.calibration is not None:
        lines.append(f"constants: {plan.provenance.calibration}")
    if kernels := assumed_kernels(plan):
        lines += ["", "fused kernels assumed:", *(f"  {text}" for text in kernels)]
    lines += ["", "time:"]
    for part, seconds in sorted(prediction.breakdown_s.items(), key=lambda kv: -kv[1]):
        if seconds > 0:
            name = PART_NAMES.get(part, part)
            lines.append(
                f"  {seconds / total:6.1%}  {format_seconds(seconds):>9}  {name}"
            )
    if prediction.leans_on:
        lines += ["", "leans on:", *(f"  {text}" for text in prediction.leans_on)]
    lines += ["", "memory by pp rank:", *_memory_table(plan)]
    if plan.provenance.alternatives:
        lines += ["", "runners-up (mb2x8 is 8 microbatches of 2 samples):"]
    for other in plan.provenance.alternatives:
        lines.append(
            f"  {format_seconds(other.step_time_s):>9}  "
            f"{format_bytes(other.peak_memory_bytes):>8}  {other.label}: {other.reason}"
        )
    lines += _race_lines(plan)
    lines += _regime_lines(plan)
    if plan.provenance.assumptions:
        lines += ["", "assumed while reading the model:"]
        lines += [f"  {text}" for text in plan.provenance.assumptions]
    return "\n".join(lines)


# -- Differences ----------------------------------------------------------------


def diff(ours: Document, theirs: Document) -> tuple[str, ...]:
    """Return the fields in which two plans differ; wall-clock times are left out.

    Lists of objects that differ in length, and runners-up, are shown as a whole;
    numbers have their unit and the change in percent.
    """
    left, right = (
        {k: v for k, v in plan.to_data().items() if k not in plan.CLOCK_FIELDS}
        for plan in (ours, theirs)
    )
    return tuple(_differences(left, right, ""))


def _differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    if ours == theirs:
        return
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in dict.fromkeys([*ours, *theirs]):
            yield from _differences(
                ours.get(key, _ABSENT),
                theirs.get(key, _ABSENT),
                f"{path}.{key}" if path else key,
            )
    elif _objects(ours) and _objects(theirs) and _alike(ours, theirs):
        for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(left, right, f"{path}[{index}]")
    else:
        left, right = (_shown(value, path) for value in (ours, theirs))
        yield f"{path}: {left} -> {right}{_change(ours, theirs)}"


def _alike(ours: list[Any], theirs: list[Any]) -> bool:
    """Return True if entries have a counterpart: runners-up are shown as a whole."""
    return len(ours) == len(theirs) and not _labelled(ours)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(part, dict) for part in value)


def _shown(value: Any, path: str) -> str:
    if value is _ABSENT:
        return "(absent)"
    if _labelled(value):
        more = f" and {len(value) - 1} more" if len(value) > 1 else ""
        return f"{value[0]['label']}{more}"
    if isinstance(value, list) and (_objects(value) or len(value) > _LONG):
        plain = [part for part in value if not isinstance(part, dict | list)]
        count = f"{len(value)} {'entry' if len(value) == 1 else 'entries'}"
        return f"{plain[0]} to {plain[-1]}, {count}" if plain else count
    if isinstance(value, float):
        return _number_text(value, path)
    return str(value)


def _labelled(value: Any) -> bool:
    return _objects(value) and all("label" in part for part in value)


def _number_text(value: float, path: str) -> str:
    names = path.split(".")[-2:]
    if any(name.endswith("_per_s") for name in names):
        return f"{value:,.0f}/s" if value >= 1000 else f"{value:.4g}/s"
    for ending, form in _UNITS.items():
        if any(name.endswith(ending) for name in names):
            return form(value)
    return f"{value:.4g}"


def _change(ours: Any, theirs: Any) -> str:
    """Return the relative change of numbers that were measured or predicted."""
    if not (isinstance(ours, float) and isinstance(theirs, float) and ours):
        return ""
    percent = 100 * (theirs / ours - 1)
    return f" ({percent:+.1f}%)" if abs(percent) >= 0.1 else f" ({percent:+.1g}%)"
