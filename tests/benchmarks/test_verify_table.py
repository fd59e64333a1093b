"""Meshes of the table of dry runs, and what it says of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import verify_table
from benchmarks.verify_table import Row, _summary, meshes
from planner.schema.schedules import schedule_names
from planner.schema.verification import Deviation


def test_meshes_cover_models_axes_and_schedules() -> None:
    rows = meshes()
    assert len({tuple(row.items()) for row in rows}) == len(rows) >= 40
    assert len({row["model"] for row in rows}) >= 5
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        assert any(row[axis] > 1 for row in rows), axis
    assert {row["zero_stage"] for row in rows} == {0, 1, 2, 3}
    assert {row["recompute"] for row in rows} == {"none", "selective", "full"}
    schedules = {row["schedule"] for row in rows}
    assert schedules >= set(schedule_names()) - {"LoopedBFS"}


def _row(label: str, *pairs: tuple[float, float]) -> Row:
    names = ("peak memory, pp rank 0", "send, busiest rank")
    return Row(
        model="llama",
        compute="bfloat16",
        label=label,
        deviations=tuple(
            Deviation(name=name, predicted=predicted, found=found)
            for name, (predicted, found) in zip(names, pairs, strict=False)
        ),
        failure=None,
        wall_s=0.0,
    )


def test_the_summary_counts_meshes_and_names_the_worst() -> None:
    rows = [
        _row("a", (1.04e9, 1e9), (2e8, 2e8)),
        _row("b", (1.1e9, 1e9), (4.0, 0.0)),
        _row("c", (1e9, 1e9), (0.0, 1e9)),
    ]
    meshes_within, memory, sent, *worst = _summary(rows)
    assert meshes_within == "1 of 3 meshes are within 5% in everything."
    assert memory.startswith("2 of 3 peaks of memory")
    assert sent.startswith("1 of 2 sums of bytes")
    assert [line.split(",")[0] for line in worst] == [
        "llama bfloat16 c",
        "llama bfloat16 b",
    ]


@pytest.mark.parametrize(
    "label",
    [
        "llama float32 dp_replicate8 mb2x2 float32 ring",
        "llama bfloat16 dp_shard8 zero2 mb2x2 ring",
        "llama bfloat16 tp4 mb2x2 ring",
        "llama bfloat16 dp_shard2 cp4 zero3 mb2x2 full ring",
        "qwen3_moe bfloat16 dp_shard4 tp2 ep4 zero3 mb2x2 sp ring",
        pytest.param(
            "qwen3_moe bfloat16 dp_replicate2 dp_shard4 ep4 zero1 mb2x2 ring",
            marks=pytest.mark.further,
        ),
    ],
)
def test_predictions_equal_what_a_dry_run_finds(label: str) -> None:
    (row,) = (row for row in meshes() if _name(row) == label)
    found = verify_table.verify_mesh(row)
    assert found.failure is None
    for each in found.deviations:
        peak = each.name.startswith("peak memory")
        assert not each.beyond(0.02 if peak else 1e-4), each


def _name(row: dict[str, Any]) -> str:
    label = verify_table.strategy_of(row).label()
    return f"{row['model']} {row['compute']} {label}"
