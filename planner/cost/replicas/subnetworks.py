"""Copies that each train some of the neurons, dealt out anew every few steps.

Copies compute narrower layers on their own: the model is priced as under tp over all
copies, without tp's collectives. Every J steps a copy's neurons W/n go to their next
owners, and what belongs to no neuron, V, is averaged:

t = (A2A(W/n) + AR(V)) / J, bytes sent = (n - 1)/n (W/n + 2 V) / J

for n copies. Layers of D bytes that are cut both ways count twice D/n^2 in the place of
W/n: what a copy has trained returns to those who keep the layer, D/n each, from whom
others come. Nothing else is kept between exchanges, which take a piece at a time.
Source: Yuan et al. 2022, arXiv 1910.02120.
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
from planner.schema.methods.subnetworks import Subnetworks
from planner.units import dtype_bytes

__all__ = ["SubnetworksPricing"]

Array = NDArray[np.float64]

#: Buffers of a piece on its way: rows, message, what has come, and its new rows.
_BUFFERS = 4


class SubnetworksPricing(ReplicaPricing):
    """Price of dealing out neurons every few steps."""

    def __init__(self, synchronisation: Subnetworks) -> None:
        self.settings = synchronisation

    def traffic(
        self, rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
    ) -> ReplicaTraffic:
        """Seconds that a mean step is longer for it, and the bytes that move in it."""
        copies = groups.replicate.size
        divided, inner, common = _weights(context, copies)
        deal = called_lines(
            "all_to_all",
            groups.replicate,
            context.recipe,
            measured=context.cluster.document.collectives,
            on_gpu=context.on_gpu,
            core_wait_s=context.core_wait_s,
        )
        parts = ((deal, divided), (deal, inner), (deal, inner), (groups.mirror, common))
        seconds = sum(
            seconds_in_pieces(lines[groups.replicate.which], size)
            for lines, size in parts
        )
        divided = divided + 2 * inner
        several = copies > 1
        moved = self.settings.expected_traffic(
            gradients=0.0,
            weights=(divided + common) * several,  # type: ignore[arg-type]
            divided=divided * several,  # type: ignore[arg-type]
        )
        reduced, dealt = (
            np.asarray(moved[kind]) for kind in ("all_reduce", "all_to_all")
        )
        nothing = np.zeros_like(divided)
        return ReplicaTraffic(
            exposed_s=seconds * several / self.settings.local_steps,
            gathered_bytes=nothing,
            scattered_bytes=nothing,
            reduced_bytes=reduced,
            exchanged_bytes=dealt,
            sent_bytes=(2 * reduced + dealt) * (copies - 1) / copies,
        )

    def held(self, rows: ReplicaRows, context: PricingContext) -> ReplicaBytes:
        """Buffers of an exchange, of the largest piece."""
        size = dtype_bytes(context.precision.parameter)
        # No piece is smaller than the largest part of a tensor.
        largest = max(
            (p.numel for p in context.graph.parameters if p.style != "none"), default=0
        )
        nothing = np.zeros_like(rows.trained)
        whole = rows.trained * size
        piece = np.minimum(whole, max(Subnetworks.PIECE_BYTES, largest * size))
        copies = np.asarray(rows.copies, dtype=float)
        # Of all that is cut both ways an equal part, where there are several copies.
        _, inner, _ = _weights(context, copies)
        kept = nothing + inner * copies * (copies > 1)
        return ReplicaBytes(kept=kept, working=nothing + _BUFFERS * piece)


def _weights(context: PricingContext, copies: Array) -> tuple[Array, Array, Array]:
    """Bytes of what a copy trains: cut one way, both ways, and whole. Shapes [n]."""
    counts = context.facts.parameter_counts
    size = dtype_bytes(context.precision.parameter)
    divided = counts.scalars[:, 1].sum() * size / copies
    inner = counts.scalars[:, 2].sum() * size / copies**2
    common = counts.trained[:, 0].sum() * size
    return np.asarray(divided), np.asarray(inner), np.full(len(divided), common)
