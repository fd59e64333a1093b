"""Exchanges of tokens: the form by hand, and what holds for any constants."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import device_type
from planner.cost.surfaces.dispatch import (
    DispatchConstants,
    DispatchSurface,
    copies_of,
)
from planner.measurements.kernels import measured_devices, surfaces_of


def test_copies_go_to_other_ranks_that_have_one_of_the_experts() -> None:
    # One expert of two ranks: half of the tokens stay.
    assert copies_of(1, 2) == pytest.approx(0.5)
    # All experts of all ranks: every other rank gets one.
    assert copies_of(1000, 8) == pytest.approx(7.0)
    assert copies_of(8, 1) == 0
    drawn = np.random.RandomState(0).randint(0, 4, (20_000, 3))
    met = np.mean([len(set(row) - {0}) for row in drawn])
    assert copies_of(3, 4) == pytest.approx(met, rel=0.01)


def test_exchanges_take_start_and_bytes_and_their_chunks() -> None:
    constants = DispatchConstants(
        start_s=1.0, share=0.5, pipelining=0.0, token_s=0.01, own=1.0, copy_s=0.02
    )
    surface = DispatchSurface(constants=constants, element_bytes=2.0)
    copies = 0.5
    moved = 100 * (10 * 2 * (copies + 1) / (50 * 0.5) + 0.01 + copies * 0.02)
    assert float(surface.seconds(100, 10, 1, 2, 50)) == pytest.approx(1 + moved)
    narrow = float(surface.seconds(100, 10, 1, 2, 50, element_bytes=1.0))
    assert narrow == pytest.approx(1 + moved - 100 * 10 * 1.5 / 25)


@pytest.mark.parametrize(
    ("name", "op", "reach", "shape", "link", "measured_us"),
    [
        # Rows of deepep_normal.csv.gz with 24 processors: tokens, hidden, experts of a
        # token, ranks (or hosts).
        ("h100-80", "dispatch", "host", (8192, 4096, 8, 8), 450e9, 566),
        ("h100-80", "combine", "host", (131_072, 4096, 22, 8), 450e9, 22_150),
        ("b200-180", "dispatch", "host", (4096, 7168, 8, 8), 900e9, 440),
        ("h100-80", "dispatch", "hosts", (4096, 7168, 8, 4), 50e9, 1791),
        ("h100-80", "combine", "hosts", (4096, 7168, 8, 2), 50e9, 1777),
        # moe_alltoall_nvl72.csv.gz, NVLinkTwoSided, bfloat16.
        ("gb200-186", "combine", "rack", (4096, 7168, 8, 32), 900e9, 924),
    ],
)
def test_exchanges_take_what_was_measured(
    name: str,
    op: Literal["dispatch", "combine"],
    reach: Literal["host", "hosts", "rack"],
    shape: tuple[int, ...],
    link: float,
    measured_us: float,
) -> None:
    surface = surfaces_of(device_type(name)).dispatch(op, reach=reach)
    found = float(surface.seconds(*shape, link))
    assert found * 1e6 == pytest.approx(measured_us, rel=0.12)


@given(
    st.sampled_from((*measured_devices(), "t4-16", "mi300x-192")),
    st.sampled_from(("dispatch", "combine")),
    st.sampled_from(("host", "hosts", "rack")),
    st.tuples(
        st.integers(1, 10**5),
        st.integers(64, 8192),
        st.integers(1, 32),
        st.integers(2, 64),
    ),
    st.integers(0, 3),
    st.integers(1, 5_000),
)
def test_more_tokens_never_take_less(
    name: str,
    op: Literal["dispatch", "combine"],
    reach: Literal["host", "hosts", "rack"],
    shape: tuple[int, ...],
    side: int,
    more: int,
) -> None:
    surface = surfaces_of(device_type(name)).dispatch(op, reach=reach)
    larger = list(shape)
    larger[side] += more
    before = surface.seconds(*shape, 4e11)
    assert 0 < before <= surface.seconds(*larger, 4e11) * (1 + 1e-12)
    assert surface.seconds(*shape[:3], 1, 4e11) == 0
