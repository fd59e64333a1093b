"""Copies that take turns at the stages of a model, and hand its gradients on.

Of N copies each has N stages. A copy is never idle for want of work; it waits where a
message, one stage's gradient in h seconds, takes longer than the stage's forward F/N or
backward B/N under which it is sent. In v2 the last copy but one also waits for the
newest weights of all stages but the first, which are two messages away:

t = max(C + N (h - F/N)+ + N (h - B/N)+, and for v2 (N - 1)/N C + 2 h),  C = F + B

Of two copies neither sends both partial sums and sums: v1 waits half as long for them,
v2 for partial sums alone. A ring's all-reduce of W is 2 (N - 1) such messages, by which
h is known. On CPUs nothing hides, and t is C + h for each message.

bytes sent = 2 W, less the last stage but one in v2; W of two copies

for W bytes of gradients. Sums are kept until they are used, in place of a backward's
gradients. When activations are gone, gradients of a stage are held beside: its own, and
two messages; when they are most, the sum that is being sent, and in v1, where all sums
are under way then, a partial sum to come. Times take stages for equal, as they about
are where blocks are.

Source: Fournier and Oyallon 2024, arXiv 2403.08837, section 3, for the cycle; messages
as :mod:`executors.replicas.cyclic` sends them, which tests simulate: equal until h is
more than F/N, within a fifth as long as it is no more than C/N.
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
)
from planner.cost.replicas.all_reduce import traffic_inside
from planner.cost.traffic.collectives import ReplicaGroups
from planner.schema.methods.cyclic import Cyclic
from planner.units import dtype_bytes

__all__ = ["CyclicPricing", "cycle_seconds"]

Array = NDArray[np.float64]

#: Gradients of one stage that are held beside the sums: its own, one that has come,
#: and one that is being sent.
_BESIDE = 3


class CyclicPricing(ReplicaPricing):
    """Price of handing gradients from copy to copy."""

    def __init__(self, synchronisation: Cyclic) -> None:
        self.settings = synchronisation

    def traffic(
        self, rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
    ) -> ReplicaTraffic:
        """Seconds that a step is longer for it, and the bytes that move in it."""
        inside = traffic_inside(rows, groups, context)
        copies = groups.replicate.size.astype(float)
        gradients = _gradient_bytes(rows, context)
        lines = groups.mirror[groups.replicate.which]
        ring = (lines[:, :, 0] + lines[:, :, 1] * gradients[:, None]).min(axis=1)
        hop = ring / np.maximum(2 * (copies - 1), 1.0)
        compute = rows.forward_s + rows.backward_s
        if context.on_gpu:
            period = cycle_seconds(
                self.settings, copies, rows.forward_s, rows.backward_s, hop
            )
        else:
            period = compute + hop * np.where(copies > 2, 2 * copies, copies)
        sent = self._sent_share(rows, copies) * gradients
        return ReplicaTraffic(
            exposed_s=np.where(copies > 1, period - compute, 0.0),
            gathered_bytes=inside.gathered_bytes,
            scattered_bytes=inside.scattered_bytes,
            reduced_bytes=np.zeros_like(sent),
            messaged_bytes=sent,
            sent_bytes=sent,
        )

    def _sent_share(self, rows: ReplicaRows, copies: Array) -> Array:
        """Share of its gradients that the first copy sends. Shape [n]."""
        ends = 1 / copies
        if rows.parts.shape[-1] > 1:
            ends = rows.parts[:, -2]
        kept = ends if self.settings.version == "v2" else 0.0
        more = np.where(copies > 2, 1 - kept, 0.0)
        return np.where(copies > 1, 1 + more, 0.0)

    def held(self, rows: ReplicaRows, context: PricingContext) -> ReplicaBytes:
        """Bytes beside the sums of all stages, which stand for gradients.

        Gradients of a mixed precision are made by the backward, when activations go;
        sums are there before.
        """
        of = context.scalar_bytes
        gradients = _gradient_bytes(rows, context) * (rows.copies > 1)
        early = 0.0 if of.compute == of.stored == of.reduce else 1.0
        messages = 2 if self.settings.version == "v1" else 1
        stage = gradients / rows.copies
        return ReplicaBytes(
            kept=messages * stage + early * gradients, working=_BESIDE * stage
        )


def cycle_seconds(
    settings: Cyclic, copies: Array, forward_s: Array, backward_s: Array, hop_s: Array
) -> Array:
    """Seconds from one step of a copy to its next, once all are under way. Shape [n].

    Args:
        settings: Of the method.
        copies: How many there are. Shape [n].
        forward_s: Of a microbatch, all stages. Shape [n].
        backward_s: The same. Shape [n].
        hop_s: One message, a stage's gradient. Shape [n].
    """
    compute, several = forward_s + backward_s, copies > 2
    sums = copies * np.maximum(hop_s - forward_s / copies, 0.0)
    partial = copies * np.maximum(hop_s - backward_s / copies, 0.0)
    if settings.version == "v1":
        return np.asarray(compute + (sums + partial) * np.where(several, 1.0, 0.5))
    newest = (1 - 1 / copies) * compute + 2 * hop_s
    return np.asarray(np.maximum(compute + sums * several + partial, newest))


def _gradient_bytes(rows: ReplicaRows, context: PricingContext) -> Array:
    """Bytes of a copy's gradients, which are of the weights' dtype. Shape [n]."""
    return np.asarray(rows.trained * dtype_bytes(context.precision.parameter))
