"""Copies that train on their own and exchange their weights once a period.

Inside a copy ZeRO gathers and reduces as ever. Each of F fragments is exchanged once a
period of H steps, under the compute of as many steps as it may be delayed; a mean step
pays its share of what is left:

t = F/H max(0, AR(W/F) - delay C), bytes sent = 2 (R - 1)/R W/H

for W bytes of trained weights on a device, R copies and C seconds of compute in a step.
Warm-up is left out: it is short beside a run. An outer optimizer keeps the weights of
the last exchange, and a momentum if it has one: W bytes each. Where the largest entries
alone are exchanged, all copies gather them, and what was not sent is W bytes more.
Source: Stich 2019, arXiv 1805.09767; Douillard et al. 2025, 2501.18512.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import PricingContext
from planner.cost.replicas import (
    ReplicaBytes,
    ReplicaPricing,
    ReplicaRows,
    ReplicaTraffic,
    weight_bytes,
)
from planner.cost.replicas.all_reduce import traffic_inside
from planner.cost.traffic.collectives import ReplicaGroups, time_of
from planner.schema.methods.local_steps import LocalSteps
from planner.units import dtype_bytes

__all__ = ["LocalStepsPricing"]

Array = NDArray[np.float64]


class LocalStepsPricing(ReplicaPricing):
    """Price of exchanging weights every few steps."""

    def __init__(self, synchronisation: LocalSteps) -> None:
        self.settings = synchronisation

    def traffic(
        self, rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
    ) -> ReplicaTraffic:
        """Seconds that a mean step is longer for it, and the bytes that move in it."""
        inside = traffic_inside(rows, groups, context)
        settings, weights = self.settings, weight_bytes(rows, context)
        sent = settings.expected_traffic(gradients=0.0, weights=1.0)["all_reduce"]
        lines = groups.mirror[groups.replicate.which]
        fragment = weights / settings.fragments
        pieces = np.maximum(np.ceil(fragment / LocalSteps.PIECE_BYTES), 1.0)
        exchange = pieces * (
            lines[:, :, 0] + lines[:, :, 1] * (fragment / pieces)[:, None]
        ).min(axis=1)
        gathered = self._gathered(rows, context)
        if settings.top:
            size = gathered / settings.fragments
            known = context.cluster.document.collectives
            exchange = pieces * time_of(
                "all_gather", size / pieces, groups.replicate, known
            )
        gathered = gathered / settings.period
        compute = rows.num_microbatches * (rows.forward_s + rows.backward_s)
        hidden = settings.delay * compute if context.on_gpu else 0.0
        exposed = np.maximum(exchange - hidden, 0.0) / settings.interval
        ways, copies = groups.shard.size, groups.replicate.size
        reduced = np.where(copies > 1, sent * weights, 0.0)
        own = (inside.gathered_bytes + inside.scattered_bytes) * (ways - 1) / ways
        return ReplicaTraffic(
            exposed_s=inside.exposed_s + exposed,
            gathered_bytes=inside.gathered_bytes + gathered,
            scattered_bytes=inside.scattered_bytes,
            reduced_bytes=reduced,
            sent_bytes=own + (2 * reduced + gathered) * (copies - 1) / copies,
        )

    def _gathered(self, rows: ReplicaRows, context: PricingContext) -> Array:
        """Bytes of the largest entries of all copies in a period. Shape [n].

        Exact where a device keeps whole weights; else its share of the chunks.
        """
        settings = self.settings
        if not settings.top:
            return np.zeros(len(rows.pp))
        shapes = [p.shape for p in context.graph.parameters if p.trainable]
        size = dtype_bytes(context.precision.parameter)
        whole = float(sum(math.prod(shape) for shape in shapes)) * size
        share = weight_bytes(rows, context) / max(whole, 1.0)
        one = settings.gathered_bytes(shapes, 1)
        return np.asarray(rows.copies * one * share * (rows.copies > 1))

    def held(self, rows: ReplicaRows, context: PricingContext) -> ReplicaBytes:
        """Bytes that the outer optimizer keeps, and of what is on its way."""
        settings = self.settings
        weights = weight_bytes(rows, context)
        offloads = settings.offload and context.on_gpu
        copies = 0 if offloads else settings.outer_copies
        fragment = weights / settings.fragments
        piece = np.minimum(fragment, LocalSteps.PIECE_BYTES)
        if settings.top:
            # Two sums, a message in whole chunks, and the messages of all.
            chunk = 4 * settings.top + 3 * settings.top // 2
            messages = self._gathered(rows, context)
            padded = messages / rows.copies / chunk * LocalSteps.CHUNK * 4
            part = piece / np.maximum(weights, 1.0)
            piece = 2 * piece + part * (padded + messages)
        if settings.fewest_copies and not context.on_gpu:
            # A message that can be sent again, and what came of it, in host memory.
            piece = np.maximum(piece, 2 * fragment)
        # Under way through the forwards and backwards of the next steps.
        flying = fragment if settings.delay else np.zeros_like(weights)
        return ReplicaBytes(kept=copies * weights + flying, working=piece)
