"""Collectives by size: the form by hand, and what holds for any constants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import device_type
from planner.cost.surfaces.collectives import (
    COLLECTIVE_PASSES,
    CollectiveConstants,
    CollectiveSurface,
)
from planner.measurements.kernels import measured_devices, surfaces_of

#: Long messages alone, at the whole bandwidth.
_LONG = CollectiveConstants(
    short_s=1e9,
    short_rank_s=0.0,
    short_share=1.0,
    long_s=1.0,
    long_rank_s=0.5,
    share=1.0,
    local=0.0,
    pipelining=0.0,
)


def _seconds(kind: str, size: float, ranks: int, **changed: float) -> float:
    surface = CollectiveSurface(constants=replace(_LONG, **changed), kind=kind)
    return float(surface.seconds(size, ranks, 100.0))


@pytest.mark.parametrize(
    ("kind", "changed", "expected"),
    [
        # 800 bytes over 4 ranks: three quarters pass a link of 100 bytes/s, 6 s.
        ("all_gather", {}, 1 + 3 * 0.5 + 6),
        ("reduce_scatter", {"share": 0.5}, 1 + 3 * 0.5 + 12),
        ("all_reduce", {}, 1 + 3 * 0.5 + 12),
        ("all_to_all", {"local": 0.25}, 1 + 3 * 0.5 + 6 + 2),
        ("all_gather", {"crossing": 0.5}, 1 + 3 * 0.5 + 9),
        ("all_gather", {"pipelining": 1.0}, (2.5**0.5 + 6**0.5) ** 2),
    ],
)
def test_long_messages_take_start_and_bytes(
    kind: str, changed: dict[str, float], expected: float
) -> None:
    assert _seconds(kind, 800, 4, **changed) == pytest.approx(expected)


def test_the_faster_protocol_counts_and_both_where_they_cross() -> None:
    short = {"short_s": 0.1, "short_share": 0.25}
    assert _seconds("all_gather", 8, 2, **short) == pytest.approx(0.26, rel=1e-3)
    assert _seconds("all_gather", 8e5, 2, **short) == pytest.approx(4001.5, rel=1e-2)
    # At the size where both take as long, less than each by the fourth root of 2.
    crossing = (1.5 - 0.1) * 100 / (0.5 * 3)
    line = 1.5 + crossing / 200
    found = _seconds("all_gather", crossing, 2, **short)
    assert found == pytest.approx(line / 2**0.25)


def test_switches_add_for_more_than_two_ranks() -> None:
    added = {"switched_s": 0.0, "switched_share": 1.0}
    assert _seconds("all_reduce", 1e9, 2, **added) == _seconds("all_reduce", 1e9, 2)
    # A rank sends 1.25 of the bytes instead of 1.5 round a ring.
    assert _seconds("all_reduce", 1e9, 4, **added) == pytest.approx(1.25e7)


@given(
    st.sampled_from(measured_devices()),
    st.sampled_from(tuple(COLLECTIVE_PASSES)),
    st.integers(0, 10**10),
    st.integers(2, 8),
    st.integers(1, 10**9),
)
def test_more_bytes_or_slower_links_never_take_less(
    name: str, kind: str, size: int, ranks: int, more: int
) -> None:
    surface = surfaces_of(device_type(name)).collective(kind)
    before = surface.seconds(size, ranks, 3e11)
    assert 0 < before <= surface.seconds(size + more, ranks, 3e11) * (1 + 1e-12)
    assert before <= surface.seconds(size, ranks, 2e11) * (1 + 1e-12)
    assert surface.seconds(size, 1, 3e11) == 0


def test_sizes_and_ranks_broadcast() -> None:
    surface = surfaces_of(device_type("h100-80")).collective("all_reduce")
    found = surface.seconds(np.array([[1e3], [1e8]]), np.array([1, 2, 8]), 450e9)
    assert found.shape == (2, 3)
    assert found[1, 2] == surface.seconds(1e8, 8, 450e9)
