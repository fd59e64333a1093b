"""When nothing fits: which limit, by how much, and the nearest changes that do fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.cluster import Cluster
from planner.cost import CostModel
from planner.errors import MeshwrightError, NoFeasiblePlanError
from planner.schema import SCHEDULES
from planner.search import Candidate, Request, SearchResult
from planner.space import PINNABLE, RECOMPUTE_NAMES, enumerate_strategies
from planner.units import format_bytes

__all__ = ["no_feasible_plan"]

_LARGEST_GROWTH = 64


def no_feasible_plan(
    request: Request, results: Sequence[SearchResult]
) -> NoFeasiblePlanError:
    """The error that says what lacks and what was found to fit instead.

    Args:
        request: That no partitioner could satisfy.
        results: Their answers, with the nearest misses.
    """
    misses = [result.nearest for result in results if result.nearest is not None]
    if misses:
        reasons = [_memory_reason(request, min(misses, key=_lack))]
    else:
        reasons = [_legality_reason(request)]
    return NoFeasiblePlanError(reasons, list(_remedies(request, bool(misses))))


def _lack(candidate: Candidate) -> float:
    return float((candidate.cost.memory.total - candidate.cost.limit_bytes).max())


def _memory_reason(request: Request, nearest: Candidate) -> str:
    cost = nearest.cost
    over = cost.memory.total - cost.limit_bytes
    rank = int(over.argmax())
    device = request.setting.cluster.device_types[int(cost.device_type[rank])]
    parts = {
        "parameters": cost.memory.parameters[rank],
        "gradients": cost.memory.gradients[rank],
        "optimizer states": cost.memory.optimizer[rank],
        "activations": cost.memory.activations[rank],
        "buffers": cost.memory.buffers[rank],
    }
    name, most = max(parts.items(), key=lambda item: item[1])
    share = request.setting.memory_fraction
    return (
        f"the strategy nearest to fitting ({nearest.strategy.label()}) needs "
        f"{format_bytes(cost.memory.total[rank])} on a {device.name} of pp rank "
        f"{rank}, {format_bytes(over[rank])} ({over[rank]:.0f} bytes) more than the "
        f"{format_bytes(cost.limit_bytes[rank])} it may use "
        f"({share:.0%} of {format_bytes(device.memory_bytes)}); "
        f"most of it is {name} ({format_bytes(most)})"
    )


def _legality_reason(request: Request) -> str:
    facts = request.facts
    pins = _shown_pins(request)
    text = (
        f"no legal strategy for global_batch={facts.global_batch} on "
        f"{facts.num_devices} devices"
    )
    if pins:
        text += f" with {pins}"
    dims = ", ".join(f"{name}={size}" for name, size in facts.tp_dims.items())
    rules = [
        f"the data-parallel degree must divide global_batch={facts.global_batch}",
        f"the pipeline has at most {facts.num_units} units",
    ]
    if dims:
        rules.append(f"tp must divide {dims}")
    return f"{text}: " + ", ".join(rules)


def _shown_pins(request: Request) -> str:
    shown = []
    for knob, value in request.pins.items():
        if knob == "schedule":
            shown.append(f"schedule={SCHEDULES[value]}")
        elif knob == "recompute":
            shown.append(f"recompute={RECOMPUTE_NAMES[value]}")
        else:
            shown.append(f"{knob}={value}")
    return ", ".join(shown)


def _feasible(request: Request) -> bool:
    """Whether any legal strategy of a changed request fits, by closed forms.

    Looks at the leanest ones alone: microbatches of one sample, or one microbatch.
    """
    model = CostModel(request.setting)
    count = len(request.setting.order)
    free = {"microbatch_size", "num_microbatches"}.isdisjoint(request.pins)
    lean = ({"microbatch_size": 1}, {"num_microbatches": 1}) if free else ({},)
    for pins in lean:
        for table in enumerate_strategies(
            request.facts,
            num_devices=count,
            pins={**request.pins, **pins},
            rows=200_000,
        ):
            if model.table(table).fits.any():
                return True
    return False


def _remedies(request: Request, memory: bool) -> Iterator[str]:
    """Changes that were evaluated and do fit, smallest first."""
    yield from _without_pins(request)
    yield from _other_batch(request)
    if memory:
        yield from _first(
            (f"memory_fraction={share}", _with_fraction(request, share))
            for share in (0.95, 1.0)
            if share > request.setting.memory_fraction
        )
        yield from _first(((text, change(request)) for text, change in _LIGHTER))
        if request.setting.graph.seq_len:
            yield from _shorter(request)
    yield from _more_devices(request)


def _first(changes: Iterator[tuple[str, Request]]) -> Iterator[str]:
    for text, changed in changes:
        if _feasible(changed):
            yield text
            return


def _without_pins(request: Request) -> Iterator[str]:
    for knob in PINNABLE:
        if knob in request.pins:
            rest = {name: value for name, value in request.pins.items() if name != knob}
            if _feasible(_changed(request, pins=rest)):
                yield f"without the pin on {knob}"


def _other_batch(request: Request) -> Iterator[str]:
    """The nearest batch sizes, below and above, with which something fits."""
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
    return _changed(request, setting=replace(request.setting, memory_fraction=share))


def _bfloat16_states(request: Request) -> Request:
    optimizer = request.setting.optimizer.model_copy(update={"state_dtype": "bfloat16"})
    return _changed(request, setting=replace(request.setting, optimizer=optimizer))


def _bfloat16_weights(request: Request) -> Request:
    both = _bfloat16_states(request).setting
    precision = both.precision.model_copy(
        update={"parameter": "bfloat16", "reduce": "bfloat16"}
    )
    return _changed(request, setting=replace(both, precision=precision))


_LIGHTER: tuple[tuple[str, Callable[[Request], Request]], ...] = (
    ("optimizer states in bfloat16", _bfloat16_states),
    ("weights, reductions and optimizer states in bfloat16", _bfloat16_weights),
)


def _shorter(request: Request) -> Iterator[str]:
    """Shorter sequences, priced as smaller batches of the same tokens."""
    length = request.setting.graph.seq_len or 1
    graph = request.setting.graph
    for parts in (2, 4, 8):
        if length % parts:
            return
        smaller = replace(graph, batch=graph.batch * parts, seq_len=length // parts)
        changed = _changed(request, setting=replace(request.setting, graph=smaller))
        if _feasible(changed):
            yield f"seq_len={length // parts}"
            return


def _more_devices(request: Request) -> Iterator[str]:
    """The smallest multiple of the cluster, in powers of two, that fits."""
    cluster = request.setting.cluster
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
        setting = replace(request.setting, cluster=larger, order=order)
        changed = _changed(request, setting=setting)
        if _feasible(changed):
            yield f"{name}:{nodes * growth} ({len(order)} devices)"
            return
        growth *= 2


def _changed(request: Request, **changes: object) -> Request:
    return replace(request, **changes)  # type: ignore[arg-type]
