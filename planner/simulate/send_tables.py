"""Time of send tables on a network's links.

A step begins when the one before it has ended. A message takes its link's latency, and
as long as the busiest of what it passes: its own link, and what its source's or
destination's side shares with other messages of the step, such as a host's network
interface.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.errors import TopologyError
from planner.schema.send_tables import SendTable

__all__ = ["Network", "SharedLinks", "table_seconds"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLinks:
    """Links that all messages between a domain and others share.

    Attributes:
        domain: Of each rank, from 0. Shape [ranks].
        capacity: Bytes/s of each domain's link, each way. Shape [domains]. None: its
            messages take turns, each at the bandwidth of its own link.
        within: If given, only messages between ranks of equal numbers pass. Shape
            [ranks].
    """

    domain: IntArray
    capacity: FloatArray | None = None
    within: IntArray | None = None

    def passes(self, source: IntArray, destination: IntArray) -> NDArray[np.bool_]:
        """Mask of the messages that go over these links, of the arguments' shape."""
        found = self.domain[source] != self.domain[destination]
        if self.within is not None:
            found &= self.within[source] == self.within[destination]
        return np.asarray(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links between the ranks of one group.

    Attributes:
        bandwidth: Bytes/s from a rank to another that alone sends. Shape [n, n].
        latency: Seconds of a message. Shape [n, n].
        shared: What several messages share.

    Raises:
        TopologyError: If the shapes differ, or a link between two ranks has no
            bandwidth.
    """

    bandwidth: FloatArray
    latency: FloatArray
    shared: tuple[SharedLinks, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.bandwidth)
        if self.bandwidth.shape != (n, n) or self.latency.shape != (n, n):
            raise TopologyError(
                f"bandwidth of shape {self.bandwidth.shape} and latency of shape "
                f"{self.latency.shape}; give both [ranks, ranks]"
            )
        off = ~np.eye(n, dtype=bool)
        if not (self.bandwidth[off] > 0).all():
            first = np.argwhere(off & ~(self.bandwidth > 0))[0]
            raise TopologyError(
                f"no bandwidth from rank {first[0]} to rank {first[1]}; give bytes/s "
                f"above 0"
            )

    @property
    def ranks(self) -> int:
        """Ranks that it joins."""
        return len(self.bandwidth)


def table_seconds(
    table: SendTable, network: Network, size_bytes: ArrayLike
) -> FloatArray:
    """Seconds until the last step of a table has ended.

    Args:
        table: For as many ranks as the network has.
        network: That joins them.
        size_bytes: Of the whole tensor. Shape [...].
    Returns:
        Of the same shape.
    Raises:
        TopologyError: If the numbers of ranks differ.
    """
    if table.ranks != network.ranks:
        raise TopologyError(
            f"a table for {table.ranks} ranks on a network of {network.ranks}; give "
            f"one for as many"
        )
    sizes = np.asarray(size_bytes, dtype=float)
    if not table.sends:
        return np.zeros(sizes.shape)
    step, source, destination, chunk, _ = np.array(table.sends, dtype=np.int64).T
    n = network.ranks
    key, message = np.unique((step * n + source) * n + destination, return_inverse=True)
    share = np.bincount(message, weights=np.asarray(table.shares)[chunk])
    step, source, destination = key // (n * n), key // n % n, key % n
    slope = share / network.bandwidth[source, destination]
    for links in network.shared:
        passes = links.passes(source, destination)
        for end in (source, destination):
            slot = step * n + links.domain[end]
            if links.capacity is None:
                takes = share / network.bandwidth[source, destination]
            else:
                takes = share / links.capacity[links.domain[end]]
            load = np.bincount(slot, weights=np.where(passes, takes, 0.0))
            slope = np.where(passes, np.maximum(slope, load[slot]), slope)
    times = network.latency[source, destination] + sizes[..., None] * slope
    # Messages are sorted by step.
    first = np.flatnonzero(np.diff(step, prepend=-1))
    return np.asarray(np.maximum.reduceat(times, first, axis=-1).sum(axis=-1))
