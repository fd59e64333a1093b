"""Price of updating weights."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.kernels.roofline import optimizer_seconds
from planner.schema import Optimizer
from planner.schema.cluster import DeviceType
from tests.cost.made import device


def seconds(kind: DeviceType, optimizer: Optimizer, *, clip: bool = False) -> float:
    """Time of 10^9 scalars in 100 tensors, on the second of two types."""
    types, other = np.array([1]), device("other", memory_bandwidth_bytes_per_s=1.0)
    scalars, tensors = np.array([1e9]), np.array([100.0])
    found = optimizer_seconds(
        scalars, tensors, types, (other, kind), optimizer, clip=clip
    )
    return float(found[0])


def test_an_update_is_bound_by_memory() -> None:
    adam = seconds(device(), Optimizer())
    # AdamW reads weight, gradient and two states and writes all but the gradient.
    assert adam == pytest.approx(7 * 4e9 / 0.72e12)
    sgd = seconds(device(), Optimizer(name="SGD"))
    assert sgd == pytest.approx(3 * 4e9 / 0.72e12)
    clipped = seconds(device(), Optimizer(), clip=True)
    assert clipped == pytest.approx(10 * 4e9 / 0.72e12)
    # Op by op on CPUs: 12 passes of two reads and a write, and as many launches.
    on_cpu = device(backend="gloo", kernel_overhead_s=1e-5)
    slow = seconds(on_cpu, Optimizer())
    assert slow == pytest.approx(12 * (3 * 4e9 / 1e12 + 100 * 1e-5))
