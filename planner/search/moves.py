"""Solutions, and random or neighbouring changes of their orders and rows.

A changed order has as many devices as before, each once, among those that may be used.
A changed row is legal and keeps the pins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.schema import AXES
from planner.schema.schedules import schedule_name, schedule_spec, schedules
from planner.search.refine import schedule_variants
from planner.space import Facts, StrategyTable, legal, zero_fits

__all__ = [
    "USUAL",
    "Row",
    "Solution",
    "block_sizes",
    "crossed",
    "moved_order",
    "neighbours",
    "neighbours_of",
    "refilled",
    "resized",
    "spare_of",
    "swapped",
]

Index = NDArray[np.int64]
Row = Mapping[str, int]

#: Points of crossover between the orders of two parents.
_POINTS = 5
#: Schedules that have textbook formulas.
USUAL = tuple(spec.name for spec in schedules() if spec.has_textbook_time)
_PRIMES = (2, 3, 5, 7, 11, 13)
#: Largest microbatch and most virtual stages of a changed row.
_MOST_SAMPLES, _MOST_VIRTUAL = 64, 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """A row of the strategy table and the device of each of its ranks.

    Attributes:
        order: Device id of each rank. Shape [ranks].
        row: A row from :meth:`planner.space.StrategyTable.row`; the product of its
            degrees is the number of ranks.
        key: Identity of the solution.
    """

    order: Index
    row: Row
    key: tuple[bytes, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        key = (self.order.tobytes(), tuple(self.row.values()))
        object.__setattr__(self, "key", key)

    @property
    def mesh(self) -> tuple[int, ...]:
        """Degrees of the mesh, ep last."""
        return tuple(self.row[axis] for axis in (*AXES, "ep"))


# -- Orders ----------------------------------------------------------------------


def block_sizes(row: Row, host: int) -> tuple[int, ...]:
    """Return the numbers of neighbouring ranks that are worth moving together.

    A single rank, the ranks that share a layer, the shards of a replica, a stage, a
    host.

    Args:
        row: A row of the strategy table.
        host: Number of devices on a host.
    """
    inner, stage = row["tp"] * row["cp"], 1
    for axis in AXES[1:]:
        stage *= row[axis]
    ranks = stage * row["pp"]
    found = {1, inner, inner * row["dp_shard"], stage, host, math.gcd(host, stage)}
    return tuple(sorted(size for size in found if 2 * size <= ranks)) or (1,)


def swapped(order: Index, size: int, first: int = 0, step: int = 1) -> Iterator[Index]:
    """Yield the order with two of its blocks exchanged, for all pairs or some.

    Args:
        order: Device id of each rank. Shape [ranks].
        size: Ranks of a block.
        first: Number of the first pair; pairs are sorted by their first block.
        step: Distance of the pairs that are exchanged.
    """
    count = len(order) // size
    ones, others = np.triu_indices(count, k=1)
    for one, other in zip(
        (ones[first::step] * size).tolist(),
        (others[first::step] * size).tolist(),
        strict=True,
    ):
        made = order.copy()
        made[one : one + size] = order[other : other + size]
        made[other : other + size] = order[one : one + size]
        yield made


def moved_order(
    order: Index, spare: Index, size: int, rng: np.random.Generator
) -> Index:
    """Return the order after a random exchange, insertion, reversal or rotation.

    Args:
        order: Device id of each rank. Shape [ranks].
        spare: Unused devices; a block may be replaced by some of them.
        size: Ranks of a block, at most half of the ranks.
        rng: Generator of all random draws.
    """
    if len(spare) and rng.random() < 0.25:
        return _replaced(order, spare, size, rng)
    count = len(order) // size
    if count < 2:
        return order.copy()
    first, last = int(rng.random() * count), int(rng.random() * (count - 1))
    first, last = min(first, last), max(first, last) + (last >= first)
    kind = int(rng.random() * 4)
    made = order.copy()
    start, middle, stop = first * size, last * size, (last + 1) * size
    if kind == 0:
        made[start : start + size] = order[middle:stop]
        made[middle:stop] = order[start : start + size]
    elif kind == 1:
        made[start + size : stop] = order[start:middle]
        made[start : start + size] = order[middle:stop]
    elif kind == 2:
        blocks = order[start:stop].reshape(-1, size)
        made[start:stop] = blocks[::-1].reshape(-1)
    else:
        turn = start + size * int(1 + rng.random() * (last - first))
        made[start : start + stop - turn] = order[turn:stop]
        made[start + stop - turn : stop] = order[start:turn]
    return made


def _replaced(order: Index, spare: Index, size: int, rng: np.random.Generator) -> Index:
    """Replace a random block by spare devices."""
    many = min(size, len(spare))
    start = int(rng.integers(len(order) // many)) * many
    made = order.copy()
    begin = int(rng.integers(len(spare) - many + 1))
    made[start : start + many] = spare[begin : begin + many]
    return made


def crossed(one: Index, other: Index, rng: np.random.Generator) -> Index:
    """Cross two orders: pieces of one in place, the rest in the order of the other.

    Args:
        one: Device id of each rank; the result is as long. Shape [ranks].
        other: Another order, of any devices and any length.
        rng: Generator of the crossover points.
    """
    points = np.sort(rng.integers(0, len(one) + 1, size=_POINTS))
    piece = np.searchsorted(points, np.arange(len(one)), side="right")
    kept = piece % 2 == 0
    taken = set(one[kept].tolist())
    candidates = dict.fromkeys([*other.tolist(), *one.tolist()])
    fill = [device for device in candidates if device not in taken]
    made = one.copy()
    made[~kept] = fill[: int((~kept).sum())]
    return made


def spare_of(pool: Index, order: Index) -> Index:
    """Return the devices of a pool that an order does not use, by id."""
    left = np.zeros(1 + max(int(pool.max()), int(order.max())), dtype=bool)
    left[pool] = True
    left[order] = False
    return np.flatnonzero(left)


def refilled(
    order: Index, old: Row, new: Row, spare: Index, rng: np.random.Generator
) -> Index:
    """Add or remove devices of an order for a row with another number of ranks.

    Whole stages are added or removed if the number of stages changes, else equally many
    devices of every stage.

    Args:
        order: Device id of each rank of the old row.
        old: Row of the order.
        new: Row with more or fewer ranks.
        spare: Unused devices, at least as many as are added.
        rng: Generator of the place where devices are removed.
    """
    ranks = math.prod(new[axis] for axis in AXES)
    stages = new["pp"] if new["pp"] == old["pp"] else 1
    grid, each = order.reshape(stages, -1), ranks // stages
    if each > grid.shape[1]:
        more = spare[: ranks - len(order)].reshape(stages, -1)
        return np.concatenate([grid, more], axis=1).reshape(-1)
    gone = grid.shape[1] - each
    start = gone * int(rng.random() * (grid.shape[1] // gone)) if gone else 0
    kept = np.delete(grid, slice(start, start + gone), axis=1)
    return np.ascontiguousarray(kept.reshape(-1))


# -- Rows ------------------------------------------------------------------------


def neighbours(
    row: Row,
    facts: Facts,
    pins: Mapping[str, int],
    schedules: Sequence[str] = USUAL,
) -> StrategyTable | None:
    """Return every legal row one change away that keeps pins and number of devices.

    A change moves a factor from one axis to another, or into ep; or sets another size
    of microbatches, ZeRO stage, recomputation, schedule or number of virtual stages.

    Args:
        row: A legal row.
        facts: Facts for the rules.
        pins: Columns that stay.
        schedules: Schedules to change to; those like 1F1B are priced fastest.
    Returns:
        None if there is no such row.
    """
    return neighbours_of([row], facts, pins, schedules)[0]


def neighbours_of(
    rows: Sequence[Row],
    facts: Facts,
    pins: Mapping[str, int],
    schedules: Sequence[str] = USUAL,
) -> list[StrategyTable | None]:
    """Return the :func:`neighbours` of each row; the rules run once for all."""
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
    """Return every legal row with another degree along one axis.

    Args:
        row: A legal row.
        facts: Facts for the rules.
        pins: Columns that stay.
        most: Number of free devices.
    Returns:
        None if there is no such row.
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
        for virtual in range(2, _MOST_VIRTUAL + 1):
            yield {**row, "virtual_stages": virtual}


def _completed(row: dict[str, int], facts: Facts) -> dict[str, int] | None:
    """Complete a changed row: set the columns that depend on the changed ones."""
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
    if not zero_fits(row["zero_stage"], row["dp_shard"], row["cp"]):
        made["zero_stage"] = int(row["dp_shard"] > 1)
    if row["tp"] == 1:
        made["sequence_parallel"] = 0
    return made
