"""Attention by shape: the form by hand, and what holds for any constants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import device_type
from planner.cost.surfaces.attention import AttentionConstants, AttentionSurface
from planner.cost.surfaces.chip import Chip
from planner.measurements.kernels import measured_devices, surfaces_of

#: 4 processors of 1e9 FLOP/s each, and memory that takes no time.
_CHIP = Chip(
    peak_flops_per_s=4e9, bandwidth_bytes_per_s=1e30, processors=4, cache_bytes=0.0
)

_PLAIN = AttentionConstants(
    efficiency=1.0,
    softmax=0.0,
    ramp=0.0,
    launch_s=0.0,
    memory=1.0,
    overlap=2.0,
    slowdown=0.0,
    burst_s=1.0,
)

#: Seconds of 128 queries with a head of 64 against 128 keys.
_SQUARE = 4 * 128 * 128 * 64 / 1e9


def _surface(
    *, causal: bool, kernel: str = "fa2", chip: Chip = _CHIP, **changed: float
) -> AttentionSurface:
    return AttentionSurface(
        constants=replace(_PLAIN, **changed), chip=chip, kernel=kernel, causal=causal
    )


@pytest.mark.parametrize(
    ("heads", "changed", "expected"),
    [
        # Two blocks of 128 queries a head, each against 256 keys.
        (2, {}, 2 * _SQUARE),
        # Six blocks for four processors: two waves, or one and a half.
        (3, {"whole_waves": 1.0}, 2 * 2 * _SQUARE),
        (3, {"whole_waves": 0.0}, 1.5 * 2 * _SQUARE),
        (2, {"softmax": 64, "launch_s": 1.0}, 1 + 2 * 2 * _SQUARE),
        (2, {"ramp": 128}, 3 * _SQUARE),
    ],
)
def test_blocks_of_queries_go_in_waves(
    heads: int, changed: dict[str, float], expected: float
) -> None:
    surface = _surface(causal=False, **changed)
    found = float(surface.seconds(1, 256, heads, heads, 64))
    assert found == pytest.approx(expected, rel=1e-9)


def test_causal_attention_waits_for_its_longest_block() -> None:
    # One head: blocks of 1, 2, 3 and 4 squares, one a processor.
    one = float(_surface(causal=True).seconds(1, 512, 1, 1, 64))
    assert one == pytest.approx(4 * _SQUARE)
    # Four heads are 40 squares, ten a processor, and half of the longest at the end.
    four = float(_surface(causal=True, tail=0.5).seconds(1, 512, 4, 4, 64))
    assert four == pytest.approx((10 + 2) * _SQUARE)


def test_heads_are_padded_as_the_kernel_does() -> None:
    for kernel, padded in (("fa2", 96), ("fa4", 80)):
        surface = _surface(causal=False, kernel=kernel)
        found = float(surface.seconds(64, 128, 16, 16, 72))
        assert found == pytest.approx(float(surface.seconds(64, 128, 16, 16, padded)))


def test_wide_heads_take_longer_than_their_size_says() -> None:
    seconds = [
        float(_surface(causal=True, wide=0.5).seconds(64, 128, 16, 16, size))
        for size in (64, 128, 256)
    ]
    assert seconds == pytest.approx([seconds[0] * x for x in (1, 2, 6)])


def test_memory_moves_heads_of_keys_once_and_to_a_cache_again() -> None:
    chip = replace(_CHIP, peak_flops_per_s=4e30, bandwidth_bytes_per_s=1e9)
    surface = _surface(causal=True, chip=chip)
    found = float(surface.seconds(2, 256, 8, 2, 64))
    assert found == pytest.approx(2 * 2 * 256 * 64 * (2 * 8 + 2 * 2) / 1e9)
    kept = float(surface.seconds(2, 256, 8, 2, 64, cached=True))
    assert kept == pytest.approx(2 * 2 * 256 * 64 * (2 * 8 + 4 * 2) / 1e9)


def test_long_runs_lose_the_boost() -> None:
    surface = _surface(causal=False, slowdown=0.2, burst_s=2 * _SQUARE, long_run=0.15)
    assert float(surface.seconds(1, 256, 2, 2, 64)) == pytest.approx(2.3 * _SQUARE)
    long = float(surface.seconds(9, 256, 2, 2, 64))
    assert long == pytest.approx(18 * _SQUARE * (1 + 0.2 * 0.9))
    burst = float(surface.seconds(1, 256, 2, 2, 64, sustained=False))
    assert burst == pytest.approx(2 * _SQUARE * 1.1)


def test_queries_may_see_other_keys() -> None:
    surface = _surface(causal=False)
    found = float(surface.seconds(1, 256, 2, 2, 64, keys=1024))
    assert found == pytest.approx(8 * _SQUARE)


@given(
    st.sampled_from(measured_devices()),
    st.booleans(),
    st.tuples(
        st.integers(1, 64), st.integers(1, 16_000), st.integers(1, 96), st.just(1)
    ),
    st.sampled_from((64, 128, 256)),
    st.integers(0, 3),
    st.integers(1, 500),
)
def test_more_attention_never_takes_less(
    name: str, causal: bool, shape: tuple[int, ...], size: int, side: int, more: int
) -> None:
    surface = surfaces_of(device_type(name)).attention(causal=causal)
    larger = list(shape)
    larger[side] += more
    before = float(surface.seconds(*shape, size))
    assert 0 < before <= float(surface.seconds(*larger, size)) * (1 + 1e-12)
    flops = 4 * shape[0] * shape[2] * shape[1] ** 2 * size / (1 + causal)
    assert before >= flops / surface.chip.peak_flops_per_s


def test_shapes_broadcast() -> None:
    surface = surfaces_of(device_type("h100-80")).attention(causal=True)
    batch, queries = np.array([[1], [8]]), np.array([512, 1024, 8192])
    found = surface.seconds(batch, queries, 32, 8, np.array([64, 128, 256]))
    assert found.shape == (2, 3)
    assert found[1, 1] == surface.seconds(8, 1024, 32, 8, 128)
