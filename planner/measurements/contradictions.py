"""Cells of a row that contradict each other, and what the row was priced with instead.

A published row that contradicts itself is priced all the same; each contradiction is
stated with both columns, their values and the ones to correct.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from planner.graph import ModelGraph
from planner.measurements.known_models import ModelShape, size_of
from planner.measurements.points import Point
from planner.schema import Strategy
from planner.schema.cluster import DeviceType

__all__ = ["Priced", "batch_contradiction", "contradictions", "degree_contradiction"]

#: Share by which a model may miss the parameters that its row states, and the size in
#: its name, which is rounded and at times leaves embeddings out.
_PARAMS_OFF, _NAME_OFF = 0.25, 0.5

#: Schedules that need a pipeline.
_PIPELINED = re.compile(r"interleav|zero|zb|v-?half|v-?min|dual-?pipe")
#: Names of several models in one, such as 8x7B, which are no parameter count.
_EXPERT_NAME = re.compile(r"\dx\d|moe|expert", re.IGNORECASE)
#: Memory that devices have over their nominal one, at most: an H100 of 80 GB, 85.5e9.
_OVER_NOMINAL = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Model, strategy and device that a row is priced with.

    Attributes:
        graph: Model.
        shape: Its shape.
        strategy: Strategy.
        compute: Dtype of products.
        device: Slowest device type.
    """

    graph: ModelGraph
    shape: ModelShape
    strategy: Strategy
    compute: str
    device: DeviceType


def contradictions(point: Point, priced: Priced) -> tuple[str, ...]:
    """Return what is contradictory about a row, one sentence each.

    Args:
        point: Row as read.
        priced: What it is priced with.
    """
    return tuple(words for rule in _RULES if (words := rule(point, priced)))


def degree_contradiction(point: Point) -> str:
    """Return the words for degrees that do not multiply to the devices, or ""."""
    tp, pp, cp = point.tp or 1, point.pp or 1, point.cp or 1
    ways, rest = divmod(point.n_gpus, tp * pp * cp)
    if rest:
        return (
            f"tp={tp} x pp={pp} x cp={cp} do not divide n_gpus={point.n_gpus}; "
            f"correct the degrees"
        )
    if point.dp in (None, ways):
        return ""
    return (
        f"dp={point.dp}, but n_gpus={point.n_gpus} over tp={tp} x pp={pp} x cp={cp} "
        f"is {ways}, which counts; correct dp, n_gpus or a degree"
    )


def batch_contradiction(total: int | None, replicas: int, microbatch: int) -> str:
    """Return the words for a batch that is not whole microbatches, or "".

    Args:
        total: Samples of a step, if stated.
        replicas: Data-parallel degree.
        microbatch: Samples of a microbatch.
    """
    if not total or total % (replicas * microbatch) == 0:
        return ""
    exact = total / (replicas * microbatch)
    return (
        f"global_batch={total} is no multiple of dp={replicas} x "
        f"microbatch={microbatch}: {exact:.2f} microbatches a step taken as "
        f"{max(1, round(exact))}; correct global_batch, dp or microbatch"
    )


def _degrees(point: Point, _: Priced) -> str:
    return "" if point.dp is None else degree_contradiction(point)


def _batch(point: Point, priced: Priced) -> str:
    plan = priced.strategy
    return batch_contradiction(
        point.global_batch, plan.mesh.data_parallel, plan.microbatch_size
    )


def _experts(point: Point, priced: Priced) -> str:
    experts = priced.graph.num_experts
    if not point.ep or point.ep == 1 or (experts and experts % point.ep == 0):
        return ""
    has = f"{experts} experts, which it does not divide" if experts else "no experts"
    return f"ep={point.ep}, but model={point.model!r} has {has}; correct ep or model"


def _zero(point: Point, priced: Priced) -> str:
    mesh = priced.strategy.mesh
    if not point.zero or mesh.data_parallel * mesh.cp > 1:
        return ""
    return (
        f"zero={point.zero}, but dp={mesh.data_parallel} x cp={mesh.cp} has nothing to "
        f"shard over; correct zero or dp"
    )


def _parameters(point: Point, priced: Priced) -> str:
    found = priced.graph.num_parameters
    made = priced.shape
    shape = f"layers={made.layers}, hidden={made.hidden} and vocab={made.vocab}"
    if point.params is not None and not _near(found / point.params, _PARAMS_OFF):
        return (
            f"params={point.params:.3g}, but model={point.model!r} of {shape} has "
            f"{found:.3g}, which count; correct params, model or the shape"
        )
    size = size_of(point.model)
    stated = {point.layers, point.hidden} != {None}
    if size is None or not stated or _EXPERT_NAME.search(point.model):
        return ""
    if _near(found / size, _NAME_OFF):
        return ""
    return (
        f"model={point.model!r} says {size:.3g} parameters, but {shape} have "
        f"{found:.3g}, which count; correct model or the shape"
    )


def _near(ratio: float, share: float) -> bool:
    return 1 / (1 + share) <= ratio <= 1 + share


def _pipeline(point: Point, priced: Priced) -> str:
    plan, text = priced.strategy, point.schedule.lower()
    named = re.search(r"vp\s*=\s*(\d+)", text)
    pp, virtual = plan.mesh.pp, int(named[1]) if named else point.vp
    names = f"schedule={point.schedule!r}"
    if pp == 1:
        # Tables say "interleaved where pp>1" of all their rows.
        if _PIPELINED.search(text) and "pp>1" not in text:
            return f"{names}, but pp=1 has no pipeline; correct schedule or pp"
        if point.vp is not None and point.vp > 1:
            return f"vp={point.vp}, but pp=1 has no pipeline; correct vp or pp"
        return ""
    priced_as = f"priced as {plan.schedule} with vp={plan.virtual_stages}"
    if text == "none":
        return f"{names}, but pp={pp}: {priced_as}; correct schedule or pp"
    if virtual is None:
        return ""
    if point.vp is not None and virtual != point.vp:
        return f"vp={point.vp}, but {names}: {priced_as}; correct either"
    count = plan.num_microbatches
    if virtual > plan.virtual_stages and count % pp and "gpipe" not in text:
        return (
            f"vp={virtual}, but global_batch={point.global_batch} is {count} "
            f"microbatches, no whole rounds of pp={pp}: {priced_as}; correct vp, pp or "
            f"the batch"
        )
    if virtual != plan.virtual_stages:
        return f"vp={virtual}, {names} and pp={pp}: {priced_as}; correct one of them"
    whole = "interleav" in text and virtual == 1
    cut = bool(text) and virtual > 1 and not _PIPELINED.search(text)
    if named is None and (whole or cut):
        return f"vp={virtual}, but {names}: {priced_as}; correct either"
    return ""


def _heads(_: Point, priced: Priced) -> str:
    tp, heads = priced.strategy.mesh.tp, priced.shape.heads
    if heads % tp == 0:
        return ""
    return (
        f"tp={tp} does not divide heads={heads}: priced in equal parts; "
        f"correct tp or heads"
    )


def _tokens(_: Point, priced: Priced) -> str:
    cp, seq = priced.strategy.mesh.cp, priced.graph.seq_len
    if not seq or seq % cp == 0:
        return ""
    return (
        f"cp={cp} does not divide seq={seq}: priced in equal parts; correct cp or seq"
    )


def _precision(point: Point, priced: Priced) -> str:
    device, compute = priced.device, priced.compute
    known = any(name.startswith(compute) for name in device.peak_flops_per_s)
    if known or compute not in ("float8", "float4"):
        return ""
    return (
        f"precision={point.precision!r}, but gpu={point.gpu!r} has no peak in "
        f"{compute}: priced at that of a wider dtype; correct precision or gpu"
    )


def _memory(point: Point, priced: Priced) -> str:
    unit = {"peak_mem_gb": 1e9, "peak_mem_gib": 2.0**30}.get(point.metric)
    if unit is None or point.value * unit <= priced.device.memory_bytes * _OVER_NOMINAL:
        return ""
    return (
        f"value={point.value:g} of metric={point.metric}, but gpu={point.gpu!r} has "
        f"{priced.device.memory_bytes / unit:.4g}; correct value, metric or gpu"
    )


_RULES: tuple[Callable[[Point, Priced], str], ...] = (
    _degrees,
    _batch,
    _experts,
    _zero,
    _parameters,
    _pipeline,
    _heads,
    _tokens,
    _precision,
    _memory,
)
