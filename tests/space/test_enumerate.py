"""The enumerator against brute force, pins and typing errors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from planner.errors import StrategyError, UnknownNameError
from planner.schema import SCHEDULES
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
REPRESENTATIVES = [SCHEDULES.index(n) for n in ("GPipe", "1F1B", "Interleaved1F1B")]


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
        fits = facts.seq_len is not None and facts.seq_len % (cp * tp) == 0
        for ep, zero, schedule, virtual, size, many, again in itertools.product(
            (1, 2), range(4), REPRESENTATIVES, range(1, 6), sizes, sizes, range(3)
        ):
            if pp > 1 and SCHEDULES[schedule] == "GPipe" and many >= pp:
                continue
            if SCHEDULES[schedule] == "Interleaved1F1B" and virtual == 1:
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


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"tpp": 2}, "did you mean 'tp'"),
        ({"schedule": "1f1b"}, "unknown schedule '1f1b'"),
        ({"schedule": "Interleaved1F1"}, "did you mean"),
        ({"recompute": "ful"}, "did you mean 'full'"),
    ],
)
def test_typing_errors_name_the_nearest(pins: dict[str, Any], words: str) -> None:
    with pytest.raises(UnknownNameError, match=words):
        normalize_pins(pins)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"tp": 0}, "pin tp=0 is below 1"),
        ({"zero_stage": -1}, "pin zero_stage=-1 is below 0"),
        ({"zero_stage": 4}, "pin zero_stage=4 is above 3"),
        ({"sequence_parallel": 2}, "pin sequence_parallel=2 is above 1"),
        ({"pp": "two"}, "pin pp='two' is not a whole number"),
        ({"pp": 2.5}, "pin pp=2.5 is not a whole number"),
        ({"pp": None}, "pin pp=None is not a whole number"),
    ],
)
def test_values_that_are_no_degrees_are_refused(
    pins: dict[str, Any], words: str
) -> None:
    with pytest.raises(StrategyError, match=words):
        normalize_pins(pins)


def test_pins_from_a_shell_are_text() -> None:
    pins = normalize_pins({"tp": "8", "schedule": "1F1B", "sequence_parallel": True})
    assert pins == {"tp": 8, "schedule": 1, "sequence_parallel": 1}
