"""Copies that each train some of the residual blocks, dealt out anew in each round.

Of B equal residual blocks a copy has d, and skips the others: its compute, activations,
gradients and optimizer states are d/B of those blocks', and all of the other units'.
It keeps the weights of all, W. Every J steps they are averaged, a block's over the
copies that had it; the others add zeros to its sum:

t = AR(W)/J, bytes sent = 2 (n - 1)/n W/J

for n copies. Nothing is kept between exchanges, which take a piece at a time.
Source: Dun et al. 2022, arXiv 2107.00961.
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
from planner.schema.methods.block_subnetworks import BlockSubnetworks
from planner.units import dtype_bytes

__all__ = ["BlockSubnetworksPricing"]

Array = NDArray[np.float64]


class BlockSubnetworksPricing(ReplicaPricing):
    """Price of dealing out residual blocks in each round."""

    def __init__(self, synchronisation: BlockSubnetworks) -> None:
        self.settings = synchronisation

    def traffic(
        self, rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
    ) -> ReplicaTraffic:
        """Seconds that a mean step is longer for it, and the bytes that move in it."""
        copies = groups.replicate.size
        several = copies > 1
        weights = np.full(len(copies), _weight_bytes(context))
        lines = groups.mirror[groups.replicate.which]
        moved = self.settings.expected_traffic(
            gradients=0.0,
            weights=weights * several,  # type: ignore[arg-type]
        )
        reduced = np.asarray(moved["all_reduce"])
        nothing = np.zeros_like(weights)
        return ReplicaTraffic(
            exposed_s=seconds_in_pieces(lines, weights)
            * several
            / self.settings.period,
            gathered_bytes=nothing,
            scattered_bytes=nothing,
            reduced_bytes=reduced,
            sent_bytes=2 * reduced * (copies - 1) / copies,
        )

    def held(self, rows: ReplicaRows, context: PricingContext) -> ReplicaBytes:
        """Buffer of the largest piece of weights on its way."""
        size = dtype_bytes(context.precision.parameter)
        # No piece is smaller than the largest tensor.
        largest = max((p.numel for p in context.graph.parameters), default=0) * size
        piece = max(BlockSubnetworks.PIECE_BYTES, largest)
        several = np.asarray(rows.copies) > 1
        return ReplicaBytes(
            kept=np.zeros_like(rows.trained),
            working=np.minimum(_weight_bytes(context), piece) * several,
        )


def _weight_bytes(context: PricingContext) -> float:
    """Bytes of all trained weights: a copy keeps those of blocks that it skips."""
    trained = float(context.facts.parameter_counts.trained.sum())
    return trained * dtype_bytes(context.precision.parameter)
