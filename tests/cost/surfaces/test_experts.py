"""Layers of experts: the form by hand, and what holds for any constants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import device_type
from planner.cost.surfaces.chip import Chip
from planner.cost.surfaces.experts import ExpertConstants, ExpertSurface
from planner.measurements.kernels import measured_devices, surfaces_of

#: One processor of 1e9 FLOP/s, and memory that takes no time.
_CHIP = Chip(
    peak_flops_per_s=1e9, bandwidth_bytes_per_s=1e30, processors=1, cache_bytes=0.0
)

_PLAIN = ExpertConstants(
    efficiency=1.0,
    ramp=0.0,
    half_tile=0.0,
    memory=1.0,
    overlap=1.0,
    launch_s=0.0,
    pair_s=0.0,
    moves=0.0,
)


def _seconds(
    pairs: float, *, chip: Chip = _CHIP, gated: bool = True, **changed: float
) -> float:
    surface = ExpertSurface(constants=replace(_PLAIN, **changed), chip=chip)
    return float(surface.seconds(pairs, 4, 256, 128, gated=gated, sustained=False))


@pytest.mark.parametrize(
    ("pairs", "changed", "expected"),
    [
        # 4 experts with 64 rows each: [64, 256] by [256, 256], [64, 128] by [128, 256].
        (256, {}, 2 * 256 * (256 * 256 + 128 * 256) / 1e9),
        # 17 rows each fill two tiles of 16.
        (68, {}, 2 * 128 * (256 * 256 + 128 * 256) / 1e9),
        (256, {"ramp": 128}, 2 * 256 * (384 * 256 + 256 * 256) / 1e9),
        (256, {"launch_s": 1.0, "pair_s": 0.5}, 129 + 2 * 256 * 384 * 256 / 1e9),
    ],
)
def test_rows_are_padded_to_tiles(
    pairs: float, changed: dict[str, float], expected: float
) -> None:
    assert _seconds(pairs, **changed) == pytest.approx(expected, rel=1e-9)


def test_experts_without_a_gate_have_two_matrices() -> None:
    expected = 2 * 256 * (256 * 128 + 128 * 256) / 1e9
    assert _seconds(256, gated=False) == pytest.approx(expected)


def test_all_weights_are_read_however_few_tokens_there_are() -> None:
    chip = replace(_CHIP, peak_flops_per_s=1e30, bandwidth_bytes_per_s=1e9)
    weights = 4 * 3 * 256 * 128
    activations = 4 * (256 + 256) + 4 * (128 + 256)
    found = _seconds(4, chip=chip)
    assert found == pytest.approx(2 * (weights + activations) / 1e9)
    moved = _seconds(4, chip=chip, moves=3.0) - found
    assert moved == pytest.approx(3 * 2 * 4 * 256 / 1e9)


def test_uneven_loads_pad_half_a_tile_an_expert() -> None:
    surface = ExpertSurface(constants=_PLAIN, chip=_CHIP)
    even, uneven = (
        float(surface.seconds(1024, 4, 256, 128, uneven=u, sustained=False))
        for u in (False, True)
    )
    assert uneven == pytest.approx(even * (256 + 8) / 256)


@given(
    st.sampled_from(measured_devices()),
    st.booleans(),
    st.tuples(
        st.integers(1, 100_000),
        st.integers(1, 256),
        st.integers(64, 8192),
        st.integers(64, 16_384),
    ),
    st.sampled_from((0, 2, 3)),
    st.integers(1, 5_000),
)
def test_more_work_never_takes_less(
    name: str, uneven: bool, shape: tuple[int, ...], side: int, more: int
) -> None:
    surface = surfaces_of(device_type(name)).experts()
    larger = list(shape)
    larger[side] += more
    before = float(surface.seconds(*shape, uneven=uneven))
    assert before <= float(surface.seconds(*larger, uneven=uneven)) * (1 + 1e-12)
    flops = 6 * shape[0] * shape[2] * shape[3]
    assert before >= flops / surface.chip.peak_flops_per_s
    burst = float(surface.seconds(*shape, uneven=uneven, sustained=False))
    assert 0 < burst <= before


def test_shapes_broadcast() -> None:
    surface = surfaces_of(device_type("h100-80")).experts("float8")
    pairs = np.array([[1024], [65_536]])
    found = surface.seconds(pairs, np.array([8, 16, 32]), 4096, 1536)
    assert found.shape == (2, 3)
    assert found[1, 2] == surface.seconds(65_536, 32, 4096, 1536)
