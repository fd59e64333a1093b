"""Copies that train on their own and average their weights once a period.

Inside a copy ZeRO gathers and reduces as ever. At the end of a period nothing is left
to compute that could hide the average, of which a mean step pays its share:

t = 1/period AR(W), bytes sent = 2 (R - 1)/R W/period

for W bytes of trained weights on a device and R copies.
Source: Stich 2019, arXiv 1805.09767.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import PricingContext
from planner.cost.replicas import ReplicaBytes, ReplicaRows, ReplicaTraffic
from planner.cost.replicas.all_reduce import replica_traffic
from planner.cost.traffic.collectives import ReplicaGroups
from planner.schema.methods import Synchronisation
from planner.schema.methods.local_steps import LocalSteps
from planner.units import dtype_bytes

__all__ = ["LocalStepsPricing"]

Array = NDArray[np.float64]


class LocalStepsPricing:
    """Price of averaging weights every few steps."""

    def __init__(self, synchronisation: Synchronisation) -> None:
        self.synchronisation = synchronisation

    def seconds(
        self, rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
    ) -> Array:
        """Seconds that a mean step is longer for it. Shape [n]."""
        return self.traffic(rows, groups, context).exposed_s

    def traffic(
        self, rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
    ) -> ReplicaTraffic:
        """The same seconds, and the bytes that move in a mean step."""
        alone = replace(groups, mirror=np.zeros_like(groups.mirror))
        inside = replica_traffic(
            rows, alone, context.precision, context.recipe, on_gpu=context.on_gpu
        )
        weights = _weight_bytes(rows, groups, context)
        sent = self.synchronisation.expected_traffic(gradients=0.0, weights=1.0)
        lines = groups.mirror[groups.replicate.which]
        pieces = np.maximum(np.ceil(weights / LocalSteps.PIECE_BYTES), 1.0)
        average = pieces * (
            lines[:, :, 0] + lines[:, :, 1] * (weights / pieces)[:, None]
        ).min(axis=1)
        ways, copies = groups.shard.size, groups.replicate.size
        reduced = np.where(copies > 1, sent * weights, 0.0)
        own = (inside.gathered_bytes + inside.scattered_bytes) * (ways - 1) / ways
        return ReplicaTraffic(
            exposed_s=inside.exposed_s + sent * average,
            gathered_bytes=inside.gathered_bytes,
            scattered_bytes=inside.scattered_bytes,
            reduced_bytes=reduced,
            sent_bytes=own + 2 * reduced * (copies - 1) / copies,
        )

    def held(self, rows: ReplicaRows, context: PricingContext) -> ReplicaBytes:
        """One piece of the weights at a time, copied to be averaged."""
        size = dtype_bytes(context.precision.parameter)
        nothing = np.zeros(len(rows.pp))
        piece = np.minimum(rows.trained * size, LocalSteps.PIECE_BYTES)
        return ReplicaBytes(kept=nothing, working=piece)


def _weight_bytes(
    rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
) -> Array:
    """Bytes of the trained weights that a device keeps. Shape [n]."""
    size = dtype_bytes(context.precision.parameter)
    return np.asarray(rows.trained * size / groups.shard.size)
