"""Copies that each train some of the residual blocks, dealt out anew in each round.

Of B equal residual blocks a copy has d, and skips the others: its weights, compute,
activations, gradients and optimizer states are d/B of those blocks', and all of the
other units'. Every J steps the blocks go to the copies that have them next, C bytes of
each copy on average, and what all copies have, V, is averaged:

t = (A2A(C) + AR(V)) / J, bytes sent = (n - 1)/n (C + 2 V) / J

for n copies, where C is B/n blocks, and twice the d - B/n that are shared. Nothing is
kept between exchanges, which take a piece at a time.
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
from planner.cost.traffic.collectives import ReplicaGroups, called_lines
from planner.schema.methods.block_subnetworks import BlockSubnetworks
from planner.units import dtype_bytes

__all__ = ["BlockSubnetworksPricing"]

Array = NDArray[np.float64]

#: Buffers of a piece on its way: values, message, and what has come of two messages.
_BUFFERS = 4


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
        blocks, common = _weight_bytes(context)
        count = context.facts.residual_blocks.sum()
        dealt = blocks * self.settings.passed(copies, count) / max(count, 1)
        averaged = np.full(len(copies), common)
        deal = called_lines(
            "all_to_all",
            groups.replicate,
            context.recipe,
            measured=context.cluster.document.collectives,
            on_gpu=context.on_gpu,
            core_wait_s=context.core_wait_s,
        )
        seconds = sum(
            seconds_in_pieces(lines[groups.replicate.which], size)
            for lines, size in ((deal, dealt), (groups.mirror, averaged))
        )
        moved = self.settings.expected_traffic(
            gradients=0.0,
            weights=(dealt + averaged) * several,
            divided=dealt,
        )
        reduced, exchanged = (
            np.asarray(moved[kind]) for kind in ("all_reduce", "all_to_all")
        )
        nothing = np.zeros_like(averaged)
        return ReplicaTraffic(
            exposed_s=seconds * several / self.settings.period,
            gathered_bytes=nothing,
            scattered_bytes=nothing,
            reduced_bytes=reduced,
            exchanged_bytes=exchanged,
            sent_bytes=(2 * reduced + exchanged) * (copies - 1) / copies,
        )

    def held(self, rows: ReplicaRows, context: PricingContext) -> ReplicaBytes:
        """Buffers of the largest piece of weights on its way."""
        size = dtype_bytes(context.precision.parameter)
        copies = np.asarray(rows.copies)
        count = int(context.facts.residual_blocks.sum())
        # No piece is smaller than the largest tensor, or than a copy's of its blocks.
        largest = max((p.numel for p in context.graph.parameters), default=0) * size
        depth = self.settings.depth(copies, count)
        piece = np.maximum(BlockSubnetworks.PIECE_BYTES, largest * depth)
        blocks, common = _weight_bytes(context)
        dealt = np.minimum(blocks * depth / max(count, 1), piece)
        return ReplicaBytes(
            kept=np.zeros_like(rows.trained),
            working=np.maximum(_BUFFERS * dealt, np.minimum(common, piece))
            * (copies > 1),
        )


def _weight_bytes(context: PricingContext) -> tuple[float, float]:
    """Bytes of the trained weights of all equal blocks, and of all other units."""
    trained = context.facts.parameter_counts.trained.sum(axis=(0, 1))
    trained = trained * dtype_bytes(context.precision.parameter)
    blocks = context.facts.residual_blocks
    return float(trained[blocks].sum()), float(trained[~blocks].sum())
