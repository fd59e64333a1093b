"""Rates that datasheets leave out."""

from __future__ import annotations

import pytest

from planner.cost.kernels.low_precision import peak_flops_per_s
from tests.cost.made import device


def test_a_missing_peak_falls_back_to_the_next_wider_dtype() -> None:
    kind = device(peak_flops_per_s={"float32": 1e12, "float16": 4e12})
    assert peak_flops_per_s(kind, "bfloat16") == 4e12
    assert peak_flops_per_s(kind, "float8") == 4e12
    assert peak_flops_per_s(kind, "float32") == 1e12
    eight = device(peak_flops_per_s={"float8_e4m3fn": 8e12, "bfloat16": 4e12})
    assert peak_flops_per_s(eight, "float8") == 8e12
    assert peak_flops_per_s(eight, "float4") == 8e12
    four = device(peak_flops_per_s={"float4_e2m1fn_x2": 9e12, "bfloat16": 4e12})
    assert peak_flops_per_s(four, "float4") == 9e12
    assert peak_flops_per_s(four, "float8") == 4e12


@pytest.mark.parametrize(
    ("peaks", "rate"),
    [
        ({"float64": 3e12, "float32": 6e12}, 3e12),
        # Twice the bytes, half the rate; of equally wide dtypes the slowest.
        ({"float32": 6e12, "bfloat16": 1e14}, 3e12),
        ({"float32": 6e12, "tensorfloat32": 5e13, "bfloat16": 1e14}, 3e12),
        ({"bfloat16": 1e14, "float8_e4m3fn": 2e14}, 2.5e13),
    ],
)
def test_float64_without_a_peak_of_its_own_is_slower_than_what_is_narrower(
    peaks: dict[str, float], rate: float
) -> None:
    assert peak_flops_per_s(device(peak_flops_per_s=peaks), "float64") == rate


def test_no_dtype_is_as_fast_as_a_narrower_one_for_want_of_a_figure() -> None:
    eight = device(peak_flops_per_s={"float8_e4m3fn": 8e12})
    assert peak_flops_per_s(eight, "bfloat16") == 4e12
    assert peak_flops_per_s(eight, "float32") == 2e12
