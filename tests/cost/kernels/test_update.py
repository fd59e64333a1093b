"""Price of updating weights."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.kernels.roofline import optimizer_seconds
from planner.schema import Optimizer
from tests.cost.made import device


def test_an_update_is_bound_by_memory() -> None:
    scalars, tensors = np.array([1e9]), np.array([100.0])
    adam, sgd = (
        float(optimizer_seconds(scalars, tensors, device(), o, clip=False)[0])
        for o in (Optimizer(), Optimizer(name="SGD"))
    )
    # AdamW reads weight, gradient and two states and writes all but the gradient.
    assert adam == pytest.approx(7 * 4e9 / 1e12)
    assert sgd == pytest.approx(3 * 4e9 / 1e12)
    clipped = optimizer_seconds(scalars, tensors, device(), Optimizer(), clip=True)
    assert clipped[0] > adam
    on_cpu = device(backend="gloo", kernel_overhead_s=1e-5)
    slow = optimizer_seconds(scalars, tensors, on_cpu, Optimizer(), clip=False)
    assert slow[0] > adam
