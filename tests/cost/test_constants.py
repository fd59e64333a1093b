"""Whose efficiency counts: a calibration's, or what was measured on the spot."""

from __future__ import annotations

import pytest

from planner.cost import RECIPES
from planner.cost.constants import Calibration, DeviceConstants, constants_of
from tests.cost.made import device

FITTED = DeviceConstants(matmul_efficiency=0.5, attention_efficiency=0.4)
OTHERS = DeviceConstants(matmul_efficiency=0.3, attention_efficiency=0.2)
RECIPE = RECIPES["torch"]


def _calibration(default: DeviceConstants | None = None) -> Calibration:
    return Calibration(name="fit", devices={"gpu": FITTED}, default=default)


def test_fitted_constants_go_before_a_datasheet() -> None:
    assert constants_of(device(), RECIPE, _calibration()) == FITTED


def test_devices_without_a_fit_get_the_default() -> None:
    assert constants_of(device("other"), RECIPE, _calibration(OTHERS)) == OTHERS


@pytest.mark.parametrize(
    ("changes", "calibration"),
    [
        ({}, None),
        ({"name": "other"}, _calibration()),
        ({"measured": True}, _calibration(OTHERS)),
        ({"backend": "gloo"}, _calibration(OTHERS)),
    ],
    ids=["no calibration", "not in it", "measured", "CPU"],
)
def test_documents_that_keep_their_own(
    changes: dict[str, object], calibration: Calibration | None
) -> None:
    made = device(**changes, matmul_efficiency=0.61, half_efficiency_flops=3e8)
    found = constants_of(made, RECIPE, calibration)
    assert found.matmul_efficiency == 0.61
    assert found.half_efficiency_flops == 3e8
    assert found.attention_efficiency == RECIPE.attention_forward
