"""Speed of products in low precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cost.constants import DeviceConstants
from planner.cost.kernels.blocks import KernelTable
from planner.cost.kernels.low_precision import (
    cast_bytes,
    gathered_share,
    low_precision_rates,
)
from planner.cost.kernels.shapes import divide
from planner.cost.recipes import RECIPES
from planner.graph import Kernel
from planner.schema import Precision
from tests.cost.made import HIDDEN, TOKENS, device, hosts, setting_for, uniform_graph
from tests.cost.test_units import priced

GPU = device(peak_flops_per_s={"bfloat16": 1e14, "float8_e4m3fn": 2e14})
REACHED = DeviceConstants(matmul_efficiency=0.5, attention_efficiency=0.5)


def table(style: str = "none") -> KernelTable:
    product = Kernel(
        kind="matmul",
        style=style,  # type: ignore[arg-type]
        m=64,
        n=64,
        k=64,
        forward_flops=1.0,
        weight_bytes=8192.0,
        forward_bytes=1000.0,
    )
    return KernelTable.build([(0, product), (1, product)], heads=[1])


def cast(dtype: str, style: str = "none", **changes: Any) -> tuple[float, float]:
    """Bytes of the product that is not the head's, forward and backward."""
    facts = {"tp": 4, "split": 1, "before": True, **changes}
    one, tp = np.ones(1), np.array([float(facts["tp"])])
    part = divide(table(style), one, [tp, one, one], one * facts["split"])
    forward, backward = cast_bytes(
        table(style), dtype, part.tp, part.stream, before=facts["before"]
    )
    assert not forward[0, 1]
    assert not backward[0, 1]
    return float(forward[0, 0]), float(backward[0, 0])


def test_scales_a_row_cost_rate_of_what_is_narrow() -> None:
    plain, rows = (
        low_precision_rates(table(), GPU, dtype, REACHED)[0]
        for dtype in ("float8", "float8_rowwise")
    )
    assert plain == pytest.approx([0.5 * 0.85 * 2e14, 0.5 * 1e14])
    # The head stays in bfloat16.
    assert rows == pytest.approx([0.78 * plain[0], plain[1]])


def test_what_a_format_reads_and_writes() -> None:
    # Half of the product's thousand bytes are its input, half its output.
    assert cast("float8") == cast("float8_rowwise") == (1000.0, 1000.0)
    # Three reads of two bytes, and twice half a byte with a sixteenth.
    assert cast("float4")[0] == pytest.approx(500.0 * (3 * 2 + 2 * (0.5 + 1 / 16)) / 2)
    assert cast("bfloat16") == (0.0, 0.0)


@pytest.mark.parametrize(
    ("dtype", "changes", "part"),
    [
        ("float8", {}, 1 / 4),
        ("float8", {"split": 0}, 1.0),
        ("float8", {"before": False}, 1.0),
        ("float8_rowwise", {}, 1.0),
    ],
)
def test_what_is_gathered_is_cast_before_or_behind(
    dtype: str, changes: dict[str, Any], part: float
) -> None:
    # Its part of an output, or of an input, is all that a rank has.
    assert cast(dtype, "colwise", **changes) == pytest.approx((1000 * part, 250.0))
    assert cast(dtype, "rowwise", **changes) == pytest.approx((250.0, 1000 * part))


@pytest.mark.parametrize(
    ("dtype", "share"),
    [
        ("float8", (0.5, 0.5)),
        ("mxfp8", (0.5, 1.0)),
        ("float8_rowwise", (1.0, 1.0)),
        ("float4", (0.5 * 0.5625, 0.5625)),
    ],
)
def test_gathers_move_what_is_cast(dtype: str, share: tuple[float, float]) -> None:
    assert gathered_share(dtype, before=True) == share
    assert gathered_share(dtype, before=False) == (1.0, 1.0)
    assert gathered_share("bfloat16", before=True) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("dtype", "saved", "again"), [("float8", 1.0, 0.5), ("mxfp8", 0.5, 0.5)]
)
def test_layers_gather_narrow_operands_and_scatter_wide_results(
    dtype: str, saved: float, again: float
) -> None:
    graph = uniform_graph(2)
    wide, narrow = (
        setting_for(
            graph,
            hosts((1, 8, GPU)),
            recipe=replace(RECIPES["torch"], low_precision_gathers=gathers),
            precision=Precision(compute="float8"),
            product_dtype=dtype,
        )
        for gathers in (False, True)
    )
    one, other = (priced(graph, s, tp=4, sequence_parallel=1) for s in (wide, narrow))
    # Gathers of the two layers, beside those of the region's two ends.
    stream = 2.0 * TOKENS * HIDDEN
    moved = (one.tp_payload[1, :, 0] - other.tp_payload[1, :, 0]) / stream
    assert moved[0] == pytest.approx([saved] * 2)
    # Recomputation gathers as forward does.
    assert moved[1] == pytest.approx([again] * 2)
    assert (other.tp_again_s < one.tp_again_s).all()
    assert (one.tp_payload[2] == other.tp_payload[2]).all()
    assert (other.tp_s < one.tp_s).all()
    whole = [priced(graph, s, tp=4) for s in (wide, narrow)]
    assert (whole[0].tp_s == whole[1].tp_s).all()
