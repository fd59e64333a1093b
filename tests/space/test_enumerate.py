"""The enumerator against brute force, with and without pins."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from planner.schema.schedules import schedule_name, schedule_names, schedule_spec
from planner.space import (
    Facts,
    StrategyTable,
    enumerate_strategies,
    legal,
    normalize_pins,
)
from tests.cost.made import table_of

FACTS = Facts(
    num_devices=4,
    global_batch=8,
    seq_len=16,
    num_units=5,
    tp_dims={"num_heads": 8},
    num_experts=2,
    target="any",
)
REPRESENTATIVES = [schedule_spec(n).code for n in ("GPipe", "1F1B", "Interleaved1F1B")]


def every_row(facts: Facts, count: int) -> set[tuple[int, ...]]:
    """Legal rows on exactly ``count`` devices, by trying all there are.

    As documented: GPipe in a pipeline only where there are too few microbatches for
    1F1B, sequence parallelism wherever it divides.
    """
    degrees = [d for d in range(1, count + 1) if count % d == 0]
    sizes = [s for s in range(1, facts.global_batch + 1) if facts.global_batch % s == 0]
    rows = []
    for pp, rep, shard, cp, tp in itertools.product(degrees, repeat=5):
        if pp * rep * shard * cp * tp != count:
            continue
        chunks = (2 * cp if cp > 1 else 1) * tp
        fits = facts.seq_len is not None and facts.seq_len % chunks == 0
        for ep, zero, schedule, virtual, size, many, again in itertools.product(
            (1, 2), range(4), REPRESENTATIVES, range(1, 6), sizes, sizes, range(3)
        ):
            if pp > 1 and schedule_name(schedule) == "GPipe" and many >= pp:
                continue
            if schedule_name(schedule) == "Interleaved1F1B" and virtual == 1:
                continue  # It is 1F1B then.
            rows.append(
                (
                    *(pp, rep, shard, cp, tp, ep, zero, schedule, virtual),
                    *(size, many, again, int(tp > 1 and fits)),
                )
            )
    table = StrategyTable.from_columns(
        **dict(
            zip(
                StrategyTable.__dataclass_fields__, zip(*rows, strict=True), strict=True
            )
        )
    )
    return {tuple(r.values()) for r in table[legal(table, facts)].rows()}


def test_zero_shards_over_cp_alone_where_one_sample_is_all_there_is() -> None:
    facts = replace(FACTS, global_batch=1)
    rows = [
        row
        for table in enumerate_strategies(facts, num_devices=4, pins={"cp": 4})
        for row in table.rows()
    ]
    assert {(row["dp_shard"], row["cp"]) for row in rows} == {(1, 4)}
    assert {row["zero_stage"] for row in rows} == {0, 1, 2, 3}


def found(facts: Facts, **options: Any) -> list[tuple[int, ...]]:
    tables = enumerate_strategies(facts, **options)
    return [tuple(r.values()) for table in tables for r in table.rows()]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("target", ["any", "meshwright"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"seq_len": None, "num_experts": 0, "has_sharding": False}],
    ids=["all axes", "plain"],
)
def test_exactly_the_legal_set(
    count: int, target: str, changes: dict[str, Any]
) -> None:
    facts = replace(FACTS, target=target, **changes)
    rows = found(facts, num_devices=count)
    assert len(rows) == len(set(rows))
    assert set(rows) == every_row(facts, count)


def test_tables_of_any_size_hold_the_same_rows() -> None:
    assert found(FACTS, rows=1) == found(FACTS, rows=10**6)


@pytest.mark.parametrize(
    "pins",
    [
        {"tp": 2},
        {"schedule": "ZBVZeroBubble"},
        {"schedule": "GPipe", "pp": 2},
        {"zero_stage": 3, "recompute": "full"},
        {"microbatch_size": 2, "num_microbatches": 2},
        {"virtual_stages": 2},
        {"sequence_parallel": 0, "tp": 2},
        {"dp_replicate": 2, "dp_shard": 2},
        {"ep": 2},
    ],
    ids=str,
)
def test_pins_hold_and_leave_something(pins: dict[str, Any]) -> None:
    numbers = normalize_pins(pins)
    names = list(StrategyTable.__dataclass_fields__)
    rows = found(FACTS, pins=numbers)
    assert rows
    for knob, value in numbers.items():
        assert {r[names.index(knob)] for r in rows} == {value}
    mask = legal(table_of(*(dict(zip(names, r, strict=True)) for r in rows)), FACTS)
    assert mask.all()


def test_pins_pick_from_the_unpinned_rows() -> None:
    names = list(StrategyTable.__dataclass_fields__)
    everything = found(FACTS)
    pinned = found(FACTS, pins={"tp": 2, "recompute": 1})
    at = (names.index("tp"), names.index("recompute"))
    assert set(pinned) == {r for r in everything if (r[at[0]], r[at[1]]) == (2, 1)}


def test_pins_that_no_mesh_obeys_leave_nothing() -> None:
    assert found(FACTS, pins={"tp": 3}) == []
    assert found(FACTS, pins={"pp": 4, "dp_shard": 4}) == []


@cache
def whole_space(target: str) -> StrategyTable:
    """Every legal row on 4 devices of all schedules, by trying all there are."""
    columns: dict[str, Any] = {
        **dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), (1, 2, 4)),
        "ep": (1, 2),
        "zero_stage": range(4),
        "schedule": range(len(schedule_names())),
        "virtual_stages": range(1, 6),
        "microbatch_size": (1, 2, 5, 10),
        "num_microbatches": (1, 2, 5, 10),
        "recompute": range(3),
        "sequence_parallel": range(2),
    }
    mesh = [
        degrees
        for degrees in itertools.product((1, 2, 4), repeat=5)
        if math.prod(degrees) == 4
    ]
    rest = list(columns)[5:]
    grid = np.meshgrid(
        np.arange(len(mesh)), *(np.array(columns[n]) for n in rest), indexing="ij"
    )
    index, *others = (axis.reshape(-1) for axis in grid)
    table = StrategyTable.from_columns(
        **dict(zip(list(columns)[:5], np.array(mesh)[index].T, strict=True)),
        **dict(zip(rest, others, strict=True)),
    )
    facts = replace(TEN, target=target)
    table = table[np.flatnonzero(table.pp * table.virtual_stages <= facts.num_units)]
    samples = table.microbatch_size * table.num_microbatches
    samples = samples * table.dp_replicate * table.dp_shard
    table = table[np.flatnonzero(samples == facts.global_batch)]
    return table[np.flatnonzero(legal(table, facts))]


#: 5 microbatches over 2 stages make uneven rounds, which Interleaved1F1B refuses.
TEN = replace(FACTS, global_batch=10)


@pytest.mark.parametrize("target", ["any", "meshwright"])
def test_pins_leave_something_wherever_something_is_legal(target: str) -> None:
    table, facts = whole_space(target), replace(TEN, target=target)
    rng = np.random.default_rng(0)
    names = list(StrategyTable.__dataclass_fields__)
    legal_ones = 0
    for _ in range(120):
        # Half of the pins are taken from one legal row, the others are drawn.
        knobs = rng.choice(names, size=rng.integers(1, 5), replace=False)
        rows = rng.integers(len(table), size=len(knobs))
        rows[: len(knobs) * int(rng.integers(2))] = rows[0]
        pins = {
            str(knob): int(getattr(table, knob)[row])
            for knob, row in zip(knobs, rows, strict=True)
        }
        masks = [getattr(table, knob) == value for knob, value in pins.items()]
        exists = bool(np.logical_and.reduce(masks).any())
        legal_ones += exists
        assert bool(found(facts, num_devices=4, pins=pins)) == exists, pins
    assert 30 < legal_ones < 120


def test_a_stand_in_is_there_only_where_it_is_needed() -> None:
    names = list(StrategyTable.__dataclass_fields__)
    many = names.index("num_microbatches")
    rows = [dict(zip(names, r, strict=True)) for r in found(TEN, num_devices=4)]
    looped = [r for r in rows if schedule_name(r["schedule"]) == "LoopedBFS"]
    assert {(r["pp"], r["num_microbatches"]) for r in looped} == {(2, 5)}
    filling = found(TEN, num_devices=4, pins={"schedule": 0, "pp": 2})
    assert {row[many] for row in filling} == {1, 2, 5, 10}
