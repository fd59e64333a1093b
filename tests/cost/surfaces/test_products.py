"""Products by shape: the form by hand, and what holds for any constants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import device_type
from planner.cost.surfaces.chip import Chip
from planner.cost.surfaces.products import ProductConstants, ProductSurface
from planner.measurements.kernels import measured_devices, surfaces_of

#: 4 processors of 1e9 FLOP/s each, and memory that takes no time.
_CHIP = Chip(
    peak_flops_per_s=4e9, bandwidth_bytes_per_s=1e30, processors=4, cache_bytes=0.0
)

_PLAIN = ProductConstants(
    efficiency=1.0,
    ramp=0.0,
    launch_s=0.0,
    memory=1.0,
    whole_waves=1.0,
    half_tile=0.0,
    overlap=1.0,
    slowdown=0.0,
    split_s=1e9,
    burst_s=1.0,
)


def _seconds(
    m: float,
    n: float,
    k: float,
    *,
    batch: float = 1,
    chip: Chip = _CHIP,
    **changed: float,
) -> float:
    surface = ProductSurface(constants=replace(_PLAIN, **changed), chip=chip)
    return float(surface.seconds(m, n, k, batch))


@pytest.mark.parametrize(
    ("shape", "changed", "expected"),
    [
        # Four tiles of 64 x 64, one a processor.
        ((128, 128, 100), {}, 2 * 64 * 64 * 100 / 1e9),
        # 129 rows are three rows of such tiles: six tiles, two waves.
        ((129, 128, 100), {}, 2 * 2 * 64 * 64 * 100 / 1e9),
        # With half waves the second takes half as long as it has tiles.
        ((129, 128, 100), {"whole_waves": 0.0}, 1.5 * 2 * 64 * 64 * 100 / 1e9),
        ((64, 64, 100), {"ramp": 50, "launch_s": 1.0}, 1 + 2 * 64 * 64 * 150 / 1e9),
        ((128, 128, 100), {"half_tile": 4096}, 2 * 2 * 64 * 64 * 100 / 1e9),
        # Two parts of 50, each on a processor, and the cost of adding them up.
        ((64, 128, 100), {"split_s": 1e-5}, 2 * 64 * 64 * 50 / 1e9 + 1e-5),
    ],
)
def test_compute_is_that_of_the_best_tiles(
    shape: tuple[float, float, float], changed: dict[str, float], expected: float
) -> None:
    assert _seconds(*shape, **changed) == pytest.approx(expected, rel=1e-9)


def test_memory_adds_up_or_hides_by_the_exponent() -> None:
    slow = replace(_CHIP, bandwidth_bytes_per_s=1e7, peak_flops_per_s=4e9)
    compute = 2 * 64 * 64 * 100 / 1e9
    memory = 2 * (128 * 100 + 128 * 100 + 128 * 128) / 1e7
    assert _seconds(128, 128, 100, chip=slow) == pytest.approx(compute + memory)
    root = _seconds(128, 128, 100, chip=slow, overlap=2.0)
    assert root == pytest.approx(np.hypot(compute, memory))
    # Operands in a cache that holds all copies move at three times the bandwidth.
    cached = replace(slow, cache_bytes=1e12)
    found = _seconds(128, 128, 100, chip=cached, cache=1.0, cache_gain=2.0)
    assert found == pytest.approx(compute + memory / 3, rel=1e-5)


def test_long_runs_lose_the_boost_of_bursts() -> None:
    constants = replace(_PLAIN, slowdown=0.3, long_run=0.2, burst_s=1.0)
    surface = ProductSurface(constants=constants, chip=_CHIP)
    for length in (1e4, 1e7):
        peak = 2 * 128 * 128 * length / 4e9
        boosted = 0.3 * peak / (peak + 1.0)
        burst = float(surface.seconds(128, 128, length, sustained=False))
        assert burst == pytest.approx(peak * (1 + boosted))
        long = float(surface.seconds(128, 128, length))
        assert long == pytest.approx(peak * (1 + max(boosted, 0.2)))
    # A product for half of the processors draws half of the power.
    half = float(surface.seconds(64, 128, 1e4))
    assert half == pytest.approx(2 * 64 * 64 * 1e4 / 1e9 * (1 + 0.2 / 2))


def test_a_cast_reads_two_bytes_of_an_element_of_the_first_operand() -> None:
    chip = replace(_CHIP, bandwidth_bytes_per_s=1e9)
    surface = ProductSurface(
        constants=replace(_PLAIN, cast=0.5), chip=chip, operand_bytes=1.0
    )
    sizes = (64.0, 32.0, 100.0)
    extra = surface.seconds(*sizes, cast=True) - surface.seconds(*sizes)
    assert float(extra) == pytest.approx(3 * 64 * 100 / 0.5e9)


@given(
    st.sampled_from(measured_devices()),
    st.sampled_from(("bfloat16", "float8", "float4")),
    st.tuples(*[st.integers(1, 20_000)] * 3, st.integers(1, 64)),
    st.integers(0, 3),
    st.integers(1, 5_000),
)
def test_larger_products_never_take_less(
    name: str, dtype: str, shape: tuple[int, ...], side: int, more: int
) -> None:
    surface = surfaces_of(device_type(name)).products(dtype)
    larger = list(shape)
    larger[side] += more
    before = float(surface.seconds(*shape))
    assert 0 < before <= float(surface.seconds(*larger)) * (1 + 1e-12)
    # A device never beats its peak, nor a launch take no time.
    assert before >= 2 * np.prod(np.array(shape, float)) / surface.chip.peak_flops_per_s


def test_sizes_broadcast() -> None:
    surface = surfaces_of(device_type("h100-80")).products()
    m, n = np.array([[256.0], [4096.0]]), np.array([512.0, 1024.0, 8192.0])
    found = surface.seconds(m, n, 4096)
    assert found.shape == (2, 3)
    assert found[1, 2] == surface.seconds(4096, 8192, 4096)
