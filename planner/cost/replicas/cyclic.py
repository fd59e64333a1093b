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

Sharded copies send weights for forward and backward, too, where the next copy does not
have them:

bytes sent = 3 W less 2 (W_o + W_N) + W_N, of equal stages 3 (N - 1)/N W

for W_o of the stage that the next copy owns and W_N of the last, as copy 0 does. The
backward's weights and sums are one message, in 2 h. A receive begins one slot ahead,
so that a copy cannot be far behind the one before it, where backwards are longer:

t = max(C + (b - f)+ + N/2 (b - 2f)+ + 2h, f + b + 4 (N - 1) h),
    f = F/N, b = B/N

The second is 3 (N - 1) h, what is sent, with the time that copies wait for each other
to receive. When activations are most a copy holds its own stage's weights and states,
the weights of the last stage, those of the one before, which come, and sums of both.

Source: Fournier and Oyallon 2024, arXiv 2403.08837, section 3, for the cycle; messages
as :mod:`executors.replicas.cyclic` sends them, which tests simulate: equal until h is
more than F/N, within a fifth as long as it is no more than C/N, and within a fifth as
:mod:`executors.replicas.sharded_cyclic` does.
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

__all__ = ["CyclicPricing", "cycle_seconds", "held_shares", "turn_shares"]

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
        share = self._sent_share(rows, copies)
        if context.on_gpu:
            period = cycle_seconds(
                self.settings, copies, rows.forward_s, rows.backward_s, hop
            )
        else:
            period = compute + hop * self._messages(copies)
        sent = share * gradients
        return ReplicaTraffic(
            exposed_s=np.where(copies > 1, period - compute, 0.0),
            gathered_bytes=inside.gathered_bytes,
            scattered_bytes=inside.scattered_bytes,
            reduced_bytes=np.zeros_like(sent),
            messaged_bytes=sent,
            sent_bytes=sent,
        )

    def _messages(self, copies: Array) -> Array:
        """Messages of a stage's gradient, in a step of a copy. Shape [n]."""
        if self.settings.sharded:
            return 3 * (copies - 1)
        return np.where(copies > 2, 2 * copies, copies)

    def _sent_share(self, rows: ReplicaRows, copies: Array) -> Array:
        """Share of its gradients that the first copy sends. Shape [n]."""
        if self.settings.sharded:
            count = rows.parts.shape[-1]
            if count > 1:
                return np.asarray(rows.parts @ self.settings.shares_sent(0, count))
            return np.asarray(3 * (1 - 1 / copies))
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
        if self.settings.sharded:
            return self._held_of_shards(rows, context)
        gradients = _gradient_bytes(rows, context) * (rows.copies > 1)
        early = _made_late(context)
        messages = 2 if self.settings.version == "v1" else 1
        stage = gradients / rows.copies
        return ReplicaBytes(
            kept=messages * stage + early * gradients, working=_BESIDE * stage
        )

    def _held_of_shards(
        self, rows: ReplicaRows, context: PricingContext
    ) -> ReplicaBytes:
        """Bytes where copies keep a stage each, less those of all stages. Shapes [n].

        Of the fullest copy; of equal copies where stages are not known.
        """
        weights = _gradient_bytes(rows, context)
        copies = np.asarray(rows.copies, dtype=float)
        of_states = context.scalar_bytes.states
        of_states /= dtype_bytes(context.precision.parameter)
        own, held, sums = 1 / copies, np.minimum(3, copies) / copies, 2 / copies
        turns = np.zeros((len(weights), 0))
        if rows.parts.shape[-1] > 1:
            each, later = held_shares(rows.parts), turn_shares(rows.parts)
            total = each @ np.array([of_states, 1.0, 1.0])
            own, held, sums = each[np.arange(len(total)), total.argmax(axis=1)].T
            later = later + (of_states * each[..., 0])[..., None]
            turns = later.max(axis=1) - total.max(axis=1)[:, None]
        several = weights * (copies > 1)
        return ReplicaBytes(
            kept=several * (sums - 1 + _made_late(context)),
            working=np.zeros_like(weights),
            weights=several * (held - 1),
            states=several * (own - 1) * of_states,
            turns=several[:, None] * turns,
        )


def _made_late(context: PricingContext) -> float:
    """Share of gradients that a step without the method has not made at its peak.

    Those of a mixed precision, all of which its backward makes when activations go.
    """
    of = context.scalar_bytes
    return 0.0 if of.compute == of.stored == of.reduce else 1.0


def held_shares(parts: Array) -> Array:
    """Shares of optimizer states, weights and gradients that each copy holds.

    When the last stage's backward begins, of sharded weights.

    Args:
        parts: Share of each stage. Shape [n, copies].

    Returns:
        Shape [n, copies, 3].
    """
    own = parts[:, ::-1]
    last, before = parts[:, -1:], parts[:, -2:-1]
    copy = np.arange(parts.shape[-1])
    # Of the stage before the last one the owner makes a message, unless it is the last.
    is_last_owner = (copy == 1) & (len(copy) == 2)
    weights = own + last * (copy != 0) + before * ~is_last_owner
    return np.stack(np.broadcast_arrays(own, weights, last + before), axis=-1)


def turn_shares(parts: Array) -> Array:
    """Shares of weights and gradients that each copy holds in each stage's backward.

    Its own; those of the stage at work, of the one before, which come, and of the one
    behind, which are sent; and gradients that backward makes.

    Args:
        parts: Share of each stage. Shape [n, copies].

    Returns:
        Shape [n, copies, stages].
    """
    stages = np.arange(parts.shape[-1])
    # Weights and a sum; of the own stage, what there is of these to be sent.
    inner = (stages > 0) & (stages < stages[-1])
    own = stages[::-1, None] == stages
    each = parts[:, None, :] * np.where(own & ~inner, 1.0, 2.0)
    around = np.pad(each, ((0, 0), (0, 0), (1, 1)))
    # Activations of the last stage are there until its gradients are.
    made = parts * (stages < stages[-1])
    held = each + around[..., :-2] + around[..., 2:] + made[:, None, :]
    return np.asarray(held + parts[:, ::-1, None])


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
    if settings.sharded:
        forward, backward = forward_s / copies, backward_s / copies
        behind = np.maximum(backward - forward, 0.0)
        more = np.maximum(backward - 2 * forward, 0.0) * copies / 2
        waiting = compute + behind + more + 2 * hop_s
        sending = forward + backward + 4 * (copies - 1) * hop_s
        return np.asarray(np.maximum(waiting, sending))
    sums = copies * np.maximum(hop_s - forward_s / copies, 0.0)
    partial = copies * np.maximum(hop_s - backward_s / copies, 0.0)
    if settings.version == "v1":
        return np.asarray(compute + (sums + partial) * np.where(several, 1.0, 0.5))
    newest = (1 - 1 / copies) * compute + 2 * hop_s
    return np.asarray(np.maximum(compute + sums * several + partial, newest))


def _gradient_bytes(rows: ReplicaRows, context: PricingContext) -> Array:
    """Bytes of a copy's gradients, which are of the weights' dtype. Shape [n]."""
    return np.asarray(rows.trained * dtype_bytes(context.precision.parameter))
