"""Step time against memory and devices: which strategies nothing beats in all three."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.report.data import ParetoPoint
from planner.schema import AXES, Plan
from planner.space import (
    RECOMPUTE_NAMES,
    StrategyTable,
    enumerate_strategies,
    gather_facts,
    normalize_pins,
    read_pins,
    skeleton,
)

__all__ = ["devices_of_label", "pareto_points", "priced_points"]

#: Points of one number of devices that a figure can still tell apart.
_PER_COUNT = 12
#: Strategies that are priced for each number of devices, at most.
_MOST_ROWS = 400_000
#: Fewer devices that are looked at: a half, a quarter, an eighth.
_HALVINGS = 3
#: Smaller differences are no reason to prefer one.
_EQUAL = 1e-6


def devices_of_label(label: str) -> int:
    """Devices of a strategy of which only the label is known."""
    found = re.findall(rf"\b({'|'.join(AXES)})(\d+)\b", label)
    count = 1
    for _, degree in found:
        count *= int(degree)
    return count


def pareto_points(
    plan: Plan, pricing: CostModel | None = None
) -> tuple[ParetoPoint, ...]:
    """The chosen strategy, the runners-up, and what closed forms find.

    Args:
        plan: With its alternatives.
        pricing: Prices further strategies by closed forms, also on a half, a quarter
            and an eighth of the devices; None to keep to what the plan knows.
    """
    chosen = ParetoPoint(
        label=plan.strategy.label(),
        step_time_s=plan.prediction.step_time_s,
        peak_memory_bytes=plan.prediction.peak_memory_bytes,
        devices=plan.strategy.mesh.num_devices,
        origin="chosen",
        on_front=False,
    )
    others = [
        ParetoPoint(
            label=other.label,
            step_time_s=other.step_time_s,
            peak_memory_bytes=other.peak_memory_bytes,
            devices=devices_of_label(other.label),
            origin="runner-up",
            on_front=False,
        )
        for other in plan.provenance.alternatives
    ]
    known = {chosen.label, *(other.label for other in others)}
    more = [] if pricing is None else priced_points(plan, pricing)
    return _marked([chosen, *others, *(p for p in more if p.label not in known)])


def priced_points(plan: Plan, pricing: CostModel) -> list[ParetoPoint]:
    """The front of step time and memory, by closed forms, per number of devices.

    What was pinned stays pinned.
    """
    context = pricing.context
    pins = normalize_pins(read_pins(dict(plan.provenance.pinned)))
    points: list[ParetoPoint] = []
    for count in _counts(len(context.order)):
        model = CostModel(context.reordered(context.order[:count]))
        facts = gather_facts(
            context.graph,
            context.cluster,
            global_batch=plan.workload.global_batch,
            target="any" if plan.not_runnable else "meshwright",
            precision=context.precision,
            optimizer=context.optimizer,
            regime=context.regime,
        )
        kept: list[ParetoPoint] = []
        seen = 0
        for table in enumerate_strategies(facts, num_devices=count, pins=pins):
            kept += _front_of(table, model, count)
            seen += len(table)
            if seen >= _MOST_ROWS:
                break
        points += _thinned(kept)
    return points


def _counts(devices: int) -> list[int]:
    """All, a half, a quarter, an eighth, as far as they are whole."""
    counts = [devices]
    while counts[-1] % 2 == 0 and len(counts) <= _HALVINGS:
        counts.append(counts[-1] // 2)
    return counts


def _front_of(
    table: StrategyTable, model: CostModel, count: int
) -> Iterator[ParetoPoint]:
    """Rows of a table that fit and that no other row of it beats in both."""
    costs = model.table(table)
    seconds = np.where(costs.fits, costs.step_time_s, np.inf)
    for row in _front(seconds, costs.memory_bytes).tolist():
        if np.isfinite(seconds[row]):
            yield ParetoPoint(
                label=_label(table.row(row)),
                step_time_s=float(seconds[row]),
                peak_memory_bytes=float(costs.memory_bytes[row]),
                devices=count,
                origin="closed form",
                on_front=False,
            )


def _label(row: Mapping[str, int]) -> str:
    kind = RECOMPUTE_NAMES[row["recompute"]]
    return skeleton(row).label() + ("" if kind == "none" else f" {kind}")


def _front(
    seconds: NDArray[np.float64], size: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Indices of what nothing beats in both, fastest first."""
    order = np.lexsort((size, seconds))
    lowest = np.minimum.accumulate(size[order])
    better = np.ones(len(order), dtype=bool)
    better[1:] = size[order][1:] < lowest[:-1] * (1 - _EQUAL)
    return np.asarray(order[better])


def _thinned(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """The front of some points; of a long one the ends and what is far apart."""
    if not points:
        return []
    seconds = np.array([point.step_time_s for point in points])
    size = np.array([point.peak_memory_bytes for point in points])
    front = _front(seconds, size)
    if len(front) > _PER_COUNT:
        places = np.log(seconds[front])
        wanted = np.linspace(places[0], places[-1], _PER_COUNT)
        front = front[np.unique(np.abs(places[:, None] - wanted).argmin(axis=0))]
    return [points[int(index)] for index in front]


def _marked(points: Sequence[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """The same, each told whether another one beats it in all three."""
    values = np.array(
        [(p.step_time_s, p.peak_memory_bytes, p.devices) for p in points], dtype=float
    )
    no_worse = np.all(values[None] <= values[:, None] * (1 + _EQUAL), axis=2)
    better = np.any(values[None] < values[:, None] * (1 - _EQUAL), axis=2)
    beaten = np.asarray(np.any(no_worse & better, axis=1))
    return tuple(
        replace(point, on_front=not lost)
        for point, lost in zip(points, beaten.tolist(), strict=True)
    )
