"""Violations of a request without any legal strategy: rule, values, remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from planner.schema import AXES
from planner.search.base import Request
from planner.search.expert import ladder
from planner.space import RULES, StrategyTable, build_strategy, pin_text

__all__ = ["nearest_violations"]


def nearest_violations(request: Request) -> str:
    """Return the violations of the strategy that comes nearest to being legal.

    Args:
        request: A request without a legal strategy on any number of devices.
    """
    pins, facts = request.pins, request.facts
    degrees = {axis: pins[axis] for axis in AXES if axis in pins}
    need = math.prod(degrees.values())
    if need > facts.num_devices:
        return f"{_product(degrees)} needs {need} devices, {facts.num_devices} are free"
    counts = ("dp_replicate", "dp_shard", "microbatch_size", "num_microbatches")
    shares = {knob: pins[knob] for knob in counts if knob in pins}
    if facts.global_batch % math.prod(shares.values()):
        return f"{_product(shares)} must divide global_batch={facts.global_batch}"
    return _nearest(request, need) or _launcher_violations(request, need)


def _product(factors: Mapping[str, int]) -> str:
    text = " x ".join(pin_text(knob, value) for knob, value in factors.items())
    return text if len(factors) < 2 else f"{text} = {math.prod(factors.values())}"


def _nearest(request: Request, need: int) -> str:
    """Return the violations of the row that breaks the fewest rules; empty for none."""
    facts = request.facts
    counts = dict.fromkeys((facts.num_devices, need, 2 * need))
    tables = [ladder(request, count) for count in counts if count <= facts.num_devices]
    known = [table for table in tables if table is not None]
    if not known:
        return (
            f"no mesh of up to {facts.num_devices} devices divides "
            f"global_batch={facts.global_batch} as pinned"
        )
    table = StrategyTable.concatenate(known)
    violated = np.stack([rule.violated(table, facts) for rule in RULES[:-1]])
    # The last rule, about executors and launchers, presumes that the others hold.
    target = np.zeros(len(table), dtype=bool)
    whole = np.flatnonzero(~violated.any(axis=0))
    target[whole] = RULES[-1].violated(table[whole], facts)
    violated = np.concatenate([violated, target[None]])
    # Among rows that break equally few: the one whose first violated rule comes last.
    row = int(np.lexsort((-violated.argmax(axis=0), violated.sum(axis=0)))[0])
    return "; ".join(
        rule.violation(table.row(row), facts)
        for rule, breaks in zip(RULES, violated[:, row], strict=True)
        if breaks
    )


def _launcher_violations(request: Request, need: int) -> str:
    """Return the launcher's violations by devices and cuts of a row that is legal."""
    limits, order = request.launcher_limits, request.context.order
    if limits is None:
        return "legal strategies were not looked at"
    violation = limits.violation_of_order(order)
    if violation is not None:
        return str(violation)
    rows = ladder(request, len(order)) or ladder(request, need)
    names = request.context.graph.unit_names
    if rows is None:
        return f"{limits.target.title} can express no strategy on {len(order)} devices"
    row = rows.row(0)
    stages = row["pp"] * row["virtual_stages"]
    strategy = build_strategy(
        row,
        unit_names=names,
        bounds=[len(names) * stage // stages for stage in range(stages + 1)],
        sharding=request.facts.sharding,
        precision=request.context.precision,
        optimizer=request.context.optimizer,
        grad_clip_norm=request.context.grad_clip_norm,
        regime=request.context.regime,
        spatial=request.facts.spatial,
    )
    return "; ".join(map(str, limits.violations(strategy)))
