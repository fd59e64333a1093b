"""Products and attention of a model by surfaces of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cluster import device_type
from planner.cost.constants import Calibration, DeviceConstants, constants_of
from planner.cost.kernels.blocks import KernelTable
from planner.cost.kernels.roofline import KernelTimes, kernel_times
from planner.cost.kernels.shapes import divide
from planner.cost.recipes import RECIPES, Recipe
from planner.graph import Kernel
from planner.measurements.kernels import surfaces_of

RECIPE = replace(RECIPES["torch"], causal_share=0.5)
H100 = device_type("h100-80")
SURFACES = surfaces_of(H100)
FITTED = Calibration(name="made", default=DeviceConstants(), surfaces=surfaces_of)
M, N, K = 4096.0, 2048.0, 1024.0


def _times(kernel: Kernel, recipe: Recipe = RECIPE, **degrees: Any) -> KernelTimes:
    table, one = KernelTable.build([(0, kernel)]), np.ones(1)
    found = [one * degrees.get(name, 1) for name in ("tp", "cp", "ep")]
    dtypes = (degrees.get("dtype", "bfloat16"), "bfloat16")
    return kernel_times(
        table,
        divide(table, one * degrees.get("tokens", 1), found, one),
        H100,
        recipe,
        constants_of(H100, recipe, FITTED),
        dtypes=dtypes,
        causal=degrees.get("causal", False),
    )


def _product(gradients: int = 2, **changes: Any) -> Kernel:
    flops = 2 * M * N * K
    fields = {"m": int(M), "n": int(N), "k": int(K), "weight_bytes": 2 * N * K}
    fields |= {"forward_flops": flops, "backward_flops": gradients * flops}
    return Kernel(kind="matmul", **{**fields, **changes})


def _seconds(*sizes: float) -> float:
    return float(SURFACES.products().seconds(*sizes))


def test_backward_has_the_products_of_the_transposed_operands() -> None:
    found = _times(_product())
    assert found.forward[0, 0] == pytest.approx(_seconds(M, N, K))
    weight = _seconds(N, K, M)
    assert found.weight[0, 0] == pytest.approx(weight)
    assert found.backward[0, 0] == pytest.approx(_seconds(M, K, N) + weight)


def test_only_gradients_that_are_wanted_are_made() -> None:
    first = _times(_product(gradients=1))
    assert (
        first.backward[0, 0] == first.weight[0, 0] == pytest.approx(_seconds(N, K, M))
    )
    frozen = _times(_product(gradients=1, trained=False))
    assert frozen.weight[0, 0] == 0
    assert frozen.backward[0, 0] == pytest.approx(_seconds(M, K, N))
    scores = _times(_product(weight_bytes=0.0))
    assert scores.weight[0, 0] == 0
    both = _seconds(M, K, N) + _seconds(N, K, M)
    assert scores.backward[0, 0] == pytest.approx(both)


@pytest.mark.parametrize(
    ("style", "size"),
    [("colwise", (M, N / 4, K)), ("rowwise", (M, N, K / 4)), ("none", (M, N, K))],
)
def test_tp_divides_what_its_style_says(style: Any, size: tuple[float, ...]) -> None:
    found = _times(_product(style=style), tp=4).forward[0, 0]
    assert found == pytest.approx(_seconds(*size))


def test_a_rank_of_ep_has_fewer_experts_with_more_tokens_each() -> None:
    kernel = _product(expert=True, batch=8)
    grouped = SURFACES.experts()
    whole, divided = (_times(kernel, ep=ep).forward[0, 0] for ep in (1, 4))
    assert whole == pytest.approx(float(grouped.product(8 * M, 8.0, N, K)))
    assert divided == pytest.approx(float(grouped.product(2 * 4 * M, 2.0, N, K)))


def test_low_precision_is_for_products_with_weights() -> None:
    narrow = SURFACES.products("float8").seconds(M, N, K)
    assert _times(_product(), dtype="float8").forward[0, 0] == pytest.approx(narrow)
    scores = _times(_product(weight_bytes=0.0), dtype="float8")
    assert scores.forward[0, 0] == pytest.approx(_seconds(M, N, K))


def _attention() -> Kernel:
    flops = 4.0 * 32 * 8192.0**2 * 128
    return Kernel(
        kind="attention",
        batch=32,
        m=8192,
        n=8192,
        k=128,
        forward_flops=flops,
        backward_flops=2 * flops,
        recompute_flops=flops / 2,
        style="local",
    )


def test_attention_skips_what_lies_above_the_diagonal() -> None:
    surface = SURFACES.attention(causal=True)
    found = _times(_attention(), causal=True)
    forward = float(surface.seconds(32, 8192, 1, 1, 128))
    assert found.forward[0, 0] == pytest.approx(forward)
    reach = RECIPE.attention_forward / RECIPE.attention_backward
    assert found.backward[0, 0] == pytest.approx(2.5 * reach * forward)
    full = _times(_attention(), causal=False).forward[0, 0]
    assert 1.4 < full / forward < 2.4
    # A recipe whose kernels skip nothing.
    assert _times(_attention(), replace(RECIPE, causal_share=1.0), causal=True).forward[
        0, 0
    ] == pytest.approx(full)


def test_heads_and_sequences_divide_attention() -> None:
    whole = _times(_attention(), causal=True).forward[0, 0]
    by_tp = _times(_attention(), causal=True, tp=4).forward[0, 0]
    assert whole / by_tp == pytest.approx(4, rel=0.15)
    bare = replace(RECIPE, ring_outputs=0.0)
    by_cp = _times(_attention(), bare, causal=True, cp=4).forward[0, 0]
    assert whole / by_cp == pytest.approx(4, rel=0.25)


def test_a_ring_adds_up_the_results_of_its_hops() -> None:
    bare = replace(RECIPE, ring_outputs=0.0, ring_queries=0.0)
    times, without = (
        _times(_attention(), recipe, causal=True, cp=4) for recipe in (RECIPE, bare)
    )
    moved = 3 * 32 * 8192 / 4 * 128 * 2 / (0.8 * H100.memory_bandwidth_bytes_per_s)
    added = times.forward[0, 0] - without.forward[0, 0]
    assert added == pytest.approx(RECIPE.ring_outputs * moved)
    added = times.backward[0, 0] - without.backward[0, 0]
    assert added == pytest.approx(RECIPE.ring_queries * moved)
    launched = times.forward_host[0, 0] - _times(_attention()).forward_host[0, 0]
    assert launched == pytest.approx(4 * 14 * H100.kernel_overhead_s, rel=0.5)


def test_attention_that_is_not_fused_is_two_products_and_its_scores() -> None:
    recipe = replace(RECIPE, fused_attention=False)
    found = _times(_attention(), recipe).forward[0, 0]
    products = _seconds(8192, 8192, 128, 32) + _seconds(8192, 128, 8192, 32)
    scores = 6.5 * 2 * 32 * 8192.0**2 / (0.8 * H100.memory_bandwidth_bytes_per_s)
    assert found == pytest.approx(products + scores)


def test_older_attention_leaves_newer_devices_idle() -> None:
    old = replace(RECIPE, ampere_attention=True)
    slow, usual = (_times(_attention(), r).forward[0, 0] for r in (old, RECIPE))
    assert slow == pytest.approx(usual / 0.57)
