"""Rows that can be compared, and rows that are left out."""

from __future__ import annotations

import pytest

from planner.calibration.rows import (
    doubtful_reason,
    group_of,
    precision_family,
)
from tests.measurements.rows import point


@pytest.mark.parametrize(
    ("words", "family"),
    [
        ("fp16", "16 bit"),
        ("compile bf16", "16 bit"),
        ("BF16", "16 bit"),
        ("amp_fp8", "8 bit"),
        ("compile fp8 AsyncTP", "8 bit"),
        ("FP8-MX", "8 bit"),
        ("MXFP8", "8 bit"),
        ("NVFP4", "4 bit"),
        ("tf32", "32 bit"),
        ("", "precision?"),
    ],
)
def test_width_of_numbers(words: str, family: str) -> None:
    assert precision_family(words) == family


@pytest.mark.parametrize(
    "same",
    [
        {"tp": 2},
        {"dp": 4, "tp": 2},
        {"microbatch": 1},
        {"schedule": "interleaved", "vp": 2},
        {"recompute": "none"},
        {"zero": 3},
        {"value": 9.0, "metric": "tflops_per_gpu"},
        {"precision": "compile bf16"},
    ],
)
def test_plans_are_compared(same: dict[str, object]) -> None:
    assert group_of(point(**same)) == group_of(point())


@pytest.mark.parametrize(
    "other",
    [
        {"source": "blog"},
        {"model": "Llama"},
        {"layers": 25},
        {"seq": 4096},
        {"gpu": "H100"},
        {"n_gpus": 32},
        {"global_batch": 64},
        {"precision": "fp8"},
        {"layers": None, "params": 1e9},
    ],
)
def test_other_work_or_machines_are_not(other: dict[str, object]) -> None:
    assert group_of(point(**other)) != group_of(point())


def test_models_without_a_shape_are_told_apart_by_their_size() -> None:
    small = point(layers=None, params=1e9)
    assert group_of(small) != group_of(point(layers=None, params=2e9))
    assert group_of(small) == group_of(point(layers=None, params=1e9, tp=2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"flag": "seq inferred"}, "flag: seq inferred"),
        ({"metric": "loss"}, "loss is not predicted"),
        ({"metric": "tflops_per_gpu_best_without_cp"}, "another plan"),
        ({"value": 0.0}, "iter_time_s=0 is not positive"),
        ({"tp": 3}, "tp=3 x pp=2 x cp=1 do not divide n_gpus=16"),
        ({"cp": 2}, "n_gpus=16 over tp=4 x pp=2 x cp=2 is 1"),
        ({"global_batch": 30}, "no multiple of dp=2 x microbatch=2"),
    ],
)
def test_doubtful_rows(changes: dict[str, object], words: str) -> None:
    assert words in doubtful_reason(point(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dp": None},
        {"tp": None, "n_gpus": 7},
        {"global_batch": None},
        {"metric": "feasible", "value": 0.0},
    ],
)
def test_rows_that_are_not(changes: dict[str, object]) -> None:
    assert doubtful_reason(point(**changes)) == ""
