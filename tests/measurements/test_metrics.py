"""Metrics that sources print, against closed forms."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.kernels.low_precision import peak_flops_per_s
from planner.errors import CalibrationError
from planner.measurements.cases import Case, prepare
from planner.measurements.metrics import (
    MEMORY_METRICS,
    TIME_METRICS,
    FlopCount,
    convention_of,
    step_seconds,
    time_metric,
    time_metric_named,
)
from planner.measurements.points import Point
from tests.measurements.rows import small

LAYERS, HIDDEN, SEQ, VOCAB = 4, 512, 512, 51200


@cache
def _case() -> Case:
    return prepare(small(zero=1))


def _value(step_s: float, **row: object) -> float:
    case = _case()
    return time_metric(
        step_s, small(**row), case.setting.graph, case.strategy, case.device
    )


@settings(deadline=None)
@given(
    metric=st.sampled_from([*sorted(TIME_METRICS), "days_for_2T_tokens"]),
    seconds=st.floats(1e-4, 1e4),
    source=st.sampled_from(["NeMo", "Megatron-LM", "a blog", "Megatron-Bridge"]),
)
def test_metrics_and_seconds_are_each_other_s_inverse(
    metric: str, seconds: float, source: str
) -> None:
    case, row = _case(), small(metric=metric, source=source)
    value = _value(seconds, metric=metric, source=source)
    again = step_seconds(value, row, case.setting.graph, case.strategy, case.device)
    assert again == pytest.approx(seconds, rel=1e-9)


def test_every_metric_is_explained_once() -> None:
    assert all(metric.about for metric in TIME_METRICS.values())
    assert all(MEMORY_METRICS.values())
    assert not TIME_METRICS.keys() & MEMORY_METRICS.keys()


def test_the_most_direct_figure_speaks_for_a_run() -> None:
    names = ["days_for_300B_tokens", "tflops_per_gpu", "mfu_pct"]
    names += ["tokens_per_s", "sequences_per_s", "step_time_ms"]
    found = [time_metric_named(name) for name in names]
    assert [one.rank for one in found if one] == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    "name", ["loss", "peak_mem_gb", "days_for_0B_tokens", "days_for_B_tokens"]
)
def test_names_that_tell_nothing_of_time(name: str) -> None:
    assert time_metric_named(name) is None


def test_a_figure_of_another_plan_speaks_for_no_run() -> None:
    found = time_metric_named("tflops_per_gpu_best_without_cp")
    assert found is not None
    assert found.rank is None


def test_rates_by_hand() -> None:
    # 64 samples of 512 tokens on 8 devices.
    assert _value(2.0, metric="iter_time_s") == 2.0
    assert _value(2.0, metric="samples_per_s") == 32.0
    assert _value(2.0, metric="tokens_per_s_per_gpu") == 64 * 512 / 8 / 2
    days = 300e9 / (64 * 512) * 2 / 86_400
    assert _value(2.0, metric="days_for_300B_tokens") == pytest.approx(days)
    assert _value(2.0, metric="days_for_1.5T_tokens") == pytest.approx(5 * days)


@pytest.mark.parametrize(
    ("name", "other", "ratio"),
    [
        ("step_time_s", "iter_time_s", 1),
        ("step_time_ms", "iter_time_s", 1000),
        ("iter_time_ms", "iter_time_s", 1000),
        ("sequences_per_s", "samples_per_s", 1),
        ("samples_per_s", "samples_per_s_per_gpu", 8),
        ("tokens_per_s", "tokens_per_s_per_gpu", 8),
        ("tflops_total", "tflops_per_gpu", 8),
        ("tflops_total", "pflops_total", 1000),
    ],
)
def test_other_units_of_the_same(name: str, other: str, ratio: float) -> None:
    found = _value(2.0, metric=name) / _value(2.0, metric=other)
    assert found == pytest.approx(ratio)


def test_hardware_utilisation_counts_what_is_computed_again() -> None:
    # Three passes of layers and head, and the layers' forward once more.
    graph = _case().setting.graph
    passes = [
        FlopCount(recompute=again).of(graph, 64, "full") for again in (True, False)
    ]
    hfu, mfu = (_value(2.0, metric=name) for name in ("hfu_pct", "mfu_pct"))
    assert hfu / mfu == pytest.approx(passes[0] / passes[1])
    assert hfu / mfu > 1.1


def test_mfu_is_flops_over_the_peak() -> None:
    tflops = _value(2.0, metric="tflops_per_gpu")
    mfu = _value(2.0, metric="mfu_pct")
    peak = peak_flops_per_s(_case().device, "bfloat16")
    assert peak == 312e12
    assert mfu == pytest.approx(100 * tflops * 1e12 / peak)


@pytest.mark.parametrize("batch", [1, 64, 1536])
def test_megatron_s_formula(batch: int) -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16lh): Narayanan et al. 2021, section 5.1."""
    attention, head = SEQ / (6 * HIDDEN), VOCAB / (16 * LAYERS * HIDDEN)
    flops = 96 * batch * SEQ * LAYERS * HIDDEN**2 * (1 + attention + head)
    counted = FlopCount(recompute=True).of(_case().setting.graph, batch, "full")
    assert counted == pytest.approx(flops, rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_without_recomputation_layers_count_three_times(recompute: str) -> None:
    """72 B s l h^2 (1 + s / 6h + V / 12lh): the same without the fourth pass."""
    attention, head = SEQ / (6 * HIDDEN), VOCAB / (12 * LAYERS * HIDDEN)
    flops = 72 * SEQ * LAYERS * HIDDEN**2 * (1 + attention + head)
    graph = _case().setting.graph
    for count in (FlopCount(recompute=True), FlopCount()):
        assert count.of(graph, 1, recompute) == pytest.approx(flops, rel=1e-3)
    assert FlopCount().of(graph, 1, "full") == pytest.approx(flops, rel=1e-3)


def test_half_of_the_scores() -> None:
    graph = _case().setting.graph
    whole, half = (
        FlopCount().of(graph, 1, ""),
        FlopCount(attention=0.5).of(graph, 1, ""),
    )
    # 12 l h s^2 of whole attention, forward and backward.
    assert whole - half == pytest.approx(12 * LAYERS * HIDDEN * SEQ**2 / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("source", "attention", "recompute"),
    [
        ("Megatron-LM SC21", 1.0, True),
        ("Alpa OSDI22", 1.0, True),
        ("BLOOM", 1.0, True),
        ("NVIDIA Megatron-Bridge 25.09", 0.5, False),
        ("MosaicML", 1.0, False),
        ("NeMo", 1.0, False),
    ],
)
def test_conventions(source: str, attention: float, recompute: bool) -> None:
    count, assumed = convention_of(small(source=source))
    assert count == FlopCount(attention=attention, recompute=recompute)
    assert assumed == ""


def test_a_source_without_a_known_convention_says_so() -> None:
    count, assumed = convention_of(small(source="a blog"))
    assert count == FlopCount()
    assert "without recomputation" in assumed


@pytest.mark.parametrize(
    ("source", "row", "recompute"),
    [
        ("BigScience 104B", {}, True),
        ("Megatron-LM 2024", {}, False),
        ("BigScience 104B", {"metric": "mfu_pct"}, False),
        ("Megatron-LM 2024", {"notes": "HFU, as printed"}, True),
        ("a blog", {"notes": "TFLOP/s counts recompute"}, True),
        ("Megatron-LM SC21", {"notes": "without recomputation"}, False),
    ],
)
def test_notes_and_frameworks_say_what_counts(
    source: str, row: dict[str, str], recompute: bool
) -> None:
    assert convention_of(small(source=source, **row))[0].recompute is recompute


def test_memory_is_no_time() -> None:
    with pytest.raises(CalibrationError, match="peak_mem_gb"):
        _value(1.0, metric="peak_mem_gb")


def test_the_plan_s_batch_stands_in_for_the_row_s() -> None:
    row: Point = small(global_batch=None, metric="samples_per_s")
    case = prepare(row)
    samples = time_metric(1.0, row, case.setting.graph, case.strategy, case.device)
    assert samples == case.strategy.global_batch
