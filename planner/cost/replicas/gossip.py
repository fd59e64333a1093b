"""Copies that average their weights with a few others in each step.

What a step sends is on its way under its forward and backward. A mean step pays what
of the exchange is longer, over the rounds of the topology's cycle:

t = mean over rounds of max(0, AR_G(W) - C), bytes sent = mean of 2 (G - 1)/G W

for W bytes of trained weights on a device, C seconds of compute in a step, and the
round's groups of G copies, of which the slowest counts. What is sent lies beside the
weights: W bytes; Adam with moments that wait sums up gradients: W scalars more.

A copy waits for those of its group alone, and what they send is of before their step.
So one that is late for once is waited for by its group, while others go on:
:func:`run_s` follows copies of unlike speed.
Source: Wang et al. 2025, arXiv 2410.11998, appendix A.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.context import PricingContext
from planner.cost.replicas import (
    ReplicaBytes,
    ReplicaPricing,
    ReplicaRows,
    ReplicaTraffic,
    weight_bytes,
)
from planner.cost.replicas.all_reduce import traffic_inside
from planner.cost.traffic.collectives import Groups, ReplicaGroups, called_lines
from planner.schema.methods.gossip import Gossip, Round, Topology, rounds_of

__all__ = ["GossipPricing", "round_groups", "run_s"]

Array = NDArray[np.float64]


def run_s(compute_s: Array, exchange_s: ArrayLike, rounds: Sequence[Round]) -> Array:
    """Seconds until each copy has done all steps.

    A step of a copy ends when it has computed, and when the exchange that its group
    began with the last of them to begin has ended:

    end_i = max(begin_i + C_i, max_{j in group} begin_j + exchange)

    Args:
        compute_s: Forward and backward of each step. Shape [steps, copies].
        exchange_s: Of each round; one number if all take as long.
        rounds: Of the cycle, see :func:`planner.schema.methods.gossip.rounds_of`.
    Returns:
        Shape [copies].
    """
    sends = np.broadcast_to(np.asarray(exchange_s, dtype=float), len(rounds))
    begin = np.zeros(compute_s.shape[1])
    for step, own in enumerate(compute_s):
        turn = step % len(rounds)
        end = begin + own
        for group in rounds[turn]:
            if len(group) > 1:
                members = list(group)
                came = begin[members].max() + sends[turn]
                end[members] = np.maximum(end[members], came)
        begin = end
    return begin


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Price of the rounds of a topology's cycle.

    Attributes:
        lines: Of the kinds of group of each round. Shapes [kinds, 2, 2].
        sent: Bytes that a copy sends per byte of weights, in each round.
        grouped: Share of rounds in which a copy is not alone.
    """

    lines: tuple[Array, ...]
    sent: Array
    grouped: float


class GossipPricing(ReplicaPricing):
    """Price of averaging weights with a few others in each step."""

    def __init__(self, synchronisation: Gossip) -> None:
        self.settings = synchronisation

    def traffic(
        self, rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
    ) -> ReplicaTraffic:
        """Seconds that a mean step is longer for it, and the bytes that move in it."""
        inside = traffic_inside(rows, groups, context)
        weights = weight_bytes(rows, context)
        hidden = rows.num_microbatches * (rows.forward_s + rows.backward_s)
        hidden = hidden * context.on_gpu
        exposed, reduced, sent = (np.zeros_like(weights) for _ in range(3))
        for index, priced in self._priced(groups.replicate, context):
            chosen = groups.replicate.which == index
            size = weights[chosen]
            pieces = np.maximum(np.ceil(size / Gossip.PIECE_BYTES), 1.0)
            longer = [
                np.maximum(_slowest(lines, size, pieces) - hidden[chosen], 0.0)
                for lines in priced.lines
            ]
            exposed[chosen] = np.mean(longer, axis=0)
            reduced[chosen] = priced.grouped * size
            sent[chosen] = priced.sent.mean() * size
        ways = groups.shard.size
        own = (inside.gathered_bytes + inside.scattered_bytes) * (ways - 1) / ways
        return ReplicaTraffic(
            exposed_s=inside.exposed_s + exposed,
            gathered_bytes=inside.gathered_bytes,
            scattered_bytes=inside.scattered_bytes,
            reduced_bytes=reduced,
            sent_bytes=own + sent,
        )

    def _priced(
        self, replicate: Groups, context: PricingContext
    ) -> Iterator[tuple[int, _Rounds]]:
        """Price the rounds of each distinct group of copies, by its index."""
        shares = context.link_shares
        inside_host = shares.between_hosts * shares.inside
        for index in range(len(replicate.members)):
            near = replicate.bandwidth[index] >= inside_host
            rounds = round_groups(self.settings.topology, replicate, index, near)
            lines = tuple(
                called_lines(
                    "all_reduce",
                    groups,
                    context.recipe,
                    measured=context.cluster.document.collectives,
                    on_gpu=context.on_gpu,
                    core_wait_s=context.core_wait_s,
                )
                for groups in rounds
            )
            sizes = np.array([groups.distinct_size.max() for groups in rounds])
            sent, grouped = 2 * (sizes - 1) / sizes, float((sizes > 1).mean())
            yield index, _Rounds(lines=lines, sent=sent, grouped=grouped)

    def held(self, rows: ReplicaRows, context: PricingContext) -> ReplicaBytes:
        """Bytes of what is on its way, and of gradients that moments wait for."""
        weights = weight_bytes(rows, context)
        waiting = weights if self.settings.commit_every > 1 else 0.0
        return ReplicaBytes(kept=weights + waiting, working=np.zeros_like(weights))


def round_groups(
    topology: Topology, copies: Groups, index: int, near: NDArray[np.bool_]
) -> tuple[Groups, ...]:
    """Kinds of group of each round of a cycle, a distinct group each.

    Args:
        topology: Of the groups.
        copies: Groups of all copies, of several strategies.
        index: Distinct group of them.
        near: Levels inside a host. Shape [levels].
    """
    shape = tuple(int(count) for count in copies.members[index])
    per_host = int(copies.members[index][near].prod())
    found = []
    for kinds in _kinds(topology, math.prod(shape), per_host, shape):
        same = [index] * len(kinds)
        groups = replace(
            copies,
            members=np.array(kinds, dtype=float),
            bandwidth=copies.bandwidth[same],
            latency=copies.latency[same],
            which=np.arange(len(kinds)),
        )
        found.append(groups)
    return tuple(found)


def _slowest(lines: Array, size: Array, pieces: Array) -> Array:
    """Seconds of the slowest kind of group of a round. Shape [n]."""
    fixed, per_byte = lines[:, :, 0, None], lines[:, :, 1, None]
    found = pieces * fixed + per_byte * size
    return np.asarray(found.min(axis=1).max(axis=0))


@cache
def _kinds(
    topology: Topology, copies: int, per_host: int, shape: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Kinds of group of each round, by their members at each level.

    Args:
        topology: Of the groups.
        copies: Number of copies.
        per_host: Copies that share a host.
        shape: Members of all copies at each level, innermost first.
    """
    return tuple(
        tuple({_members(group, shape) for group in groups})
        for groups in rounds_of(topology, copies, per_host)
    )


def _members(group: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Members of a group at each level, as :class:`Groups` has them."""
    found, meeting = [], group
    for count in shape:
        outer = tuple({index // count for index in meeting})
        found.append(-(-len(meeting) // len(outer)))
        meeting = outer
    return tuple(found)
