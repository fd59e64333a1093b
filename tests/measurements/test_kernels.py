"""Shipped constants of kernels: rows of the tables, and devices without a table."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from planner.cluster import device_type, device_type_names
from planner.errors import UnknownNameError
from planner.measurements.kernels import measured_devices, surfaces_of

#: Rows of gemm.csv.gz, runs sglang-0.5.14 and (a100, b300) sglang-0.5.10, bfloat16.
_PRODUCTS = [
    ("a100-80", 8192, 8192, 8192, 4280.4),
    ("a100-80", 1024, 4096, 16384, 548.14),
    ("h100-80", 8192, 8192, 8192, 1673.0),
    ("h100-80", 4096, 4096, 4096, 178.46),
    ("h100-80", 2048, 12288, 4096, 262.27),
    ("b200-180", 8192, 8192, 8192, 699.7),
    ("b300-270", 4096, 4096, 4096, 81.18),
    ("gb200-186", 8192, 8192, 8192, 693.96),
    ("gb300-279", 1024, 4096, 16384, 74.432),
    ("l40s-48", 2048, 12288, 4096, 926.44),
    ("rtxpro6000-96", 8192, 8192, 8192, 2828.1),
]


@pytest.mark.parametrize(("name", "m", "n", "k", "measured_us"), _PRODUCTS)
def test_products_take_what_was_measured(
    name: str, m: int, n: int, k: int, measured_us: float
) -> None:
    surface = surfaces_of(device_type(name)).products()
    found = float(surface.seconds(m, n, k, sustained=False))
    assert found * 1e6 == pytest.approx(measured_us, rel=0.15)


def _large_tflops(name: str, dtype: str) -> float:
    surface = surfaces_of(device_type(name)).products(dtype)
    return float(2 * 8192.0**3 / surface.seconds(8192, 8192, 8192) / 1e12)


@pytest.mark.parametrize(
    ("name", "expected", "tolerance"),
    [
        # A moderator of forums.developer.nvidia.com, thread 264462: 70 W allow it.
        ("t4-16", 24, 0.15),
        # The catalogue's own: 90 to 100 TFLOP/s.
        ("v100-32", 95, 0.06),
    ],
)
def test_devices_without_a_table_reach_what_their_power_allows(
    name: str, expected: float, tolerance: float
) -> None:
    assert _large_tflops(name, "float16") == pytest.approx(expected, rel=tolerance)


def test_less_power_is_slower_at_the_same_peak() -> None:
    twins = ("a100-80", "a100pcie-80", "a100pcie-40")
    rates = [_large_tflops(name, "bfloat16") for name in twins]
    assert rates == sorted(rates, reverse=True)
    assert rates[2] < 0.8 * rates[0]


@pytest.mark.parametrize(
    ("name", "evidence", "reference"),
    [
        ("h100-80", "table", "h100-80"),
        ("gh200-96", "family of h200-141", "h200-141"),
        ("t4-16", "family of a100-80", "a100-80"),
        ("mi300x-192", "assumption", "a100-80"),
    ],
)
def test_surfaces_say_what_they_rest_on(
    name: str, evidence: str, reference: str
) -> None:
    found = surfaces_of(device_type(name))
    assert (found.evidence, found.reference) == (evidence, reference)


def test_devices_of_no_family_reach_the_share_their_document_says() -> None:
    device = device_type("mi300x-192").model_copy(update={"processors": None})
    found = surfaces_of(device).products().seconds(16384, 16384, 16384)
    share = 2 * 16384.0**3 / found / device.peak_flops_per_s["bfloat16"]
    assert share == pytest.approx(device.matmul_efficiency, rel=0.01)


def test_what_holds_products_back_holds_attention_and_experts_back() -> None:
    device = device_type("mi300x-192")
    fast = device.model_copy(update={"matmul_efficiency": 0.9})
    for size in (8192, 16_384):
        slow, other = (
            surfaces_of(one).attention(causal=True).seconds(4, size, 64, 8, 128)
            for one in (device, fast)
        )
        assert slow / other == pytest.approx(0.9 / 0.5, rel=0.05)
        slow, other = (
            surfaces_of(one).experts().seconds(8 * size, 8, 4096, 8192)
            for one in (device, fast)
        )
        assert slow / other == pytest.approx(0.9 / 0.5, rel=0.1)


def test_unknown_names_suggest_the_nearest() -> None:
    surfaces = surfaces_of(device_type("h100-80"))
    with pytest.raises(UnknownNameError, match="did you mean 'float8'"):
        surfaces.products("float88")
    with pytest.raises(UnknownNameError, match="did you mean 'all_reduce'"):
        surfaces.collective("allreduce")


@pytest.mark.parametrize("name", device_type_names())
def test_every_device_has_products_of_every_dtype(name: str) -> None:
    surfaces = surfaces_of(device_type(name))
    for dtype in ("float64", "float32", "bfloat16", "float8", "mxfp8", "float4"):
        surface = surfaces.products(dtype)
        flops = 2 * 4096.0**3
        share = (
            flops / surface.seconds(4096, 4096, 4096) / surface.chip.peak_flops_per_s
        )
        assert 0.02 < share < 1


def test_at_most_twelve_constants_are_fitted_to_bursts() -> None:
    for name in measured_devices():
        for dtype in ("bfloat16", "float8", "float4"):
            constants = surfaces_of(device_type(name)).products(dtype).constants
            # One more, long_run, is of other tables.
            assert np.count_nonzero(astuple(constants)) <= 13


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "size", "link", "measured_us"),
    [
        # Rows of nccl.csv.gz, dtype half; links of systems.csv.
        ("h100-80", "all_reduce", 8, 2**29, 450e9, 2111.1),
        ("h100-80", "all_gather", 8, 2**26, 450e9, 208.1),
        ("h100-80", "reduce_scatter", 4, 2**12, 450e9, 7.3),
        ("a100-80", "all_reduce", 8, 2**28, 300e9, 2182.5),
        ("b200-180", "all_to_all", 8, 2**25, 900e9, 88.8),
        ("gb200-186", "all_to_all", 4, 2**29, 900e9, 825.4),
        ("rtxpro6000-96", "all_gather", 8, 2**29, 64e9, 20405),
    ],
)
def test_collectives_take_what_was_measured(
    name: str, kind: str, ranks: int, size: int, link: float, measured_us: float
) -> None:
    surface = surfaces_of(device_type(name)).collective(kind)
    found = float(surface.seconds(size, ranks, link))
    assert found * 1e6 == pytest.approx(measured_us, rel=0.15)


def test_devices_without_links_of_their_own_have_the_collectives_of_pcie() -> None:
    by_table = surfaces_of(device_type("rtxpro6000-96")).collective("all_reduce")
    for name in ("l40s-48", "rtxpro6000-96"):
        assert surfaces_of(device_type(name)).collective("all_reduce") == by_table
    assert surfaces_of(device_type("a100-80")).collective("all_reduce", pcie=True) == (
        by_table
    )


@pytest.mark.parametrize(
    ("name", "shape", "causal", "measured_us"),
    [
        # Rows of context_attention.csv.gz: sequences, queries, heads, those of keys,
        # size of a head.
        ("a100-80", (2, 8192, 64, 8, 128), True, 10962),
        ("h100-80", (1, 8192, 32, 8, 128), True, 950.49),
        ("h100-80", (8, 4096, 64, 8, 128), True, 4040.7),
        ("b200-180", (2, 4096, 64, 8, 128), True, 572.99),
        ("l40s-48", (4, 8192, 32, 8, 128), True, 12964),
        # Rows of encoder_attention.csv.gz.
        ("h100-80", (8, 4096, 16, 16, 64), False, 1152.6),
        ("b200-180", (2, 8192, 16, 16, 80), False, 773.74),
    ],
)
def test_attention_takes_what_was_measured(
    name: str, shape: tuple[int, ...], causal: bool, measured_us: float
) -> None:
    surface = surfaces_of(device_type(name)).attention(causal=causal)
    found = float(surface.seconds(*shape, sustained=False, cached=causal))
    assert found * 1e6 == pytest.approx(measured_us, rel=0.15)
