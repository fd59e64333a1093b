"""Diagnosis of a request without a plan: the limit exceeded, and changes that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.cost import CostModel
from planner.errors import MeshwrightError, NoFeasiblePlanError
from planner.search import Candidate, Request, SearchResult, get_partitioner
from planner.search.orders import device_orders
from planner.search.refine import candidates_of_row
from planner.search.violations import nearest_violations
from planner.space import StrategyTable, enumerate_strategies, pin_text
from planner.units import format_bytes

__all__ = ["fitting", "no_feasible_plan"]

_LARGEST_GROWTH = 64
#: Most other values of a pinned knob to try.
_NEAR_VALUES = 3
_DIVIDE_THE_BATCH = frozenset(
    {"dp_replicate", "dp_shard", "microbatch_size", "num_microbatches"}
)

Index = NDArray[np.int64]


def no_feasible_plan(
    request: Request, results: Sequence[SearchResult]
) -> NoFeasiblePlanError:
    """Make the error with the limit that was exceeded, and changes that fit.

    They are looked for when somebody reads them.

    Args:
        request: A request that no partitioner could satisfy.
        results: Their answers, with the candidates nearest to fitting.
    """
    return NoFeasiblePlanError(diagnose=partial(_diagnose, request, results))


def _diagnose(
    request: Request, results: Sequence[SearchResult]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return reasons and remedies."""
    nearest = [result.nearest for result in results if result.nearest is not None]
    if nearest:
        reasons = [_memory_reason(request, min(nearest, key=_excess))]
    else:
        reasons = [_nearest_violation(request)]
    remedies = list(_other_partitioner(request, results))
    remedies = remedies or list(_remedies(request, bool(nearest)))
    if request.pins and not remedies:
        free = _changed(request, pins={})
        remedies = [f"no pins and {larger}" for larger in _more_devices(free)]
    return tuple(reasons), tuple(remedies)


def _excess(candidate: Candidate) -> float:
    return candidate.cost.lack_bytes


def _memory_reason(request: Request, nearest: Candidate) -> str:
    cost = nearest.cost
    lying = float(cost.host_bytes.max())
    if lying - cost.host_limit_bytes >= cost.lack_bytes:
        most = max(cost.host_limit_bytes, 0.0)
        return (
            f"the strategy nearest to fitting ({nearest.strategy.label()}) offloads "
            f"{format_bytes(lying)} of each device, {format_bytes(lying - most)} more "
            f"than the {format_bytes(most)} of its host's memory that it may use"
        )
    over = cost.memory.total - cost.limit_bytes
    rank = int(over.argmax())
    device = request.context.cluster.device_types[int(cost.device_type[rank])]
    parts = {
        "parameters": cost.memory.parameters[rank],
        "gradients": cost.memory.gradients[rank],
        "optimizer states": cost.memory.optimizer[rank],
        "activations": cost.memory.activations[rank],
        "buffers": cost.memory.buffers[rank],
    }
    name, most = max(parts.items(), key=lambda item: item[1])
    share = request.context.memory_fraction
    where = f"each {device.name}"
    if nearest.strategy.mesh.pp > 1:
        where += f" of pp rank {rank}"
    return (
        f"the strategy nearest to fitting ({nearest.strategy.label()}) needs "
        f"{format_bytes(cost.memory.total[rank])} on {where}, "
        f"{format_bytes(over[rank])} ({over[rank]:.0f} bytes) more than the "
        f"{format_bytes(cost.limit_bytes[rank])} it may use "
        f"({share:.0%} of {format_bytes(device.memory_bytes)}); "
        f"most of it is {name} ({format_bytes(most)})"
    )


def _nearest_violation(request: Request) -> str:
    facts = request.facts
    pins = ", ".join(pin_text(knob, code) for knob, code in request.pins.items())
    target = (
        f" for target {request.target!r}" if request.launcher_limits is not None else ""
    )
    graph = request.context.graph
    whole = graph.whole_sample if graph.seq_len is None else graph.whole_sequence
    why = f"; of cp: {whole}" if whole and request.pins.get("cp", 1) > 1 else ""
    return (
        f"no legal strategy for global_batch={facts.global_batch} on "
        f"{facts.num_devices} devices{f' with {pins}' if pins else ''}{target}: "
        f"{nearest_violations(request)}{why}"
    )


def fitting(
    request: Request, orders: Iterable[Index] | None = None
) -> Iterator[tuple[CostModel, StrategyTable]]:
    """Yield legal strategies that fit by closed forms, the least memory first.

    Only strategies with microbatches of one sample, or one microbatch, are tried.

    Args:
        request: The changed request.
        orders: Devices to use; all free ones if None.
    """
    free = {"microbatch_size", "num_microbatches"}.isdisjoint(request.pins)
    lean = ({"microbatch_size": 1}, {"num_microbatches": 1}) if free else ({},)
    if orders is None and request.launcher_limits is not None:
        orders = device_orders(request)
    for order in orders or [request.context.order]:
        model = CostModel(replace(request.context, order=order))
        for pins in lean:
            for table in enumerate_strategies(
                request.facts,
                num_devices=len(order),
                pins={**request.pins, **pins},
                rows=200_000,
            ):
                excess = model.table(table).excess_bytes
                fits = np.flatnonzero(excess <= 0)
                if len(fits):
                    yield model, table[fits[np.argsort(excess[fits], kind="stable")]]


def _feasible(request: Request, orders: Iterable[Index] | None = None) -> bool:
    """Return True if a changed request has a strategy that fits, priced exactly."""
    return any(
        candidate.cost.fits
        for model, table in fitting(request, orders)
        for candidate in candidates_of_row(
            model, table.row(0), limits=request.launcher_limits
        )
    )


def _remedies(request: Request, memory: bool) -> Iterator[str]:
    """Yield changes of the request that were found to fit, the smallest first."""
    yield from _other_pins(request)
    yield from _other_batch(request)
    if request.target != "any" and not memory:
        wider = (
            ("meshwright", "any") if request.launcher_limits is not None else ("any",)
        )
        yield from _first(
            (f'target="{name}"', _changed(request, target=name)) for name in wider
        )
    if memory:
        yield from _first(
            (f"memory_fraction={share}", _with_fraction(request, share))
            for share in (0.95, 1.0)
            if share > request.context.memory_fraction
        )
        yield from _first(((text, change(request)) for text, change in _LIGHTER))
        if request.context.graph.seq_len:
            yield from _shorter(request)
    if memory or request.pins:
        # Fewer devices were tried: what is not legal on them without a pin never is.
        yield from _more_devices(request)


def _first(changes: Iterator[tuple[str, Request]]) -> Iterator[str]:
    for text, changed in changes:
        if _feasible(changed):
            yield text
            return


def _other_partitioner(
    request: Request, results: Sequence[SearchResult]
) -> Iterator[str]:
    """Yield the exhaustive partitioner if it finds a plan and was not run."""
    if all(result.partitioner != "exhaustive" for result in results):
        found = get_partitioner("exhaustive").search(
            replace(request, evaluation_budget=None)
        )
        if found.candidates:
            yield "partitioner=auto"


def _other_pins(request: Request) -> Iterator[str]:
    """Yield the nearest value of each pin that fits; no pins at all, if none does."""
    found = False
    for knob, pinned in request.pins.items():
        for near in _near_values(request, knob, pinned):
            changed = _changed(request, pins={**request.pins, knob: near})
            if _feasible(changed, device_orders(changed)):
                found = True
                yield f"{pin_text(knob, near)} instead of {pin_text(knob, pinned)}"
                break
    free = _changed(request, pins={})
    if len(request.pins) > 1 and not found and _feasible(free, device_orders(free)):
        yield "no pins"


def _near_values(request: Request, knob: str, pinned: int) -> list[int]:
    """Return values of a knob that fit or divide, the nearest first."""
    rest = {name: value for name, value in request.pins.items() if name != knob}
    without = _changed(request, pins=rest)
    values = {
        int(value)
        for _, table in fitting(without, device_orders(without))
        for value in np.unique(getattr(table, knob))
    }
    if values and knob in _DIVIDE_THE_BATCH:
        # Values above are of meshes with all devices; these divide the batch alone.
        batch = request.global_batch
        most = min(batch, max(2 * pinned, len(request.context.order)))
        values |= {d for d in range(1, most + 1) if batch % d == 0}
    # The nearest degree or count is the one with the smallest factor.
    near = sorted(values, key=lambda v: (abs(math.log((v + 1) / (pinned + 1))), v))
    return [value for value in near if value != pinned][:_NEAR_VALUES]


def _other_batch(request: Request) -> Iterator[str]:
    """Yield the nearest batch size with which a strategy fits."""
    batch = request.global_batch
    near = sorted(
        {2**k for k in range(1, 15)} | {batch - 1, batch + 1, batch // 2, batch * 2},
        key=lambda b: (abs(b - batch), b),
    )
    tried = [b for b in near if 1 <= b <= 4 * batch + 64 and b != batch][:8]
    yield from _first(
        (f"global_batch={b}", _changed(request, global_batch=b)) for b in tried
    )


def _with_fraction(request: Request, share: float) -> Request:
    return _changed(request, context=replace(request.context, memory_fraction=share))


def _bfloat16_states(request: Request) -> Request:
    optimizer = request.context.optimizer.model_copy(update={"state_dtype": "bfloat16"})
    return _changed(request, context=replace(request.context, optimizer=optimizer))


def _bfloat16_weights(request: Request) -> Request:
    both = _bfloat16_states(request).context
    precision = both.precision.model_copy(
        update={"parameter": "bfloat16", "reduce": "bfloat16"}
    )
    return _changed(request, context=replace(both, precision=precision))


_LIGHTER: tuple[tuple[str, Callable[[Request], Request]], ...] = (
    ("optimizer states in bfloat16", _bfloat16_states),
    ("weights, reductions and optimizer states in bfloat16", _bfloat16_weights),
)


def _shorter(request: Request) -> Iterator[str]:
    """Yield a shorter sequence length that fits, priced by batches of equal tokens."""
    length = request.context.graph.seq_len or 1
    graph = request.context.graph
    for parts in (2, 4, 8):
        if length % parts:
            return
        smaller = replace(graph, batch=graph.batch * parts, seq_len=length // parts)
        changed = _changed(request, context=replace(request.context, graph=smaller))
        if _feasible(changed):
            yield f"seq_len={length // parts}"
            return


def _more_devices(request: Request) -> Iterator[str]:
    """Yield the smallest cluster that fits, larger by a power of two."""
    cluster = request.context.cluster
    ref = cluster.ref or ""
    name, _, count = ref.partition(":")
    if not name or not (count.isdigit() or not count):
        return
    nodes = int(count or 1)
    growth = 2
    while growth <= _LARGEST_GROWTH:
        try:
            larger = Cluster.parse(f"{name}:{nodes * growth}")
        except MeshwrightError:
            # Not a name with a count: a file, or more nodes than the preset can have.
            return
        order = np.asarray(larger.free, dtype=np.int64)
        context = replace(request.context, cluster=larger, order=order)
        changed = _changed(request, context=context)
        if _feasible(changed):
            yield f"{name}:{nodes * growth} ({len(order)} devices)"
            return
        growth *= 2


def _changed(request: Request, **changes: object) -> Request:
    return replace(request, **changes)  # type: ignore[arg-type]
