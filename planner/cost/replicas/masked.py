"""Copies that train a core of the neurons alone, and all of them every few steps.

A mean step computes the layers between which neurons lie by the share of neurons that
core steps and full steps compute; weak replicas hold up core steps alone. Copies
average the gradients of the core, C, in every step, and strong ones those of all other
neurons, N, in one step of J:

t = AR(C) + AR(N)/J, bytes sent = 2 (n - 1)/n C + 2 (s - 1)/s N/J

for n copies, of which s are strong. Nothing is hidden under the backward. Memory is
that of a full step, with one piece of the gradients on its way.
Source: Mohtashami et al. 2022, arXiv 2106.08895.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import PricingContext
from planner.cost.replicas import (
    ReplicaBytes,
    ReplicaPricing,
    ReplicaRows,
    ReplicaTraffic,
    seconds_in_pieces,
)
from planner.cost.traffic.collectives import ReplicaGroups
from planner.graph.neurons import count_outside
from planner.schema.methods.masked import Masked
from planner.units import dtype_bytes

__all__ = ["MaskedPricing"]

Array = NDArray[np.float64]


class MaskedPricing(ReplicaPricing):
    """Price of averaging gradients of the core, and of all neurons every few steps."""

    def __init__(self, synchronisation: Masked) -> None:
        self.settings = synchronisation

    def traffic(
        self, rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
    ) -> ReplicaTraffic:
        """Seconds that a mean step is longer for it, and the bytes that move in it."""
        settings, copies = self.settings, groups.replicate.size
        strong = np.maximum(copies - len(settings.weak_replicas), 1)
        size = dtype_bytes(context.precision.parameter)
        outside = float(count_outside(context.graph, settings.core_neurons)) * size
        core = np.asarray((rows.trained * size - outside) * (copies > 1))
        others = np.asarray(outside * (strong > 1))
        lines = groups.mirror[groups.replicate.which]
        seconds = [seconds_in_pieces(lines, part) for part in (core, others)]
        full = settings.phases["full"]
        moved = settings.expected_traffic(
            gradients=core + others,  # type: ignore[arg-type]
            weights=core + others,  # type: ignore[arg-type]
            divided=others,  # type: ignore[arg-type]
        )
        nothing = np.zeros_like(core)
        return ReplicaTraffic(
            exposed_s=seconds[0] + full * seconds[1],
            gathered_bytes=nothing,
            scattered_bytes=nothing,
            reduced_bytes=np.asarray(moved["all_reduce"]),
            sent_bytes=2
            * (core * (copies - 1) / copies + full * others * (strong - 1) / strong),
        )

    def held(self, rows: ReplicaRows, context: PricingContext) -> ReplicaBytes:
        """Buffer of the largest piece of gradients on its way."""
        size = dtype_bytes(context.precision.parameter)
        # No piece is smaller than the largest tensor.
        largest = max((p.numel for p in context.graph.parameters), default=0)
        piece = max(Masked.PIECE_BYTES, largest * size)
        several = np.asarray(rows.copies) > 1
        return ReplicaBytes(
            kept=np.zeros_like(rows.trained),
            working=np.minimum(rows.trained * size, piece) * several,
        )
