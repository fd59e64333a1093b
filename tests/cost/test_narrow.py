"""How fast narrow products are."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.constants import DeviceConstants
from planner.cost.kernel_table import KernelTable
from planner.cost.narrow import cast_bytes, narrow_rates
from planner.graph import Kernel
from tests.cost.made import device

GPU = device(peak_flops_per_s={"bfloat16": 1e14, "float8_e4m3fn": 2e14})
REACHED = DeviceConstants(
    matmul_efficiency=0.5, attention_efficiency=0.5, float8_efficiency=0.9
)


def table() -> KernelTable:
    product = Kernel(
        kind="matmul",
        style="none",
        m=64,
        n=64,
        k=64,
        forward_flops=1.0,
        weight_bytes=8192.0,
        forward_bytes=1000.0,
    )
    return KernelTable.build([(0, 0.0, product), (1, 0.0, product)], heads=[1])


def test_scales_a_row_cost_rate_of_what_is_narrow() -> None:
    plain, rows = (
        narrow_rates(table(), GPU, dtype, REACHED)[0]
        for dtype in ("float8", "float8_rowwise")
    )
    assert plain == pytest.approx([0.5 * 0.9 * 2e14, 0.5 * 1e14])
    # The head stays in bfloat16.
    assert rows == pytest.approx([0.78 * plain[0], plain[1]])


def test_both_cast_as_much() -> None:
    one, other = (cast_bytes(table(), d) for d in ("float8", "float8_rowwise"))
    assert np.array_equal(one, other)
    assert not np.any(cast_bytes(table(), "bfloat16"))
