"""Tiles and waves of products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cluster import device_type, device_type_names
from planner.cost import CostModel
from planner.cost.constants import Calibration, DeviceConstants
from planner.cost.kernels.blocks import KernelTable
from planner.cost.kernels.shapes import divide, tile_factors
from planner.graph import Kernel
from tests.cost.made import device, hosts, row, setting_for, table_of, uniform_graph


def factors(
    m: int,
    n: int,
    k: int,
    processors: int | None = 8,
    *,
    kind: str = "matmul",
    batch: int = 1,
    ep: int = 1,
    weights: float = 1.0,
    backend: str = "nccl",
) -> tuple[float, float]:
    """Time of one product, forward and backward."""
    kernel = Kernel(
        kind=kind,  # type: ignore[arg-type]
        m=m,
        n=n,
        k=k,
        batch=batch,
        forward_flops=2.0 * m * n * k * batch,
        backward_flops=4.0 * m * n * k * batch,
        weight_bytes=weights,
    )
    share = 1.0 if ep > 1 else 0.0
    table, one = KernelTable.build([(0, share, kernel)]), np.ones(1)
    # As many tokens as leave m of them: experts get those of ep ranks.
    part = divide(table, one / ep, [one, one, one * ep], one)
    found = tile_factors(table, part, device(processors=processors, backend=backend))
    return float(found[0][0, 0]), float(found[1][0, 0])


def test_whole_waves_of_large_tiles_cost_nothing() -> None:
    # 4 x 2 tiles of 256 x 128, on eight processors.
    assert factors(1024, 256, 512)[0] == 1.0


def test_a_tile_too_many_is_a_wave_more_of_the_best_tiles() -> None:
    # 9 large tiles would be two waves, 1.78; 36 of 128 x 64 are five of eight.
    assert factors(9 * 256, 128, 512)[0] == pytest.approx(40 / 36 / 0.85)


def test_long_sums_are_split_where_tiles_are_few() -> None:
    short, long = (factors(256, 128, k, 4)[0] for k in (512, 8192))
    # Four small tiles on four processors; or two of twice the size in two parts each.
    assert short == pytest.approx(4 * 128 * 64 / (256 * 128) / 0.85)
    assert long == pytest.approx(1 / 0.95 / 0.9)


def test_weight_gradients_sum_over_rows() -> None:
    few, many = (factors(m, 256, 256, 64)[1] for m in (512, 512 * 64))
    assert many < few
    # Without weights there is one product in backward, as large as the forward's.
    forward, backward = factors(1024, 256, 256, weights=0.0)
    assert forward == backward == 1.0


def test_experts_on_fewer_devices_are_more_tiles_at_once() -> None:
    # Two experts of 4 tiles fill eight processors, one does not.
    assert factors(1024, 128, 512, batch=2)[0] == 1.0
    assert factors(1024, 128, 512, batch=2, ep=2)[0] > 1.0


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 20_000),
    n=st.integers(1, 20_000),
    k=st.integers(1, 20_000),
    processors=st.integers(1, 300),
)
def test_nothing_is_faster_than_its_flops(
    m: int, n: int, k: int, processors: int
) -> None:
    assert min(factors(m, n, k, processors)) >= 1.0


def test_tiles_alone_count_where_processors_are_not_known() -> None:
    assert factors(130, 128, 512, None) == pytest.approx((256 / 130,) * 2)
    assert factors(130, 128, 512, 8, backend="gloo") == (1.0, 1.0)
    assert factors(1024, 192, 512, 8, kind="conv") == (1.0, 1.0)


def test_fitted_constants_count_waves_and_documents_do_not() -> None:
    graph = uniform_graph(2)

    def step_s(processors: int | None, ramp: float) -> float:
        setting = setting_for(graph, hosts((1, 1, device(processors=processors))))
        constants = DeviceConstants(
            matmul_efficiency=1.0, attention_efficiency=1.0, inner_ramp=ramp
        )
        fitted = Calibration(
            name="made", devices={"gpu": constants}, recipes={}, default=constants
        )
        found = CostModel(replace(setting, calibration=fitted))
        return float(found.table(table_of(row())).step_time_s[0])

    assert step_s(1000, 1e-6) > 1.2 * step_s(None, 1e-6)
    assert step_s(1000, 0.0) == step_s(None, 0.0)


@pytest.mark.parametrize("name", device_type_names())
def test_every_chip_says_how_many_processors_it_has(name: str) -> None:
    found = device_type(name).processors
    assert found is not None
    # From one die of a K80 (13) to the MI325X (304).
    assert 13 <= found <= 304
