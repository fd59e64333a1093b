"""Small changes of a row of the strategy table.

Every row that comes out is legal and keeps the pins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from planner.schema.schedules import schedule_name, schedule_spec, schedules
from planner.search.moves import AXES, Row
from planner.search.refine import eager_variants, schedule_variants
from planner.space import Facts, StrategyTable, legal

__all__ = ["USUAL", "neighbours", "neighbours_of", "resized"]

#: Schedules that have textbook formulas.
USUAL = tuple(spec.name for spec in schedules() if spec.has_textbook_time)
_PRIMES = (2, 3, 5, 7, 11, 13)
#: Largest microbatch and most virtual stages that a row is changed to.
_MOST_SAMPLES, _MOST_VIRTUAL = 64, 8


def neighbours(
    row: Row,
    facts: Facts,
    pins: Mapping[str, int],
    schedules: Sequence[str] = USUAL,
) -> StrategyTable | None:
    """Every legal row one change away that keeps the pins and the devices.

    A factor moves from one axis to another, or into ep; another size of microbatches,
    ZeRO stage, recomputation, schedule or number of virtual stages.

    Args:
        row: Legal itself.
        facts: What the rules compare against.
        pins: Columns that stay.
        schedules: That may be changed to; those of 1F1B's kind are priced fastest.
    Returns:
        None if there is none.
    """
    return neighbours_of([row], facts, pins, schedules)[0]


def neighbours_of(
    rows: Sequence[Row],
    facts: Facts,
    pins: Mapping[str, int],
    schedules: Sequence[str] = USUAL,
) -> list[StrategyTable | None]:
    """The :func:`neighbours` of each of some rows, judged by the rules all at once."""
    made: list[dict[str, int]] = []
    ends = []
    for row in rows:
        unique: dict[tuple[int, ...], dict[str, int]] = {}
        for changed in (
            *_meshes(row),
            *_batches(row, facts),
            *_kinds(row, facts, schedules),
        ):
            one = _completed(changed, facts)
            if one is None or one == row:
                continue
            if all(one[knob] == value for knob, value in pins.items()):
                unique[tuple(one.values())] = one
        made += unique.values()
        ends.append(len(made))
    if not made:
        return [None] * len(rows)
    table = _table_of(made)
    kept = np.flatnonzero(legal(table, facts))
    cuts = np.searchsorted(kept, [0, *ends])
    parts = [kept[a:b] for a, b in itertools.pairwise(cuts.tolist())]
    return [table[part] if len(part) else None for part in parts]


def resized(
    row: Row, facts: Facts, pins: Mapping[str, int], most: int
) -> StrategyTable | None:
    """Every legal row with another degree along one axis, so of more or fewer devices.

    Args:
        row: Legal itself.
        facts: What the rules compare against.
        pins: Columns that stay.
        most: Devices that there are.
    Returns:
        None if there is none.
    """
    degrees = math.prod(row[axis] for axis in AXES)
    found: list[dict[str, int]] = []
    for axis in AXES:
        here = row[axis]
        near = {here + step for step in (-2, -1, 1, 2)}
        for degree in sorted(near | {here * 2, here * 3, here // 2, here // 3}):
            if degree < 1 or degree == here or degrees // here * degree > most:
                continue
            made = _completed({**row, axis: degree}, facts)
            if made and all(made[knob] == value for knob, value in pins.items()):
                found.append(made)
    return _legal_ones(found, facts)


def _legal_ones(rows: Sequence[Row], facts: Facts) -> StrategyTable | None:
    if not rows:
        return None
    table = _table_of(rows)
    kept = np.flatnonzero(legal(table, facts))
    return table[kept] if len(kept) else None


def _table_of(rows: Sequence[Row]) -> StrategyTable:
    return StrategyTable.from_columns(
        **{name: [row[name] for row in rows] for name in rows[0]}
    )


def _meshes(row: Row) -> Iterator[dict[str, int]]:
    for source in AXES:
        for target in AXES:
            if source == target:
                continue
            for prime in _PRIMES:
                if row[source] % prime == 0:
                    yield {
                        **row,
                        source: row[source] // prime,
                        target: row[target] * prime,
                    }
    for prime in _PRIMES:
        yield {**row, "ep": row["ep"] * prime}
        if row["ep"] % prime == 0:
            yield {**row, "ep": row["ep"] // prime}


def _batches(row: Row, facts: Facts) -> Iterator[dict[str, int]]:
    per_replica = facts.global_batch // (row["dp_replicate"] * row["dp_shard"])
    for size in range(1, min(per_replica, _MOST_SAMPLES) + 1):
        if per_replica % size == 0:
            yield {**row, "microbatch_size": size}


def _kinds(
    row: Row, facts: Facts, schedules: Sequence[str]
) -> Iterator[dict[str, int]]:
    for zero in range(4):
        yield {**row, "zero_stage": zero}
    for recompute in range(3):
        yield {**row, "recompute": recompute}
    yield {**row, "sequence_parallel": 1 - row["sequence_parallel"]}
    if row["pp"] > 1:
        yield from schedule_variants(row, facts.num_units, schedules)
        yield from eager_variants(row)
        for virtual in range(2, _MOST_VIRTUAL + 1):
            yield {**row, "virtual_stages": virtual}


def _completed(row: dict[str, int], facts: Facts) -> dict[str, int] | None:
    """Complete a changed row: number of microbatches, and what no longer applies."""
    per_replica, rest = divmod(
        facts.global_batch, row["dp_replicate"] * row["dp_shard"]
    )
    if rest or not per_replica:
        return None
    size = math.gcd(row["microbatch_size"], per_replica)
    made = {**row, "microbatch_size": size, "num_microbatches": per_replica // size}
    short = made["num_microbatches"] < row["pp"]
    if short and schedule_name(row["schedule"]) == "1F1B":
        # torch refuses 1F1B where microbatches do not fill the pipeline.
        made["schedule"] = schedule_spec("GPipe").code
    if row["pp"] == 1:
        made["schedule"], made["virtual_stages"] = schedule_spec("GPipe").code, 1
    if row["dp_shard"] == 1:
        made["zero_stage"] = 0
    elif row["zero_stage"] == 0:
        made["zero_stage"] = 1
    if row["tp"] == 1:
        made["sequence_parallel"] = 0
    return made
