"""Plans that sources' scripts and tables fill in."""

from __future__ import annotations

from typing import Any

import pytest

from planner.measurements.cases import prepare
from planner.measurements.known_plans import known_plan, optimizer_of
from planner.measurements.points import Point
from tests.measurements.rows import point

BLANK: dict[str, Any] = dict.fromkeys(
    ("dp", "tp", "pp", "microbatch", "global_batch", "zero")
)


def alpa(method: str, count: int, **changes: Any) -> Point:
    """A row of the artifact: nothing of its plan but the method's name."""
    row = {
        "source": "Alpa OSDI22 artifact results_e2e_ref.tsv",
        "model": "gpt",
        "n_gpus": count,
        "notes": f"method=parax.{method}",
        "metric": "peak_mem_gb",
        "schedule": "",
        **BLANK,
    }
    return point(**{**row, **changes})


def shallow(method: str, count: int, **changes: Any) -> Point:
    source = "Alpa OSDI22 artifact results_intra_ablation_ref.tsv"
    return alpa(method, count, source=source, **changes)


def shape(row: Point) -> tuple[int | None, ...]:
    filled, _ = known_plan(row)
    return filled.dp, filled.tp, filled.pp, filled.ep, filled.zero, filled.microbatch


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (alpa("intra_only", 8, pp=1), (4, 2, 1, None, 2, 8)),
        (alpa("intra_only", 32, pp=1), (4, 8, 1, None, 2, 2)),
        (alpa("intra_only", 8, pp=1, model="moe"), (8, 1, 1, 8, 2, 8)),
        # 64 microbatches at least, and 16 a stage.
        (alpa("inter_only", 2, tp=1), (1, 1, 2, None, 0, 16)),
        (alpa("inter_only", 16, tp=1), (1, 1, 16, None, 0, 4)),
        # More stages than layers: two devices to a layer.
        (alpa("inter_only", 64, tp=1, layers=48), (1, 2, 32, None, 0, 1)),
        (shallow("zero_3", 4, dp=4, tp=1, pp=1, zero=3), (4, 1, 1, 1, 3, 2)),
        (shallow("auto_sharding", 8), (4, 2, 1, 1, 2, 2)),
        (shallow("auto_sharding", 8, model="moe"), (8, 1, 1, 8, 2, 1)),
        (shallow("heuristic", 4), (1, 4, 1, 1, 0, 8)),
    ],
)
def test_methods_of_alpa(row: Point, expected: tuple[int | None, ...]) -> None:
    assert shape(row) == expected
    _, said = known_plan(row)
    assert "scripts" in said[0]


@pytest.mark.parametrize(
    "row",
    [
        point(notes="method=parax.intra_only"),
        alpa("ppdp", 32),
        alpa("intra_only", 3),
        alpa("intra_only", 8, model="wresnet"),
    ],
)
def test_what_nothing_is_known_of_stays(row: Point) -> None:
    assert known_plan(row) == (row, ())


def test_what_a_row_states_stays() -> None:
    filled, _ = known_plan(alpa("intra_only", 8, pp=1, microbatch=3, zero=1))
    assert (filled.microbatch, filled.zero) == (3, 1)


def test_korthikanti_interleaves_two_of_four_models() -> None:
    rows = (
        point(
            source="Korthikanti 2022",
            hidden=h,
            pp=8,
            microbatch=None,
            global_batch=None,
            schedule="",
        )
        for h in (12288, 25600)
    )
    found = [known_plan(row)[0] for row in rows]
    assert [(row.vp, row.microbatch, row.global_batch) for row in found] == [
        (3, 1, 64),
        (None, 1, 512),
    ]


def test_models_with_experts_of_alpa_have_no_moments() -> None:
    assert optimizer_of(alpa("intra_only", 8, model="moe")).states_per_parameter == 0
    assert optimizer_of(alpa("intra_only", 8)).states_per_parameter == 2
    theirs = alpa("x", 8, model="moe", notes="method=deepspeed")
    assert optimizer_of(theirs).states_per_parameter == 2


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("pure bf16", "bfloat16"),
        ("pure bfloat16", "bfloat16"),
        ("bf16", "float32"),
        ("pure fp16", "float32"),
    ],
)
def test_states_of_runs_in_bfloat16_alone(precision: str, dtype: str) -> None:
    assert optimizer_of(point(precision=precision)).state_dtype == dtype


def test_a_pipeline_of_torchtitan_has_as_many_microbatches_as_stages() -> None:
    row = point(
        source="torchtitan benchmarks 2024-12",
        gpu="H100",
        tp=2,
        pp=4,
        dp=2,
        microbatch=1,
        global_batch=64,
        layers=25,
        notes="microbatch size=1 is inferred",
    )
    cut = prepare(row).strategy
    assert (cut.num_microbatches, cut.microbatch_size) == (4, 8)
    # What does not divide goes behind the first stage; ends have embedding and head.
    assert [len(stage.modules) for stage in cut.stages] == [8, 7, 6, 8]


@pytest.mark.parametrize(
    ("hidden", "given", "kind"),
    [
        (768, "", "none"),
        (4096, "", "selective"),
        (12288, "", "full"),
        (12288, "none", "none"),
    ],
)
def test_pax_recomputes_as_its_configs_say(hidden: int, given: str, kind: str) -> None:
    source = "NVIDIA JAX-Toolbox Pax README (2023-2024)"
    row = point(source=source, hidden=hidden, recompute=given)
    assert known_plan(row)[0].recompute == kind
    other = point(source="JAX-Toolbox MaxText README", hidden=hidden, recompute=given)
    assert known_plan(other)[0].recompute == given
