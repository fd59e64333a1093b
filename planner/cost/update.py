"""Time of the optimizer's update of the weights that a device has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.schema import Optimizer
from planner.schema.cluster import DeviceType

__all__ = ["optimizer_seconds"]

Array = NDArray[np.float64]

#: Passes over memory of one update: (reads + writes of 4-byte scalars, host ops).
#: Counted in torch/optim/adam.py and sgd.py, single-tensor paths.
_UPDATE = {"AdamW": (7.0, 12.0), "Adam": (7.0, 12.0), "SGD": (3.0, 1.0)}
#: Unfused on CPU, each op is a pass of two reads and a write.
_UNFUSED_PASS = 3.0


def optimizer_seconds(
    scalars: Array,
    tensors: Array,
    device: DeviceType,
    optimizer: Optimizer,
    *,
    clip: bool,
) -> Array:
    """Time of one update: bound by memory, fused on GPUs, op by op on CPUs.

    Args:
        scalars: Parameters that the device updates.
        tensors: Tensors they are in.
        device: On which.
        optimizer: Which update.
        clip: Whether gradients are normed and scaled before.
    """
    passes, ops = _UPDATE[optimizer.name]
    if optimizer.name == "SGD" and optimizer.momentum:
        passes, ops = passes + 2, ops + 2
    ops += 3 if clip else 0
    passes += 3 if clip else 0
    if device.backend == "gloo":
        moved = scalars * 4 * ops * _UNFUSED_PASS
        return np.asarray(
            moved / device.memory_bandwidth_bytes_per_s
            + tensors * ops * device.kernel_overhead_s
        )
    return np.asarray(scalars * 4 * passes / device.memory_bandwidth_bytes_per_s)
