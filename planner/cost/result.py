"""Costs of strategies: seconds by part, bytes by category."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["PARTS", "Cost", "CostTable", "MemoryParts"]

Array = NDArray[np.float64]

#: Parts of a step's critical path; they sum to the step time. Compute and the pipeline
#: are as if every process had its own cores: what CPU processes that share cores slow
#: each other down there is ``shared_cores``.
PARTS = (
    "compute",
    "recompute",
    "tensor",
    "context",
    "expert",
    "pipeline_bubble",
    "pipeline_transfer",
    "shared_cores",
    "data_parallel",
    "optimizer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes on one device by category; all of one shape."""

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    buffers: Array
    reserve: Array

    @property
    def total(self) -> Array:
        """Sum of the categories."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.buffers
            + self.reserve
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time and memory of one strategy.

    Attributes:
        step_time_s: One optimizer step.
        breakdown_s: Seconds by part, see :data:`PARTS`; they sum to the step time.
        memory: Of one device of each pp rank; arrays of shape [pp].
        limit_bytes: What a device of each pp rank may use. Shape [pp].
        device_type: Index of the slowest device type of each pp rank. Shape [pp].
        link_bytes: Bytes one device sends per step, by axis.
        collective_bytes: Payload per step of the busiest device, by kind of call.
        fidelity: Which of the two models priced it.
        efficiency: Progress of a sample over that of one of exact training.
        caution: What strategies are ranked by over the step time: more than 1 where
            the context has a risk, see :mod:`planner.cost.evidence`.
        host_bytes: Of one device of each pp rank that lie in its host's memory. Shape
            [pp], or [1] where none do.
        host_limit_bytes: Of them that a device may have.
    """

    step_time_s: float
    breakdown_s: dict[str, float]
    memory: MemoryParts
    limit_bytes: Array
    device_type: NDArray[np.int64]
    link_bytes: dict[str, float]
    collective_bytes: dict[str, float]
    fidelity: Literal["analytic", "simulated"]
    efficiency: float = 1.0
    caution: float = 1.0
    host_bytes: Array = field(default_factory=lambda: np.zeros(1))
    host_limit_bytes: float = math.inf

    @property
    def fits(self) -> bool:
        """True if every device, and every host, stays within its limit."""
        return self.lack_bytes <= 0

    @property
    def lack_bytes(self) -> float:
        """Bytes that a device lacks, or in its host's memory; 0 or less if it fits."""
        device = float((self.memory.total - self.limit_bytes).max())
        return max(device, float(self.host_bytes.max()) - self.host_limit_bytes)

    @property
    def peak_memory_bytes(self) -> float:
        """Peak of the fullest device."""
        return float(self.memory.total.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Time and memory of many strategies; arrays of shape [n].

    Attributes:
        step_time_s: One optimizer step.
        parts_s: By part, shape [n, PARTS].
        memory_bytes: Peak of the fullest device.
        excess_bytes: By how much the fullest device is over its limit; negative if
            everything fits.
        efficiency: Of all rows, as in :class:`Cost`.
        caution: As in :class:`Cost`. One for all rows, or shape [n].
    """

    step_time_s: Array
    parts_s: Array
    memory_bytes: Array
    excess_bytes: Array
    efficiency: float = 1.0
    caution: Array | float = 1.0

    def __len__(self) -> int:
        return len(self.step_time_s)

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Mask of the strategies that fit in memory. Shape [n]."""
        return np.asarray(self.excess_bytes <= 0)
